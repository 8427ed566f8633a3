"""Verifies that a program is well formed, from the program alone, after each pass (as MLIR's verifier does).

Checks that names are unique, that nodes come after what they read and wait for, that references exist, that types and
shapes of operands, results, variables and functions agree, that each effect is a node and no update or exchange is left
out of the effects, and that no two exchanges have the same key. Whether a node computes the right values is not
checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from math import prod

from whale.errors import REPORT_FAULT, PlanError, ProgramError
from whale.ir.ops import (
    ADDS,
    BRANCHES,
    CALLS,
    EXCHANGES,
    IDENTITIES,
    LOOPS,
    ON_DEVICE,
    RANK_REDUCTIONS,
    RESHAPES,
    ROW_EXCHANGES,
    UPDATES,
)
from whale.ir.program import Node, Program, Ref, find_waited_for, iterate_function_refs, sort_nodes
from whale.ir.values import Func, Tensor, TensorType

# Elementwise on operands that broadcast; all of one type, or of one type with a bool as the result.
_ARITHMETIC = frozenset(
    "Add AddV2 Sub Mul Div RealDiv FloorDiv FloorMod DivNoNan Maximum Minimum SquaredDifference Pow".split()
)
_COMPARISONS = frozenset("Greater GreaterEqual Less LessEqual Equal NotEqual".split())
# One operand, one result, of one type and shape.
_UNARY = IDENTITIES | frozenset(
    "Neg Exp Log Log1p Sqrt Rsqrt Square Tanh Sigmoid Relu Softplus Erf Sign Floor Reciprocal ZerosLike".split()
)
_MATMULS = {"MatMul": ("transpose_a", "transpose_b"), "BatchMatMulV2": ("adj_x", "adj_y")}
_DEVICE_EXCHANGES = frozenset(ON_DEVICE.values())
_WITH_KEYS = EXCHANGES | _DEVICE_EXCHANGES
_STAY = UPDATES | _WITH_KEYS  # ops with side effects, on which some output or effect of the program has to depend


class _BrokenProgramError(Exception):
    """Carries what is wrong with a node from a check to ``_verify_graph``, which raises a ProgramError that names the
    node.
    """

    def __init__(self, given: object, expected: object) -> None:
        super().__init__(f"{given}; expected {expected}")
        self.given, self.expected = given, expected


def verify(program: Program, after: str = "") -> None:
    """Checks that a program and its functions are well formed.

    Args:
      after: name of the pass that made the program, for the error; "" if none.

    Raises:
      ProgramError: the program is malformed; the error names the pass, the node and what is wrong.
    """
    keys: dict[tuple[str, str], tuple[str, str]] = {}
    for graph, body in (("", program), *program.functions.items()):
        _verify_graph(program, body, graph, keys, after)


def _make_error(after: str, op: str, given: object, expected: object) -> ProgramError:
    facts = {"pass": after} if after else {}
    return ProgramError(
        "a pass has broken the program" if after else "the program is broken",
        **facts,
        op=op,
        given=given,
        expected=expected,
        action=REPORT_FAULT,
    )


def _verify_graph(
    program: Program, body: Program, graph: str, keys: dict[tuple[str, str], tuple[str, str]], after: str
) -> None:
    """Checks one graph: the program itself, or the body of one of its functions.

    Args:
      body: the graph to check.
      graph: name of the function whose body it is; "" for the program.
      keys: (op, key) of each exchange in the graphs checked so far -> (graph, node); exchanges of this graph are added.
      after: name of the pass that made the program.
    """
    types: dict[str, tuple[TensorType, ...]] = {}
    stay: list[str] = []
    for node in body.nodes:
        name = node.name
        try:
            if name in types:
                raise _BrokenProgramError("the graph has an earlier node of this name", "a unique name for each node")
            for before, index in node.inputs:
                found = types.get(before)
                if found is None:
                    raise _make_missing_error(body, before, f"the node reads {before}:{index}")
                if not 0 <= index < len(found):
                    raise _BrokenProgramError(
                        f"the node reads {before}:{index}", f"a number of one of the {len(found)} results of {before}"
                    )
            for before in node.controls:
                if before not in types:
                    raise _make_missing_error(body, before, f"the node waits for {before}")
            check = _CHECKS.get(node.op)
            if check is not None:
                check(program, body, node, [types[n][i] for n, i in node.inputs])
            if node.op in _STAY:
                stay.append(name)
                if node.op in _WITH_KEYS and "key" in node.attrs:
                    key = node.op, str(node.attrs["key"])
                    where, other = keys.setdefault(key, (graph, name))
                    # Copies of one function share its keys: offload and micro-batches that differ make such copies.
                    if other != name:
                        shown = f"{where}/{other}" if where else other
                        raise _BrokenProgramError(
                            f"the node has the key {key[1]}, which {shown} has too", "a key that no other node has"
                        )
        except _BrokenProgramError as broken:
            op = f"{graph}/{name} ({node.op})" if graph else f"{name} ({node.op})"
            raise _make_error(after, op, broken.given, broken.expected) from None
        types[name] = node.outputs
    where = graph or program.name
    _verify_ends(body, types, where, after)
    if stay:
        kept = find_waited_for(body, [*(r.node for r in body.outputs), *body.effects])
        for name in stay:
            if name not in kept:
                op = f"{graph}/{name}" if graph else name
                given = "the node has side effects, and no output or effect of the program waits for it"
                expected = "a node that is an effect of the program, or that one of its outputs or effects waits for"
                raise _make_error(after, f"{op} ({body.by_name[name].op})", given, expected)


def _verify_ends(body: Program, types: Mapping[str, Sequence[TensorType]], where: str, after: str) -> None:
    """Checks that inputs, variables, outputs and effects name existing nodes, and inputs, variables and effects only
    once.
    """
    for what, names in (
        ("input", body.inputs),
        ("variable", [v.node for v in body.variables]),
        ("effect", body.effects),
    ):
        if len(names) != len(set(names)):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise _make_error(after, where, f"the graph lists the {what} {twice} twice", f"each {what} once")
        for name in names:
            if name not in types:
                raise _make_error(
                    after, where, f"the graph lists the {what} {name}, and has no such node", "a node of that name"
                )
    for name, index in body.outputs:
        if name not in types or not 0 <= index < len(types[name]):
            raise _make_error(
                after, where, f"the graph returns {name}:{index}, which does not exist", "a result of a node"
            )


def _make_missing_error(body: Program, name: str, does: str) -> _BrokenProgramError:
    """Creates the error for a node that refers to the node ``name``, which does not come before it or does not exist.

    Args:
      does: what the node does with it, for the message: "the node reads x:0" or "the node waits for x".
    """
    if name not in body.by_name:
        return _BrokenProgramError(f"{does}, and the graph has no such node", "the name of a node of the same graph")
    try:
        sort_nodes(body.by_name)
    except PlanError as cycle:
        return _BrokenProgramError(
            f"{does}, and is part of a cycle: {cycle.facts['op']}", "an order in which nodes come after what they read"
        )
    return _BrokenProgramError(f"{does}, which comes after the node", "nodes after those that they read or wait for")


# -- types


def _verify_same_dtype(node: Node, types: Sequence[TensorType]) -> None:
    dtype = node.attrs.get("T")
    for t in types:
        if dtype is None:
            dtype = t.dtype
        elif t.dtype != dtype:
            given = f"operands, then results, of the types {', '.join(map(str, types))}"
            raise _BrokenProgramError(given, f"the dtype {dtype}, the node's attribute T, for all operands and results")


def _is_compatible(one: TensorType, other: TensorType) -> bool:
    """Returns True if two types, which may have unknown sizes, can describe the same tensor."""
    if one.dtype != other.dtype:
        return False
    if one is other or one.shape is None or other.shape is None or one.shape == other.shape:
        return True
    if len(one.shape) != len(other.shape):
        return False
    return all(a == b or a is None or b is None for a, b in zip(one.shape, other.shape))


def _expect(found: TensorType, expected: TensorType, what: str) -> None:
    if not _is_compatible(found, expected):
        raise _BrokenProgramError(f"{what} {found}", expected)


def _require_one_result(node: Node, operands: Sequence[TensorType], least: int) -> TensorType:
    if len(node.outputs) != 1 or len(operands) < least:
        raise _BrokenProgramError(
            f"the node has {len(operands)} operands and {len(node.outputs)} results",
            f"at least {least} operands, and one result",
        )
    return node.outputs[0]


def _verify_const(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    value = node.attrs.get("value")
    if isinstance(value, Tensor):
        _expect(_require_one_result(node, operands, 0), TensorType(value.dtype, value.shape), "the node's result is")


def _verify_unary(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    result = _require_one_result(node, operands, 1)
    _verify_same_dtype(node, [operands[0], result])
    _expect(result, operands[0], "the node's result is")


def _verify_arithmetic(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    result = _require_one_result(node, operands, 2)
    _verify_same_dtype(node, [*operands, result] if node.op in _ARITHMETIC else operands)
    a, b = operands[0].shape, operands[1].shape
    if a is None or b is None or result.shape is None or a == b == result.shape:
        return
    dims = []
    for m, n in zip_longest(reversed(a), reversed(b), fillvalue=1):
        if m is not None and n is not None and 1 not in (m, n) and m != n:
            raise _BrokenProgramError(
                f"the node has the operands {operands[0]} and {operands[1]}", "shapes that can be broadcast to one"
            )
        dims.append(n if m == 1 else m if n == 1 else m if m is not None else n)
    _expect(result, TensorType(result.dtype, tuple(reversed(dims))), "the node's result is")


def _verify_matmul(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    result = _require_one_result(node, operands, 2)
    if node.attrs.get("Tout") is None:
        _verify_same_dtype(node, [*operands[:2], result])
    left, right = operands[0].shape, operands[1].shape
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return
    first, second = (bool(node.attrs.get(name)) for name in _MATMULS[node.op])
    rows, over = left[-2:][::-1] if first else left[-2:]
    also, columns = right[-2:][::-1] if second else right[-2:]
    if over is not None and also is not None and over != also:
        raise _BrokenProgramError(
            f"the node multiplies {operands[0]} by {operands[1]}",
            f"equal sizes of the dimensions that are summed over, not {over} and {also}",
        )
    if result.shape is not None:
        product = TensorType(result.dtype, (*result.shape[:-2], rows, columns))
        _expect(result, product, "the node's result is")


def _verify_reshape(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    result = _require_one_result(node, operands, 1)
    _verify_same_dtype(node, [operands[0], result])
    before, after = operands[0].shape, result.shape
    if before is None or after is None or None in before or None in after:
        return
    if prod(map(int, before)) != prod(map(int, after)):  # type: ignore[arg-type]
        raise _BrokenProgramError(
            f"the node reshapes {operands[0]} to {result}", "the same number of elements before and after"
        )


def _verify_cast(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    result = _require_one_result(node, operands, 1)
    for name, t in (("SrcT", operands[0]), ("DstT", result)):
        if node.attrs.get(name, t.dtype) != t.dtype:
            raise _BrokenProgramError(
                f"the node casts from or to {t}, and its attribute {name} is {node.attrs[name]}",
                "the same dtype in both",
            )
    _expect(TensorType(result.dtype, operands[0].shape), result, "the node's operand is")


def _verify_read(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    variable = body.variable_of.get(node.inputs[0].node) if node.inputs else None
    result = _require_one_result(node, operands, 1)
    if node.attrs.get("dtype", result.dtype) != result.dtype:
        raise _BrokenProgramError(
            f"the node's result is {result}", f"the dtype of the node's attribute, {node.attrs['dtype']}"
        )
    if variable is not None:
        _expect(result, variable.type, "the node's result is")


def _verify_assign(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    variable = body.variable_of.get(node.inputs[0].node) if node.inputs else None
    if len(operands) < 2:
        raise _BrokenProgramError(f"the node has {len(operands)} operands", "a variable and a value")
    if variable is not None:
        _expect(operands[1], variable.type, "the value that the node assigns is")


def _verify_each_reduced(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    """Checks that a reduction over ranks has one result per operand, of the same type.

    The first operand is the communicator. A reduce-scatter need only keep the dtype.
    """
    given = operands[1:]
    if len(given) != len(node.outputs):
        raise _BrokenProgramError(
            f"the node takes {len(given)} tensors and has {len(node.outputs)} results", "a result for each tensor"
        )
    for one, other in zip(given, node.outputs):
        if not _is_compatible(one, other) if "Scatter" not in node.op else one.dtype != other.dtype:
            raise _BrokenProgramError(f"the node makes {other} of {one}", "a result of the operand's type")


def _verify_exchange(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    """Checks that all tensors of an exchange have one dtype, and that the sizes of an all-gather fit; operand 0 is the
    communicator.
    """
    _verify_same_dtype(node, [*operands[1:], *node.outputs])
    if node.op == "WhaleAllGather" and node.attrs.get("sizes"):
        axis, sizes, given = int(node.attrs.get("axis", 0)), tuple(node.attrs["sizes"]), operands[-len(node.outputs) :]
        if len(given) != len(node.outputs):
            raise _BrokenProgramError(
                f"the node takes {len(given)} tensors and has {len(node.outputs)} results", "a result for each tensor"
            )
        for part, whole in zip(given, node.outputs):
            if part.shape is None or whole.shape is None:
                continue
            if whole.shape[axis] not in (None, sum(sizes)) or part.shape[axis] not in (None, *sizes):
                raise _BrokenProgramError(
                    f"the node makes {whole} of its part {part}",
                    f"parts whose sizes of dimension {axis} are {sizes}, and a result of their sum there",
                )


def _find_callee(program: Program, func: Func) -> Program:
    found = program.functions.get(func.name)
    if found is None:
        raise _BrokenProgramError(
            f"the node calls the function {func.name}, which the program lacks",
            f"a function of the program: {', '.join(program.functions) or 'it has none'}",
        )
    return found


def _verify_arguments(function: Program, given: Sequence[TensorType], returned: Sequence[TensorType]) -> None:
    """Checks that a function's arguments and results have the types of the operands and outputs at its call."""
    takes = [function.find_type(Ref(name)) for name in function.inputs]
    for what, ours, theirs in (
        ("takes", takes, given),
        ("returns", [function.find_type(ref) for ref in function.outputs], returned),
    ):
        if len(ours) != len(theirs):
            raise _BrokenProgramError(
                f"the function {function.name} {what} {len(ours)} tensors", f"{len(theirs)}, as the call does"
            )
        for mine, one in zip(ours, theirs):
            if not _is_compatible(mine, one):
                raise _BrokenProgramError(f"the function {function.name} {what} {mine}", f"{one}, as the call does")


def _verify_call(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    for _, func in iterate_function_refs(node):
        _verify_arguments(_find_callee(program, func), operands, node.outputs)


def _verify_branch(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    for _, func in iterate_function_refs(node):
        _verify_arguments(_find_callee(program, func), operands[1:], node.outputs)


def _verify_loop(program: Program, body: Program, node: Node, operands: list[TensorType]) -> None:
    _verify_arguments(_find_callee(program, node.attrs["body"]), operands, node.outputs)
    asked = _find_callee(program, node.attrs["cond"])
    _verify_arguments(asked, operands, [asked.find_type(ref) for ref in asked.outputs])


_Check = Callable[[Program, Program, Node, list[TensorType]], None]
_CHECKS: dict[str, _Check] = {
    "Const": _verify_const,
    "Cast": _verify_cast,
    "ReadVariableOp": _verify_read,
    "AssignVariableOp": _verify_assign,
    **dict.fromkeys(ADDS, _verify_assign),
    **dict.fromkeys(_UNARY, _verify_unary),
    **dict.fromkeys(_ARITHMETIC | _COMPARISONS, _verify_arithmetic),
    **dict.fromkeys(_MATMULS, _verify_matmul),
    **dict.fromkeys(RESHAPES, _verify_reshape),
    **dict.fromkeys(RANK_REDUCTIONS - {"HorovodGroupedAllreduce"}, _verify_each_reduced),
    **dict.fromkeys(EXCHANGES - RANK_REDUCTIONS - ROW_EXCHANGES, _verify_exchange),
    **dict.fromkeys(CALLS, _verify_call),
    **dict.fromkeys(BRANCHES, _verify_branch),
    **dict.fromkeys(LOOPS, _verify_loop),
}
