"""Bytes that a rank holds while it runs its program, by category, at the moment when they are most.

The walk takes the rank's nodes in their order, gives each result memory when its node runs, and takes it back behind
its last reader. TensorFlow runs what does not depend on each other side by side and in an order of its own, and kernels
take scratch memory, so a measured peak differs; results that share memory with an operand are known. What loops and
branches hold inside is left out; what a micro-batch holds is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from whale.ir.program import Node, Program, Ref
from whale.passes.cost import is_shared
from whale.passes.zero import is_model, is_state

CATEGORIES = ("parameters", "slots", "buffers", "gradients", "gathered", "activations")
_REDUCTIONS = frozenset({"WhaleAllReduce", "WhaleReduceScatter", "HorovodGroupedAllreduce"})


def variable_kinds(program: Program) -> dict[str, str]:
    """Handle node -> parameters (what a model computes with), slots (what only updates read), or buffers (the rest)."""
    found = {}
    for variable in program.variables:
        if is_state(program, variable.node):
            found[variable.node] = "slots" if variable.type.shape else "buffers"
        else:
            found[variable.node] = "parameters" if _reaches_model(program, variable.node) else "buffers"
    return found


def footprint(program: Program) -> dict[str, int]:
    """Category -> bytes; those of variables, and those of tensors at the fullest moment of the walk.

    Args:
      program: one rank's program, with local shapes.
    """
    held = Counter(dict.fromkeys(CATEGORIES, 0))
    kinds = variable_kinds(program)
    for variable in program.variables:
        held[kinds[variable.node]] += variable.type.bytes
    kind_of = _kinds_of_tensors(program)
    owner: dict[Ref, Ref] = {}  # of tensors that share memory: whose it is
    readers: Counter[Ref] = Counter()
    for node in program.nodes:
        for i, ref in enumerate(node.refs()):
            shares = i == 0 and node.inputs and is_shared(node.op)
            owner[ref] = owner.get(node.inputs[0], node.inputs[0]) if shares else ref
        readers.update(owner.get(r, r) for r in node.inputs)
    readers.update(owner[r] for r in program.outputs)
    live: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for node in program.nodes:
        if node.op in ("Const", "Placeholder", "ReadVariableOp") or node.name in program.variable_of:
            continue
        mine = [(ref, t) for ref, t in zip(node.refs(), node.outputs) if owner[ref] == ref]
        if (inside := _inside(program, node)).total() + live.total() > most.total():
            most = live + inside
        for ref, t in mine:
            live[kind_of.get(ref, "activations")] += t.bytes
        if live.total() > most.total():
            most = live.copy()
        for ref in {owner.get(r, r) for r in node.inputs} | {ref for ref, _ in mine if not readers[ref]}:
            readers[ref] -= sum(owner.get(r, r) == ref for r in node.inputs)
            if readers[ref] <= 0 and not _is_resident(program, ref):
                live[kind_of.get(ref, "activations")] -= program.type_of(ref).bytes
    return dict(held + most) | {name: 0 for name in CATEGORIES if not (held + most)[name]}


def _inside(program: Program, node: Node) -> Counter[str]:
    """What a micro-batch holds at its fullest moment, its results among it."""
    function = program.functions.get(node.attrs["f"].name) if node.op == "StatefulPartitionedCall" else None
    return Counter(footprint(function)) if function is not None else Counter()


def _is_resident(program: Program, ref: Ref) -> bool:
    node = program.by_name[ref.node]
    return node.op in ("Const", "Placeholder", "ReadVariableOp") or ref.node in program.variable_of


def _kinds_of_tensors(program: Program) -> dict[Ref, str]:
    """What is reduced over ranks and what comes of it are gradients; what is gathered of variables, weights."""
    found: dict[Ref, str] = {}
    for node in program.nodes:
        if node.op in _REDUCTIONS:
            found.update((ref, "gradients") for ref in (*node.refs(), *_through_shared(program, node)))
        elif node.op == "WhaleAllGather" and _is_read(program, node.inputs[-1]):
            found[Ref(node.name)] = "gathered"
    return found


def _through_shared(program: Program, node: Node) -> Iterable[Ref]:
    for ref in node.inputs:
        while is_shared(program.by_name[ref.node].op) and program.by_name[ref.node].inputs:
            ref = program.by_name[ref.node].inputs[0]
        yield ref


def _is_read(program: Program, ref: Ref) -> bool:
    node = program.by_name[ref.node]
    while is_shared(node.op) and node.inputs:
        node = program.by_name[node.inputs[0].node]
    return node.op == "ReadVariableOp"


def _reaches_model(program: Program, handle: str) -> bool:
    """Whether a product, lookup, loop or branch takes what is read of the variable, however far behind."""
    waiting, seen = [handle], {handle}
    while waiting:
        node = program.by_name[waiting.pop()]
        if is_model(program, node):
            return True
        for ref in node.refs():
            for reader, _ in program.consumers.get(ref, ()):
                if reader.name not in seen:
                    seen.add(reader.name)
                    waiting.append(reader.name)
    return False
