"""Fuses all-reduces of gradients in a rank's program over several mesh axes.

The plan of an axis fuses only the all-reduces along the last one: to the axes after it, an all-reduce along an earlier
axis is an ordinary op, and a rule cannot split many tensors, each differently. In a rank's program they are local
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from whale.ir.ops import ALL_REDUCE
from whale.ir.program import Node, Program, Ref, rewire
from whale.ir.values import group_by_bytes
from whale.passes.analysis.uses import is_taken_by_updates


def fuse_sums(program: Program, group_bytes: int, order: Mapping[str, int], axes: Sequence[tuple[int, ...]]) -> Program:
    """Fuses independent all-reduces of gradients of ``program`` over the same ranks.

    All ranks of a group find the same groups: keys, types and the order of these all-reduces are the same on them.
    Nodes between them along later axes may differ, where rows do; so axes are processed in turn.

    Args:
      group_bytes: largest size of a fused all-reduce.
      order: the order in which all-reduces join, by the part of a key before its ranks.
      axes: the ranks that reduce along each axis, or along several; the same axes in the same order on all of these.
    """
    for ranks in axes:
        program = _join(program, _along(program, group_bytes, order, ranks))
    return program


def _along(program: Program, group_bytes: int, order: Mapping[str, int], ranks: tuple[int, ...]) -> list[list[Node]]:
    """Returns the groups of all-reduces over ``ranks`` that are to be fused."""
    over = [n for n in program.nodes if n.op == ALL_REDUCE and tuple(n.attrs["ranks"]) == ranks]
    joining = {n.name for n in over if _may_join(program, n, group_bytes)}
    if len(joining) < 2:
        return []
    depth: dict[str, int] = {}
    kinds: dict[tuple[object, ...], list[Node]] = {}
    for node in program.nodes:
        behind = max([0, *[depth[r.node] for r in node.inputs], *[depth[name] for name in node.controls]])
        joins = node.name in joining
        depth[node.name] = behind + joins
        if joins:
            kind = (behind, node.attrs["reduction"], node.attrs.get("wire_dtype"), node.outputs[0].dtype)
            kinds.setdefault(kind, []).append(node)
    groups: list[list[Node]] = []
    for members in kinds.values():
        groups += group_by_bytes(
            sorted(members, key=lambda n: _place(n, order)), lambda n: n.outputs[0].bytes, group_bytes
        )
    return [group for group in groups if len(group) > 1]


def _may_join(program: Program, node: Node, group_bytes: int) -> bool:
    t = node.outputs[0]
    return (
        len(node.outputs) == 1
        and t.is_static
        and t.bytes <= group_bytes
        and is_taken_by_updates(program, Ref(node.name))
    )


def _place(node: Node, order: Mapping[str, int]) -> tuple[int, str]:
    key = str(node.attrs["key"])
    return order.get(key.partition("@")[0], len(order)), key


def _join(program: Program, groups: list[list[Node]]) -> Program:
    if not groups:
        return program
    results: dict[Ref, Ref] = {}
    stands_for: dict[str, Node] = {}  # of the sums that are joined
    for members in groups:
        first, name = members[0], f"{members[0].name}/whale_sums"
        results.update((Ref(node.name), Ref(name, i)) for i, node in enumerate(members))
        joined = replace(
            first,
            name=name,
            inputs=(first.inputs[0], *(n.inputs[1] for n in members)),
            controls=tuple(dict.fromkeys(c for n in members for c in n.controls)),
            attrs={**first.attrs, "N": len(members), "key": f"{first.attrs['key']}+{len(members) - 1}"},
            outputs=tuple(n.outputs[0] for n in members),
        )
        stands_for.update((node.name, joined) for node in members)
    found = [stands_for.get(node.name, node) for node in program.nodes]
    return rewire(program, {node.name: node for node in found}, results)
