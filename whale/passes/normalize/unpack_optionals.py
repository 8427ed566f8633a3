"""Passes values that a branch saves for its gradient as tensors instead of optionals.

TensorFlow passes values from the branch that was taken to the gradient's branch in optionals. One optional contains a
different value in each alternative of the branch, so that the result which holds it has no static type. This pass gives
each saved value a result and an argument of its own, so that it can be sharded; an alternative that does not save it
yields zeros, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from whale.ir.ops import BRANCHES, IDENTITIES
from whale.ir.program import Node, Program, Ref, make_const, prune
from whale.ir.values import UNMOVABLE, DType, Shape, TensorType, find_numpy_dtype
from whale.sharding_rules.graph import list_called_functions


def unpack_optionals(program: Program) -> Program:
    """Replaces the optionals between branches and their gradients by tensors, in the program and its functions.

    Every function must have one caller (see ``specialise``). Optionals that anything else reads, and values without a
    static shape, stay.
    """
    functions = dict(program.functions)

    def unpack_graph(graph: Program) -> Program:
        while True:
            slot = next(iter(_slots(graph, functions)), None)
            if slot is None:
                return graph
            graph = _replace_slot(graph, functions, slot)

    main = unpack_graph(program)
    for name in program.functions:
        functions[name] = unpack_graph(functions[name])
    return program if main is program and functions == program.functions else prune(replace(main, functions=functions))


@dataclass(frozen=True, slots=True)
class _Slot:
    """Represents a result of a branch node that is an optional in every alternative.

    Attributes:
      producer: name of the branch node.
      index: number of its result.
      saved: for each alternative, the values in its optional.
      readers: the arguments of other branch nodes that take the optional, as (node, number of the operand).
    """

    producer: str
    index: int
    saved: tuple[tuple[Ref, ...], ...]
    readers: tuple[tuple[str, int], ...]


def _slots(graph: Program, functions: Mapping[str, Program]) -> list[_Slot]:
    found = []
    for node in graph.nodes:
        if node.op not in BRANCHES or not all(f.name in functions for f in list_called_functions(node)):
            continue
        bodies = [functions[f.name] for f in list_called_functions(node)]
        for index, out in enumerate(node.outputs):
            if out.dtype != "variant":
                continue
            saved = [_find_contents(body, body.outputs[index]) for body in bodies]
            readers = _readers(graph, functions, node, index, saved)
            if readers is not None and any(saved):
                found.append(_Slot(node.name, index, tuple(s or () for s in saved), readers))
    return found


def _find_contents(body: Program, ref: Ref) -> tuple[Ref, ...] | None:
    """Returns the tensors in the optional ``ref``, () for an empty one; None if another op produces it or a value
    cannot be passed as a tensor.
    """
    node = _origin(body, ref)
    if node.op == "OptionalNone":
        return ()
    if node.op != "OptionalFromValue":
        return None
    types = [body.find_type(r) for r in node.inputs]
    fits = all(t.dtype == "variant" or (t.is_static and t.dtype not in UNMOVABLE) for t in types)
    return node.inputs if fits else None


def _origin(graph: Program, ref: Ref) -> Node:
    node = graph.by_name[ref.node]
    while node.op in IDENTITIES:
        node = graph.by_name[node.inputs[0].node]
    return node


def _readers(graph: Program, functions: Mapping[str, Program], producer: Node, index: int,
             saved: list[tuple[Ref, ...] | None]) -> tuple[tuple[str, int], ...] | None:  # fmt: skip
    """Returns the arguments of other branch nodes that take an optional, as (node, number of the operand); None if it
    cannot be unpacked, since something else reads it.

    Args:
      producer: the branch node that yields the optional.
      index: number of its result.
      saved: for each alternative, the values in its optional; None: unknown, so that it cannot be unpacked.
    """
    if any(s is None for s in saved):
        return None
    found: list[tuple[str, int]] = []
    pending = [Ref(producer.name, index)]
    while pending:
        ref = pending.pop()
        if ref in graph.outputs:
            return None
        for node, i in graph.consumers.get(ref, ()):
            if node.op in IDENTITIES:
                pending.append(Ref(node.name))
                continue
            same = node.op in BRANCHES and i > 0 and node.inputs[0] == producer.inputs[0]
            if not same or len(list_called_functions(node)) != len(saved):
                return None
            for func, values in zip(list_called_functions(node), saved):
                if not _only_gets(functions[func.name], i - 1, len(values or ())):
                    return None
            found.append((node.name, i))
    return tuple(found)


def _only_gets(body: Program, argument: int, values: int) -> bool:
    """Returns True if the body uses the argument only to get ``values`` values out of the optional."""
    pending = [Ref(body.inputs[argument])]
    while pending:
        ref = pending.pop()
        if ref in body.outputs:
            return False
        for node, _ in body.consumers.get(ref, ()):
            if node.op in IDENTITIES:
                pending.append(Ref(node.name))
            elif node.op != "OptionalGetValue" or len(node.outputs) != values:
                return False
    return True


def _replace_slot(graph: Program, functions: dict[str, Program], slot: _Slot) -> Program:
    """Returns ``graph`` with the slot replaced by its values, also in ``functions`` (in place): the first value takes
    the slot's place, the others are appended.
    """
    producer = graph.by_name[slot.producer]
    names = [f.name for f in list_called_functions(producer)]
    values = [(a, ref, functions[names[a]].find_type(ref)) for a, refs in enumerate(slot.saved) for ref in refs]
    count = len(producer.outputs)
    places = [slot.index, *range(count, count + len(values) - 1)]
    for a, name in enumerate(names):
        body = functions[name]
        outputs = list(body.outputs) + [body.outputs[slot.index]] * (len(values) - 1)
        nodes = list(body.nodes)
        for place, (owner, ref, t) in zip(places, values):
            if owner == a:
                outputs[place] = ref
            else:
                added = make_nothing(f"{slot.producer.rpartition('/')[2]}/unused_{slot.index}_{place}", t)
                nodes += added
                outputs[place] = Ref(added[-1].name)
        functions[name] = prune(replace(body, nodes=tuple(nodes), outputs=tuple(outputs)))
    results = _insert(producer.outputs, places, [t for _, _, t in values])
    attrs = {**producer.attrs, "Tout": tuple(DType(t.dtype) for t in results),
             "output_shapes": tuple(Shape(t.shape) for t in results)}  # fmt: skip
    changed = {producer.name: replace(producer, attrs=attrs, outputs=results)}
    for reader, argument in slot.readers:
        node = changed.get(reader, graph.by_name[reader])
        total = len(node.inputs)
        at = [argument, *range(total, total + len(values) - 1)]
        for a, func in enumerate(list_called_functions(node)):
            mine = [i for i, (owner, _, _) in enumerate(values) if owner == a]
            functions[func.name] = _add_arguments(functions[func.name], argument - 1, [t for _, _, t in values], mine)
        inputs = _insert(node.inputs, at, [Ref(producer.name, p) for p in places])
        kinds = _insert(node.attrs["Tin"], [i - 1 for i in at], [DType(t.dtype) for _, _, t in values])
        kept = {k: v for k, v in node.attrs.items() if k != "_read_only_resource_inputs"}
        changed[reader] = replace(node, inputs=inputs, attrs={**kept, "Tin": kinds})
    return graph.replace_nodes(tuple(changed.get(n.name, n) for n in graph.nodes))


def _insert(items: tuple, places: list[int], values: list) -> tuple:
    """Returns ``items`` with one item replaced by several: ``values[0]`` takes the place of the item at index
    ``places[0]``, and the other values are appended at ``places[1:]``, which are the next free indices.

    Args:
      items: arguments of a call, or types of results.
    """
    result = list(items) + [None] * (len(places) - 1)
    for place, value in zip(places, values):
        result[place] = value
    return tuple(result)


def _add_arguments(body: Program, argument: int, types: list[TensorType], mine: list[int]) -> Program:
    """Returns ``body`` with arguments of ``types`` in place of its optional, argument number ``argument``.

    Args:
      types: types of the values of all alternatives.
      mine: numbers of those values that this body reads, in the order in which it took them from the optional.
    """
    old = body.inputs[argument]
    fresh = _fresh_names(body)
    names = [fresh(f"{old}_value_{i}") for i in range(len(types))]
    arguments = [
        Node(name, "Placeholder", attrs={"dtype": DType(t.dtype), "shape": Shape(t.shape)}, outputs=(t,))
        for name, t in zip(names, types)
    ]
    moved: dict[Ref, Ref] = {}
    passed, gone = {old}, {old}
    for node in body.nodes:
        if node.inputs and node.inputs[0].node in passed:
            gone.add(node.name)
            if node.op in IDENTITIES:
                passed.add(node.name)
            else:
                moved.update({Ref(node.name, i): Ref(names[m]) for i, m in enumerate(mine)})
    kept = [_read_arguments(n, moved, gone) for n in body.nodes if n.name not in gone]
    return replace(
        body,
        nodes=(*arguments, *kept),
        inputs=_insert(body.inputs, [argument, *range(len(body.inputs), len(body.inputs) + len(types) - 1)], names),
        outputs=tuple(moved.get(r, r) for r in body.outputs),
    )


def _read_arguments(node: Node, moved: Mapping[Ref, Ref], gone: set[str]) -> Node:
    """Returns a node that reads arguments instead of values taken from optionals, and no longer waits for removed
    nodes.

    Args:
      moved: value taken from an optional -> the argument that replaces it.
      gone: names of the removed nodes.
    """
    return replace(
        node,
        inputs=tuple(moved.get(r, r) for r in node.inputs),
        controls=tuple(c for c in node.controls if c not in gone),
    )


def _fresh_names(body: Program) -> Callable[[str], str]:
    taken = set(body.by_name)

    def fresh(name: str) -> str:
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    return fresh


def make_nothing(name: str, t: TensorType) -> list[Node]:
    """Creates nodes that yield a value nobody reads: zeros, or an empty optional for a variant; the last node has the
    result.
    """
    if t.dtype == "variant":
        return [Node(name, "OptionalNone", outputs=(t,))]
    dims = np.array(t.shape, np.int32)
    zero = np.zeros((), find_numpy_dtype(t.dtype))
    return [
        make_const(f"{name}/dims", dims, "int32"),
        make_const(f"{name}/value", zero, t.dtype),
        Node(name, "Fill", (Ref(f"{name}/dims"), Ref(f"{name}/value")),
             attrs={"T": DType(t.dtype), "index_type": DType("int32")}, outputs=(t,)),
    ]  # fmt: skip
