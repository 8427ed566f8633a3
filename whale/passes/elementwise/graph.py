"""Fuses nodes of a graph: groups them, and puts one operation in place of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from whale.ir.program import Node, Program, Ref, rewire

_Place = TypeVar("_Place")


def list_predecessors(node: Node) -> Iterable[str]:
    """Returns the names of the nodes that ``node`` waits for."""
    return (*[name for name, _ in node.inputs], *node.controls)


def join_places(
    program: Program, places: Mapping[str, _Place], alike: Callable[[_Place, _Place], bool]
) -> Callable[[str], str]:
    """Groups connected nodes; returns a function from the name of a node in ``places`` to its group's name.

    Nodes are in one group if one waits for the other and ``alike`` is true for their places.
    """
    parent = {name: name for name in places}

    def find_root(name: str) -> str:
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    for node in program.nodes:
        if node.name not in places:
            continue
        before = [name for name, _ in node.inputs]
        for name in (*before, *node.controls) if node.controls else before:
            if name in places and alike(places[name], places[node.name]):
                parent[find_root(node.name)] = find_root(name)
    return find_root


def replace_by_operations(program: Program, made: Mapping[str, Node], moved: dict[Ref, Ref]) -> Program:
    """Replaces nodes by the operations made from them, each at the position of the last of its nodes.

    Args:
      made: replaced node -> its operation.
      moved: tensor of such a node that others read -> its replacement.
    """
    last = {made[n.name].name: n.name for n in program.nodes if n.name in made}
    nodes: dict[str, Node] = {}
    for old in program.nodes:
        node = made.get(old.name, old)
        if node is old or last[node.name] == old.name:
            nodes[node.name] = node
    for name, node in made.items():
        moved.setdefault(Ref(name), Ref(node.name))
    return rewire(program, nodes, moved) if made else program
