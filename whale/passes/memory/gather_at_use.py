"""Gathers sharded weights separately for each use (ZeRO-3): every use gets a gathered copy, which is freed after it.

A program reads a weight once and uses the value at least twice: in a forward product and in a backward one. If it were
gathered once, it would stay in memory from the beginning of a step to its end. ``gather_at_use`` gives every use a
copy, and so its own all-gather, except uses for which the shards suffice. An all-gather waits, by a control edge, for a
product a few uses earlier (``ahead``); otherwise all weights would be gathered when the step begins. The order is that
of the program, the same on all ranks.

Loops and branches are the exception. A body that takes a variable's handle reads it in every iteration; each read would
be an all-gather, by ranks that need not be in the same iteration. So ``hoist_reads`` changes the body before planning
to take the value instead, which is gathered once for the loop and stays in memory while the loop runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from whale.ir.marks import NO_MARKS, Marks
from whale.ir.ops import BRANCHES, LOOPS
from whale.ir.program import Node, Program, Ref, remove_unread
from whale.ir.values import UNMOVABLE, DType, Func, Shape, Tensor, TensorType
from whale.passes.analysis.scopes import PASSED_ON
from whale.passes.analysis.uses import is_model
from whale.passes.memory.zero import find_gathered_type
from whale.sharding_rules.graph import list_called_functions


@dataclass(frozen=True)
class _Use:
    """Represents one use of a variable's value.

    Attributes:
      read: the node that reads the variable.
      chain: the nodes that hand the value on to the reader (casts, reshapes), in order.
      reader: the node that uses the value.
      operand: number of the operand of ``reader`` that is the value.
    """

    read: Node
    chain: tuple[Node, ...]
    reader: Node
    operand: int


def gather_at_use(program: Program, min_bytes: int, ahead: int) -> Program:
    """Gives each use of a weight's value its own copy, marked as the place where the weight is gathered.

    Args:
      min_bytes: smaller variables stay replicated and keep one value.
      ahead: how many weights may be gathered while another one is used.
    """
    position = {node.name: i for i, node in enumerate(program.nodes)}
    kept = {c for n in program.nodes for c in n.controls} | {*program.effects, *(r.node for r in program.outputs)}
    reads = [node for node in program.nodes if node.op == "ReadVariableOp" and node.inputs]
    large = [node for node in reads if find_gathered_type(program, node.inputs[0], min_bytes) is not None]
    uses = [use for node in large for use in _uses(program, node, (), kept) if not _is_of_parts(program, use.reader)]
    if not uses:
        return program
    uses.sort(key=lambda use: (position[use.reader.name], use.operand))
    operands: dict[tuple[str, int], Ref] = {}
    before: dict[str, list[Node]] = {}
    paced: list[str] = []
    for number, use in enumerate(uses):
        controls: tuple[str, ...] = ()
        if is_model(program, use.reader):
            waits_for = paced[-ahead - 1] if len(paced) > ahead else use.reader.name
            controls = (waits_for,) if waits_for != use.reader.name else ()
            paced += [use.reader.name] if paced[-1:] != [use.reader.name] else []
        *made, last = _copies(use, number, controls)
        before.setdefault(use.reader.name, []).extend([*made, last])
        operands[use.reader.name, use.operand] = Ref(last.name)
    nodes: list[Node] = []
    for node in program.nodes:
        nodes += before.get(node.name, [])
        inputs = tuple(operands.get((node.name, i), ref) for i, ref in enumerate(node.inputs))
        nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
    return remove_unread(program.replace_nodes(tuple(nodes)), {n.name for use in uses for n in use.chain})


def _is_of_parts(program: Program, reader: Node) -> bool:
    """Returns True if ``reader`` can read its rank's shard of a weight, so that no all-gather is needed: matrix
    products, lookups, loops and branches depend on its result only through a scalar.

    Examples are the norm of a weight in a loss, and the gradient of that norm.
    """
    waiting, seen = [reader], {reader.name}
    while waiting:
        node = waiting.pop()
        if is_model(program, node) or any(isinstance(v, Func) for v in node.attrs.values()):
            return False
        for ref in node.list_refs():
            if program.find_type(ref).shape == ():
                continue
            for other, _ in program.consumers.get(ref, ()):
                if other.name not in seen:
                    seen.add(other.name)
                    waiting.append(other)
    return True


def _uses(program: Program, read: Node, chain: tuple[Node, ...], kept: Collection[str]) -> Iterator[_Use]:
    """Yields the uses of a variable's value, looking through nodes that only hand it on (casts, reshapes).

    Args:
      read: the node that reads the variable.
      chain: the nodes between ``read`` and the value whose readers are listed, in order.
      kept: names of nodes that hand the value on but count as uses themselves, since other nodes wait for them or the
        program returns them.
    """
    value = Ref((chain or (read,))[-1].name)
    for reader, operand in program.consumers.get(value, ()):
        passes_on = reader.op in PASSED_ON and operand == 0 and not reader.controls and reader.name not in kept
        if passes_on and program.consumers.get(Ref(reader.name)):
            yield from _uses(program, read, (*chain, reader), kept)
        else:
            yield _Use(read, chain, reader, operand)


def _copies(use: _Use, number: int, controls: tuple[str, ...]) -> Iterator[Node]:
    """Yields the nodes that give one use of a weight a gathered copy of its own: copies of the casts and reshapes
    between the variable's read and its reader (``use.chain``), and an Identity marked ``gathered_at_use`` before,
    between and after them.

    Propagation chooses at which Identity the weight is gathered, for example after a cast to 16 bits.

    Args:
      number: number of the use, for unique names.
      controls: nodes that the copy waits for.
    """
    scope = use.reader.scope
    value = Ref(use.read.name)
    for place, node in enumerate((None, *use.chain)):
        if node is not None:
            copy = replace(node, name=f"{node.name}/whale_use_{number}", inputs=(value, *node.inputs[1:]), scope=scope)
            yield copy
            value = Ref(copy.name)
        (kind,) = (node or use.read).outputs
        name = f"{use.read.name}/whale_use_{number}" + (f"_{place}" if place else "")
        attrs, waits = {"T": DType(kind.dtype)}, controls if not place else ()
        yield Node(name, "Identity", (value,), waits, attrs, (kind,), scope, marks=Marks(gathered_at_use=True))
        value = Ref(name)


def hoist_reads(program: Program, min_bytes: int | None = None) -> Program:
    """Makes loops and branches take the values of variables that they only read, instead of the handles.

    Args:
      min_bytes: smaller variables, and those that are no tensors of floats, are read where they were; None: none is.
    """

    def find_type(handle: Ref) -> TensorType | None:
        if min_bytes is not None:
            return find_gathered_type(program, handle, min_bytes)
        variable = program.variable_of.get(handle.node)
        if variable is None or not variable.type.is_static or variable.type.dtype in UNMOVABLE:
            return None
        return variable.type

    functions = dict(program.functions)
    handles: dict[Ref, Ref] = {}  # result of a loop that is a handle it was given -> that handle
    nodes: list[Node] = []
    for node in program.nodes:
        if not handles.keys().isdisjoint(node.inputs):
            node = replace(node, inputs=tuple(handles.get(r, r) for r in node.inputs))
        if node.op == "VariableShape" and (kind := find_type(node.inputs[0])) is not None:
            node = _shape(node, kind)
        types = {i: find_type(node.inputs[i]) for i in _operands(node)}
        kinds = {i: kind for i, kind in types.items() if kind is not None and _is_only_read(program, node, i)}
        operands = list(node.inputs)
        for i, kind in kinds.items():
            read = Node(
                f"{node.name}/whale_read_{i}", "ReadVariableOp", (node.inputs[i],), node.controls,
                {"dtype": DType(kind.dtype)}, (kind,), node.scope, stateful=True,
            )  # fmt: skip
            nodes.append(read)
            operands[i] = Ref(read.name)
            if node.op in LOOPS:
                handles[Ref(node.name, i)] = node.inputs[i]
        nodes.append(_adapt(replace(node, inputs=tuple(operands)), kinds, functions) if kinds else node)
    return program.replace_nodes(tuple(nodes), functions=functions)


def _operands(node: Node) -> range:
    """Returns the numbers of the operands that a loop or branch passes to its functions (not the one that selects a
    branch); none for other ops.
    """
    if node.op in LOOPS:
        return range(len(node.inputs))
    return range(1, len(node.inputs)) if node.op in BRANCHES else range(0)


def _argument(node: Node, operand: int, function: Program) -> str:
    return function.inputs[operand - _operands(node).start]


def _is_only_read(program: Program, node: Node, operand: int) -> bool:
    """Returns True if the functions of a loop or branch only read the variable whose handle is ``operand``, or hand it
    on to the next iteration.
    """
    for func in list_called_functions(node):
        function = program.functions[func.name]
        handles = [Ref(_argument(node, operand, function))]
        for handle in handles:
            for reader, place in function.consumers.get(handle, ()):
                if place in _operands(reader):
                    if not _is_only_read(program, reader, place):
                        return False
                    handles += [Ref(reader.name, place)] if reader.op in LOOPS else []
                elif reader.op not in ("ReadVariableOp", "VariableShape"):
                    return False
        if any(ref in handles and not (node.op in LOOPS and i == operand) for i, ref in enumerate(function.outputs)):
            return False
    return True


def _shape(node: Node, kind: TensorType) -> Node:
    """Returns the constant that replaces a node which asks for a variable's shape."""
    (t,) = node.outputs
    value = Tensor.from_numpy(np.array(kind.shape, t.dtype))
    return Node(node.name, "Const", (), node.controls, {"dtype": DType(t.dtype), "value": value}, (t,), node.scope)


def _adapt(node: Node, kinds: dict[int, TensorType], functions: dict[str, Program]) -> Node:
    """Adapts a loop or branch, and its functions, to operands that are now values instead of handles.

    Args:
      kinds: number of such an operand -> type of the value.
      functions: the adapted functions are added, under new names.
    """
    attrs: dict[str, Any] = dict(node.attrs)
    types = "T" if node.op in LOOPS else "Tin"
    first = _operands(node).start
    listed = list(attrs[types])
    for i, kind in kinds.items():
        listed[i - first] = DType(kind.dtype)
    attrs[types] = tuple(listed)
    outputs = node.outputs
    if node.op in LOOPS:
        outputs = tuple(kinds.get(i, t) for i, t in enumerate(outputs))
        attrs["output_shapes"] = tuple(Shape(t.shape) for t in outputs)

    def rename(func: Func) -> Func:
        name = f"{func.name}/of/{node.name}"
        if name not in functions:
            function = functions[func.name]
            arguments = {_argument(node, i, function): kind for i, kind in kinds.items()}
            functions[name] = _with_values(function, arguments, functions)
        return replace(func, name=name)

    for key, value in node.attrs.items():
        if isinstance(value, Func):
            attrs[key] = rename(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Func):
            attrs[key] = tuple(map(rename, value))
    return replace(node, attrs=attrs, outputs=outputs)


def _with_values(function: Program, arguments: dict[str, TensorType], functions: dict[str, Program]) -> Program:
    """Returns ``function`` with values in place of handles as arguments.

    Args:
      arguments: name of such an argument -> type of the value.
    """
    values = {Ref(name): kind for name, kind in arguments.items()}
    nodes = []
    for node in function.nodes:
        inner = {i: values[r] for i, r in enumerate(node.inputs) if r in values}
        if node.name in arguments:
            kind = arguments[node.name]
            attrs = {**node.attrs, "dtype": DType(kind.dtype), "shape": Shape(kind.shape)}
            node = replace(node, attrs=attrs, outputs=(kind,))
        elif inner and node.op == "ReadVariableOp":
            node = replace(node, op="Identity", attrs={"T": node.attrs["dtype"]}, stateful=False, marks=NO_MARKS)
        elif inner and node.op == "VariableShape":
            node = _shape(node, inner[0])
        elif inner:
            node = _adapt(node, inner, functions)
            values.update((Ref(node.name, i), kind) for i, kind in inner.items() if node.op in LOOPS)
        nodes.append(node)
    effects = _drop_effects(function.effects, nodes)
    return replace(function, nodes=tuple(nodes), effects=effects)


def _drop_effects(effects: Collection[str], nodes: list[Node]) -> tuple[str, ...]:
    """Returns ``effects`` without nodes that have become an Identity or a constant, and need not run any more."""
    plain = {n.name for n in nodes if n.op in ("Identity", "Const") and not n.stateful}
    return tuple(name for name in effects if name not in plain)
