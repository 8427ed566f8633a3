"""Groups the nodes that become one elementwise operation.

A group's nodes have results of one shape, or are sums of such results, and each reads another one's. No path leads out
of a group and back into it: nodes have levels, which rise where a path leaves a group, and a group's nodes have one
level. All of them come after the same exchanges with other ranks, so that no exchange waits for another one that it did
not wait for before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from whale.ir.ops import EXCHANGES, RANDOM, READS, UPDATES
from whale.ir.program import Node, Program, Ref, iterate_function_refs
from whale.ir.values import TensorType
from whale.passes.elementwise.code import MOST_OF_A_KIND, find_elementwise_type, find_sum_type
from whale.passes.elementwise.units import join_places, list_predecessors

# Stateful operations that end whatever others do.
_QUIET = READS | UPDATES | RANDOM | {"VarHandleOp", "Placeholder"}


class _Place(NamedTuple):
    """A key that is equal for nodes that may be fused.

    Attributes:
      type: of its result, or of the tensor it sums.
      recomputed: whether the node recomputes an activation to save memory.
      level: of the group; met: bit set of the exchanges and other synchronising nodes it waits for.
    """

    type: TensorType
    recomputed: bool
    level: int
    met: int


class Group(NamedTuple):
    """Nodes in the program's order; ``type`` is that of what they compute, or sum, element by element."""

    type: TensorType
    nodes: list[Node]


def find_groups(program: Program) -> list[Group]:
    """Returns the groups that have two nodes or more, or a sum."""
    types: dict[str, TensorType] = {}
    sums: set[str] = set()
    for node in program.nodes:
        kind = find_elementwise_type(program, node)
        if kind is None and (kind := find_sum_type(program, node)) is not None:
            sums.add(node.name)
        if kind is not None:
            types[node.name] = kind
    places = _find_places(program, types, sums)
    _move_to_readers(program, places, sums)
    together = _join_groups(program, places)
    return [Group(places[g[0].name].type, g) for g in together if len(g) > 1 or g[0].name in sums]


def _find_places(program: Program, types: Mapping[str, TensorType], sums: Collection[str]) -> dict[str, _Place]:
    """Returns the earliest place of each node that may be fused."""
    levels: dict[str, int] = {}
    met: dict[str, int] = {}
    places: dict[str, _Place] = {}
    bits = 0
    for node in program.nodes:
        kind, recomputed = types.get(node.name), node.marks.recomputed
        level = after = 0
        known = [name for name in dict.fromkeys(list_predecessors(node)) if name in levels]
        for name in known:
            after |= met[name]
        for name in known:
            place = places.get(name)
            # On from a group, either within it or out of it: a sum is known when all elements are.
            left = place is not None and (
                place.type != kind or place.recomputed != recomputed or place.met != after or name in sums
            )
            level = max(level, levels[name] + left)
        if kind is not None:
            places[node.name] = _Place(kind, recomputed, level, after)
        if may_synchronize(node):
            after |= 1 << bits
            bits += 1
        levels[node.name], met[node.name] = level, after
    return places


def may_synchronize(node: Node) -> bool:
    """Tells whether other ranks or threads may have to act before the node ends."""
    return (
        node.op in EXCHANGES
        or (node.stateful and node.op not in _QUIET)
        or any(True for _ in iterate_function_refs(node))
    )


def _move_to_readers(program: Program, places: dict[str, _Place], sums: Collection[str]) -> None:
    """Moves a node to the place of its readers, if they have a common one, so that its result is not stored any more.

    A node stays if several operands as large as its result would have to be stored instead.
    """
    needed = {ref.node for ref in program.outputs}.union(program.effects)
    waited_for = {name for node in program.nodes for name in node.controls}
    for node in reversed(program.nodes):
        place = places.get(node.name)
        if place is None or node.name in needed or node.name in waited_for or node.name in sums:
            continue
        readers = {places.get(reader.name) for reader, _ in program.consumers.get(Ref(node.name), ())}
        (to, *others) = readers or {None}
        if others or to is None or to == place or (to.type, to.recomputed) != (place.type, place.recomputed):
            continue
        whole = {ref for ref in node.inputs if program.find_type(ref).shape == place.type.shape}
        if len(whole) <= 1:
            places[node.name] = to


def _join_groups(program: Program, places: Mapping[str, _Place]) -> list[list[Node]]:
    """Joins nodes to groups; a group that is too large for an operation's text is split in the program's order."""
    top = join_places(program, places, _Place.__eq__)
    whole: dict[str, list[Node]] = {}
    for node in program.nodes:
        if node.name in places:
            whole.setdefault(top(node.name), []).append(node)
    groups: list[list[Node]] = []
    for nodes in whole.values():
        groups.append([])
        names: set[str] = set()
        read: set[Ref] = set()
        for node in nodes:
            more = [ref for ref in node.inputs if ref.node not in names]
            if groups[-1] and (len(read.union(more)) > MOST_OF_A_KIND or len(names) == MOST_OF_A_KIND):
                groups.append([])
                names, read, more = set(), set(), list(node.inputs)
            groups[-1].append(node)
            names.add(node.name)
            read.update(more)
    return groups
