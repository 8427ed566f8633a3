"""Folds shape arithmetic to constants (integers and booleans), in NumPy, without TensorFlow.

Never folded: stateful ops (a random op with constant operands still draws), floating-point values, and anything of more
than 4096 elements. Shapes of loop variables are inferred by induction: a loop variable keeps the shape of its initial
value if one iteration does.

``powers`` replaces powers with well-known exponents by cheaper ops: a square root is ten times as fast as ``Pow``.
TensorFlow's graph optimizer does the same (its stage ConvertPow), but does not run on the ranks' programs.

Decision: 0124.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from whale.ir.ops import ASKS_SHAPE, LOOPS, VIEWS
from whale.ir.program import Node, Program, Ref, iterate_function_refs, make_const, prune
from whale.ir.values import UNMOVABLE, Dims, DType, Shape, TensorType, find_numpy_dtype
from whale.passes.normalize.folding.arithmetic import EVALUATORS
from whale.passes.normalize.folding.lists import refine_lists
from whale.passes.normalize.folding.shapes import STATIC_SHAPE, STATIC_SHAPES, refine

LARGEST_ELEMENTS = 4096
_FOLDED = frozenset(
    {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"}
)  # fmt: skip

# Ops that rearrange sizes: if some elements of their operands are unknown, the others are still followed.
_PARTIAL = VIEWS | {"Cast", "StridedSlice", "Slice", "Pack", "ConcatV2", "GatherV2"}
_UNKNOWN = np.iinfo(np.int64).min
_OPS = {2.0: "Square", 0.5: "Sqrt", -0.5: "Rsqrt", -1.0: "Reciprocal", 1.0: "Identity"}
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def fold(program: Program) -> Program:
    """Folds shape arithmetic of ``program`` and its functions to constants, and removes dead nodes.

    Also splits IdentityN into one Identity per tensor, and refines output types that become known (of Reshape, Fill,
    Slice, ...).
    """
    folded = _refine_loops(_fold_until_settled(program), _fold_until_settled)
    return prune(replace(folded, functions={name: prune(body) for name, body in folded.functions.items()}))


def _fold_until_settled(program: Program) -> Program:
    """Folds ``program`` repeatedly, until the contents of its TensorLists give no new types."""
    folded = _fold_all(program)
    while (better := refine_lists(folded)) is not folded:
        folded = _fold_all(better)
    return folded


def _fold_all(program: Program) -> Program:
    functions = {name: _fold_graph(body) for name, body in program.functions.items()}
    return replace(_fold_graph(program), functions=functions)


def _fold_graph(program: Program) -> Program:
    folder = _Folder(program)
    moved, keep, visit = folder.moved, folder.nodes.append, folder.visit
    concerned: dict[tuple[str, int], bool] = {}  # by op and identity of the types, which thousands of nodes share
    with np.errstate(over="ignore"):  # integers wrap, as in the kernels
        for node in program.nodes:
            key = (node.op, id(node.outputs))
            concerns = concerned.get(key)
            if concerns is None:
                concerns = concerned[key] = folder.concerns(node)
            if concerns or (moved and not moved.keys().isdisjoint(node.inputs)):
                visit(node)
            else:
                keep(node)
    if not folder.changed:
        return program
    # Control inputs stay valid: a node of every old name remains.
    return replace(
        program,
        nodes=tuple(folder.nodes),
        outputs=tuple(moved.get(r, r) for r in program.outputs),
    )


class _Folder:
    """Folds one graph in a single walk over its nodes in topological order."""

    def __init__(self, program: Program) -> None:
        self.nodes: list[Node] = []
        self.taken: set[str] | None = None
        self.program = program
        self.moved: dict[Ref, Ref] = {}
        self.values: dict[Ref, np.ndarray | _Lazy] = {}
        self.partial: dict[Ref, np.ndarray] = {}
        self.types: dict[Ref, TensorType] = {}
        self.changed = False

    def concerns(self, node: Node) -> bool:
        """Returns True if nodes of this op type and these output types may be changed, or have values that others
        need; all other nodes are kept, if none of their operands has moved.
        """
        op = node.op
        if op == "IdentityN" or op in ASKS_SHAPE or self._may_refine(node):
            return True
        return (op == "Const" or op in EVALUATORS) and bool(node.outputs) and node.outputs[0].dtype in _FOLDED

    def _may_refine(self, node: Node) -> bool:
        return (node.op in STATIC_SHAPE or node.op in STATIC_SHAPES) and any(not t.is_static for t in node.outputs)

    def visit(self, node: Node) -> None:
        """Adds ``node`` to the result, with known outputs as constants and refined output types."""
        moved = self.moved
        if moved and node.inputs:
            inputs = tuple([moved.get(r, r) for r in node.inputs])
            if inputs != node.inputs:
                node = replace(node, inputs=inputs)
                self.changed = True
        op = node.op
        if op == "Const":
            self._remember(node)
            self.nodes.append(node)
            return
        if op == "IdentityN":
            self._split(node)
            return
        if node.stateful:
            self.nodes.append(node)
            return
        if self._may_refine(node):
            better = refine(node, self._type_of, self._find_known)
            if better != node.outputs:
                node = replace(node, outputs=better)
                for i, kind in enumerate(better):
                    self.types[Ref(node.name, i)] = kind
                self.changed = True
        if op in ASKS_SHAPE:
            self._settle(node, self._shape_values(node))
        elif op in EVALUATORS and node.outputs and node.outputs[0].dtype in _FOLDED:
            self._settle(node, self._evaluate(node))
        else:
            self.nodes.append(node)

    def _remember(self, node: Node) -> None:
        kind = node.outputs[0]
        if kind.dtype in _FOLDED and kind.elements <= LARGEST_ELEMENTS:
            self.values[Ref(node.name)] = _Lazy(node)  # decoded only when an op asks for it

    def _value(self, ref: Ref) -> np.ndarray | None:
        value = self.values.get(ref)
        if isinstance(value, _Lazy):
            value = self.values[ref] = value.node.attrs["value"].numpy()
        return value

    def _find_known(self, ref: Ref) -> np.ndarray | None:
        """Returns the value of ``ref``, with _UNKNOWN for elements that are not known; None if no element is known."""
        value = self._value(ref)
        return value if value is not None else self.partial.get(ref)

    def _type_of(self, ref: Ref) -> TensorType:
        found = self.types.get(ref)
        return found if found is not None else self.program.find_type(ref)

    def _split(self, node: Node) -> None:
        """Replaces IdentityN by one Identity per tensor, so that no tensor waits for the others."""
        names = []
        for i, (source, kind) in enumerate(zip(node.inputs, node.outputs)):
            name = self._fresh(f"{node.name}/{i}")
            names.append(name)
            attrs = {"T": DType(kind.dtype)}
            self.moved[Ref(node.name, i)] = Ref(name)
            self.types[Ref(name)] = kind
            part = Node(name, "Identity", (source,), node.controls, attrs, (kind,), node.scope)
            if kind.dtype in _FOLDED:
                self._settle(part, self._evaluate(part))
            else:
                self.nodes.append(part)
        # Nodes that wait for the IdentityN wait for this NoOp, and by it for all tensors.
        self.nodes.append(Node(node.name, "NoOp", (), tuple(names), scope=node.scope))
        self.changed = True

    def _shape_values(self, node: Node) -> list[np.ndarray | None]:
        results: list[np.ndarray | None] = []
        for i, source in enumerate(node.inputs):
            kind = self._type_of(source)
            out = node.outputs[i]
            if kind.shape is None:
                results.append(None)
            elif node.op == "Rank":
                results.append(np.asarray(len(kind.shape), find_numpy_dtype(out.dtype)))
            elif None not in kind.shape:
                value = kind.elements if node.op == "Size" else kind.shape
                results.append(np.asarray(value, find_numpy_dtype(out.dtype)))
            else:
                results.append(None)
                if node.op != "Size":
                    dims = [_UNKNOWN if d is None else d for d in kind.shape]
                    self.partial[Ref(node.name, i)] = np.array(dims, np.int64)
        return results

    def _evaluate(self, node: Node) -> list[np.ndarray | None]:
        values = [self._value(r) for r in node.inputs]
        whole = _complete(values)
        if whole is not None and all(t.elements <= LARGEST_ELEMENTS for t in node.outputs):
            results = [_as_type(v, t) for v, t in zip(_run(node, whole), node.outputs)]
            return [v if v is not None and v.size <= LARGEST_ELEMENTS else None for v in results]
        if node.op in _PARTIAL and self.partial:
            known = _complete([self._find_known(r) for r in node.inputs])
            if known is None:
                return [None] * len(node.outputs)
            # Operands that say how elements are rearranged (bounds, axes, shapes) must be fully known.
            steering = _list_steering_operands(node.op, len(values))
            if any(values[i] is None for i in steering):
                return [None] * len(node.outputs)
            wide = replace(node, outputs=tuple(TensorType("int64", t.shape) for t in node.outputs))
            operands = [k.astype(np.int64) if i not in steering else k for i, k in enumerate(known)]
            result = _run(wide, operands)[0]
            if result is None:
                return [None]
            if (result == _UNKNOWN).any():
                self.partial[Ref(node.name)] = result
                return [None]
            return [_as_type(result, node.outputs[0])]
        return [None] * len(node.outputs)

    def _settle(self, node: Node, results: list[np.ndarray | None]) -> None:
        """Adds ``node`` to the result with its known outputs (not None in ``results``) as constants."""
        if len(results) == 1:
            if results[0] is None:
                self.nodes.append(node)
            else:
                self._constant(node.name, results[0], node)
            return
        self.nodes.append(node)
        for i, value in enumerate(results):
            if value is not None:
                name = self._fresh(f"{node.name}/{i}")
                self._constant(name, value, node, i)
                self.moved[Ref(node.name, i)] = Ref(name)

    def _constant(self, name: str, value: np.ndarray, node: Node, i: int = 0) -> None:
        made = make_const(name, value, node.outputs[i].dtype, node.controls, node.scope)
        self.nodes.append(made)
        self.values[Ref(name)] = value
        self.types[Ref(name)] = made.outputs[0]
        self.changed = True

    def _fresh(self, name: str) -> str:
        if self.taken is None:
            self.taken = {n.name for n in self.program.nodes}
        unique, n = name, 1
        while unique in self.taken:
            unique, n = f"{name}_{n}", n + 1
        self.taken.add(unique)
        return unique


class _Lazy:
    """Represents a constant whose value is decoded when an op first needs it."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node


def _complete(values: Sequence[np.ndarray | None]) -> list[np.ndarray] | None:
    """Returns ``values`` if none of them is None; else None."""
    found = [v for v in values if v is not None]
    return found if len(found) == len(values) else None


def _run(node: Node, values: Sequence[np.ndarray]) -> tuple[Any, ...]:
    """Evaluates ``node`` on known operands; returns None for each output if they do not fit, which TensorFlow reports
    if the node ever runs.
    """
    try:
        return EVALUATORS[node.op](node, values)
    except (IndexError, ValueError):
        return (None,) * len(node.outputs)


def _list_steering_operands(op: str, count: int) -> list[int]:
    """Returns the numbers of the operands (indices, axes) that say how an op rearranges the elements of the others.

    Args:
      count: number of operands.
    """
    data = {"Pack": count, "ConcatV2": count - 1}.get(op, 1)
    return list(range(data, count))


def _as_type(value: Any, kind: TensorType) -> np.ndarray | None:
    return None if value is None else np.asarray(value, find_numpy_dtype(kind.dtype))


class _Variable(NamedTuple):
    """Identifies a loop variable: number ``index`` of the loop ``node`` in ``graph`` ("" is the main graph)."""

    graph: str
    node: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody uses


def _refine_loops(program: Program, settle: Callable[[Program], Program]) -> Program:
    """Makes the types of loop variables as static as their initial values, if the body preserves them.

    All candidate shapes are assumed at once, ``settle`` infers the types that follow, and shapes that a body does not
    preserve are dropped. The remaining ones are an invariant of all loops together. A body that several loops share is
    not changed.

    Args:
      program: a program to which ``settle`` was applied already.
      settle: folds and refines types within all graphs.
    """
    rejected: set[_Variable] = set()
    while assumed := {v: s for v, s in _candidates(program).items() if v not in rejected}:
        settled = settle(_assume(program, assumed))
        broken = {v for v, shape in assumed.items() if not _keeps(settled, v, shape)}
        rejected |= broken
        if not broken:
            program = settled
    return program


def _graphs(program: Program) -> dict[str, Program]:
    return {"": program, **program.functions}


def _candidates(program: Program) -> dict[_Variable, Dims]:
    """Returns the loop variables whose initial value has a more static shape than the variable, with that shape."""
    graphs = _graphs(program)
    uses = Counter(f.name for graph in graphs.values() for n in graph.nodes if n.op in LOOPS
                   for _, f in iterate_function_refs(n))  # fmt: skip
    found: dict[_Variable, Dims] = {}
    for name, graph in graphs.items():
        for node in graph.nodes:
            if node.op not in LOOPS or any(uses[node.attrs[key].name] > 1 for key in ("cond", "body")):
                continue
            for i, (ref, kind) in enumerate(zip(node.inputs, node.outputs)):
                if kind.dtype not in UNMOVABLE and not kind.is_static:
                    shape = _merge(kind.shape, graph.find_type(ref).shape)
                    if shape is not None and shape != kind.shape:
                        found[_Variable(name, node.name, i)] = shape
    return found


def _merge(own: Dims | None, told: Dims | None) -> Dims | None:
    if own is None or told is None or len(own) != len(told):
        return told if own is None else own
    return tuple(b if a is None else a for a, b in zip(own, told))


def _assume(program: Program, assumed: Mapping[_Variable, Dims]) -> Program:
    """Returns the program with the assumed shapes on the loops' outputs and on the arguments of their bodies and
    conditions.
    """
    graphs = _graphs(program)
    outputs: dict[tuple[str, str], dict[int, Dims]] = {}
    for variable, shape in assumed.items():
        loop = graphs[variable.graph].by_name[variable.node]
        outputs.setdefault((variable.graph, variable.node), {})[variable.index] = shape
        for key in ("cond", "body"):
            function = loop.attrs[key].name
            argument = graphs[function].inputs[variable.index]
            outputs.setdefault((function, argument), {})[0] = shape
    changed = {
        name: graph.replace_nodes(
            tuple(_set_types(n, outputs[name, n.name]) if (name, n.name) in outputs else n for n in graph.nodes)
        )
        for name, graph in graphs.items()
    }
    main = changed.pop("")
    return replace(main, functions=changed)


def _set_types(node: Node, shapes: Mapping[int, Dims]) -> Node:
    kinds = tuple(TensorType(t.dtype, shapes.get(i, t.shape)) for i, t in enumerate(node.outputs))
    if node.op not in LOOPS:
        return replace(node, outputs=kinds)
    recorded = {"output_shapes": tuple(Shape(t.shape) for t in kinds)}
    return replace(node, outputs=kinds, attrs={**node.attrs, **recorded})


def _keeps(program: Program, variable: _Variable, shape: Dims) -> bool:
    graphs = _graphs(program)
    body = graphs[graphs[variable.graph].by_name[variable.node].attrs["body"].name]
    result = body.find_type(body.outputs[variable.index]).shape
    return result is not None and len(result) == len(shape) and all(s in (None, r) for s, r in zip(shape, result))


def powers(program: Program) -> Program:
    """Replaces ``Pow`` of floating-point tensors by Square, Sqrt, Rsqrt, Reciprocal or Identity if the exponent is such
    a constant.
    """
    functions = {name: _rewrite_graph(body) for name, body in program.functions.items()}
    changed = _rewrite_graph(program)
    return replace(changed, functions=functions) if functions else changed


def _rewrite_graph(program: Program) -> Program:
    if "Pow" not in program.ops:
        return program
    made = {n.name: other for n in program.nodes if n.op == "Pow" and (other := _other(n, program.by_name)) is not n}
    if not made:
        return program
    return program.replace_nodes(tuple([made.get(n.name, n) for n in program.nodes]))


def _other(node: Node, nodes: Mapping[str, Node]) -> Node:
    base, exponent = node.inputs
    constant = nodes[exponent.node]
    if constant.op != "Const" or constant.outputs[0].shape != () or node.outputs[0].dtype not in _FLOATS:
        return node
    op = _OPS.get(float(constant.attrs["value"].numpy()))
    if op is None:
        return node
    # The exponent's control inputs are handed on.
    return replace(node, op=op, inputs=(base,), controls=tuple(dict.fromkeys((*node.controls, *constant.controls))))
