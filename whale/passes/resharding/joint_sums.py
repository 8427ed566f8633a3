"""Merges two all-reduces over two mesh axes, one behind the other, into one over both.

Each axis is planned by itself, so a gradient that is partial along two of them is summed along the first and then along
the second, or the other way round. If nothing else reads the tensor between, one sum over all of these ranks gives the
same, and moves less: of p x q ranks, 2 (p q - 1) T bytes instead of 2 q (p - 1) T + 2 p (q - 1) T.

  sums_to_join   finds a program's sums along earlier axes that continue along the next one, by its plan
  join_sums      merges them in a rank's program

Decision: 0076.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from whale.ir.layout import B, Partial
from whale.ir.ops import ALL_REDUCE
from whale.ir.plan import STAGE_OUTPUT, Plan, Reshard
from whale.ir.program import Node, Program, Ref, rewire


def sums_to_join(program: Program, plan: Plan) -> dict[str, tuple[Reshard, Node]]:
    """Maps the key of a sum along earlier axes to the adjacent sum along the axis of ``plan``, and its node.

    Args:
      program: expanded, for the first coordinates of the earlier axes.
    """
    sums: dict[tuple[str, Ref], list[Reshard]] = {}
    for r in plan.reshards:
        if isinstance(r.source, Partial):
            sums.setdefault((r.graph, r.ref), []).append(r)
    found = {}
    for graph, body in (("", program), *program.functions.items()):
        for node in body.nodes if graph in plan.strategies else ():
            if _is_one_sum(node):
                before, behind = (sums.get((graph, ref), ()) for ref in (node.inputs[1], Ref(node.name)))
                for made, others in ((behind, before), (before, behind)):
                    if len(made) == 1 and not others and _is_joint(body, graph, plan, node, made[0]):
                        found[str(node.attrs["key"])] = made[0], node
    return found


def _is_joint(body: Program, graph: str, plan: Plan, node: Node, r: Reshard) -> bool:
    """Tells whether only ``node`` reads a sum along the plan's axis, or the sum reads all results of ``node``."""
    if r.target != B or r.source != Partial(str(node.attrs["reduction"])):
        return False
    strategies = plan.strategies[graph]
    readers = body.consumers.get(r.ref, ())
    if r.ref.node != node.name and ([reader.name for reader, _ in readers] != [node.name] or r.ref in body.outputs):
        return False
    # What another stage group takes it has made itself, or its own sum of it, as the program in whole says.
    taken = [strategies[reader.name].inputs[i] for reader, i in readers if reader.op != STAGE_OUTPUT]
    taken += [p for ref, p in zip(body.outputs, plan.returned[graph]) if ref == r.ref]
    return all(p == B for p in taken)


def join_sums(program: Program, keys: Collection[str], axis: str) -> Program:
    """Merges sums along ``axis`` in one rank's program into those with ``keys``, which then are along both axes."""
    if not keys:
        return program
    functions = {name: _join(body, keys, axis) for name, body in program.functions.items()}
    return replace(_join(program, keys, axis), functions=functions)


def _join(program: Program, keys: Collection[str], axis: str) -> Program:
    moved: dict[Ref, Ref] = {}
    over: dict[str, Node] = {}
    left: dict[str, list[int]] = {}  # sum along the axis -> the operands that it keeps
    for node in program.nodes:
        if node.op != ALL_REDUCE or node.marks.axis != (axis,) or node.controls:
            continue
        for i, operand in enumerate(node.inputs[1:]):
            made = Ref(node.name, i)
            before, behind = program.by_name[operand.node], _only_reader(program, made)
            if _takes_up(before, node, keys) and _only_reader(program, operand) is not None:
                one = before
            elif behind is not None and _takes_up(behind, node, keys):
                one = behind
            else:
                continue
            over[one.name] = one.with_marks(axis=(*axes_of_sum(one), axis))
            moved[made] = operand
            left.setdefault(node.name, list(range(len(node.inputs) - 1))).remove(i)
    if not moved:
        return program
    for name, kept in left.items():
        moved.update((Ref(name, i), Ref(name, at)) for at, i in enumerate(kept))
    gone = {name for name, kept in left.items() if not kept}
    nodes = {}
    for node in program.nodes:
        if node.name not in gone:
            node = over.get(node.name, node)
            nodes[node.name] = _restrict(node, left[node.name]) if node.name in left else node
    effects = tuple(e for e in program.effects if e not in gone)
    return rewire(replace(program, effects=effects), nodes, moved)


def _takes_up(one: Node, node: Node, keys: Collection[str]) -> bool:
    """Tells whether ``one``, a sum along earlier axes, is to be merged with ``node``."""
    alike = all(one.attrs.get(name) == node.attrs.get(name) for name in ("reduction", "wire_dtype"))
    return str(one.attrs.get("key", "")) in keys and _is_one_sum(one) and alike


def _only_reader(program: Program, ref: Ref) -> Node | None:
    readers = program.consumers.get(ref, ())
    return readers[0][0] if len(readers) == 1 and ref not in program.outputs else None


def _restrict(node: Node, kept: Collection[int]) -> Node:
    """Restricts a sum to some of its tensors."""
    return replace(
        node,
        inputs=(node.inputs[0], *(node.inputs[1 + i] for i in kept)),
        outputs=tuple(node.outputs[i] for i in kept),
        attrs={**node.attrs, "N": len(kept)},
    )


def axes_of_sum(node: Node) -> tuple[str, ...]:
    """Returns the axes over which a node sums; this is known until ranks replace them."""
    return node.marks.axis


def _is_one_sum(node: Node) -> bool:
    return node.op == ALL_REDUCE and bool(node.marks.axis) and len(node.outputs) == 1
