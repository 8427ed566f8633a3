"""Draws a captured plan's layers as a graph: which reads which, how each is divided, what moves between them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whale.ir.plan_text import format_bytes
from whale.planner.report.analysis import layer_of

if TYPE_CHECKING:
    import networkx

ACROSS = 6  # boxes of a line; layers of one generation that are more stand on several lines
_BACKWARD = ("gradient_tape", "gradients")  # scopes of tf.GradientTape and of tf.gradients


def describe_layer_graph(
    step: networkx.DiGraph,
    kept: Collection[str],
    divided: Mapping[str, tuple[float, float]],
    seconds: Mapping[str, float],
    texts: Mapping[str, str],
) -> dict[str, Any] | None:
    """Returns the boxes and arrows of the page's graph of layers; None: there are not two layers that read each other.

    Layers are name scopes of the forward pass. Scopes of which each reads the other's results share a box. A layer
    stands a line below the last of those that it reads; in a line, near what it reads.

    Args:
      step: operations and tensors (see `whale.planner.report.plan_graph`).
      kept: the layers that are drawn; arrows lead past the others.
      divided: of each layer's operations, the parts with divided rows and with tensors divided otherwise.
      seconds: of kernels, by layer; the chain of layers that takes longest is marked.
      texts: what is said of a layer under the mouse.
    """
    import networkx

    layers = _join_layers(step, _find_forward(step))
    _pass_by(layers, set(layers) - set(kept))
    graph = networkx.condensation(layers)
    if not graph.number_of_edges():
        return None
    order = {name: place for place, name in enumerate(layers)}
    members = {box: sorted(graph.nodes[box]["members"], key=order.__getitem__) for box in graph}
    time_s = {box: sum(seconds.get(name, 0.0) for name in members[box]) for box in graph}
    # Its weights stand on arrows: the first layer's time counts with the arrow out of it.
    weights = ((a, b, time_s[b] + (0.0 if graph.pred[a] else time_s[a])) for a, b in graph.edges)
    graph.add_weighted_edges_from(weights, weight="seconds")
    longest = networkx.dag_longest_path(graph, weight="seconds")
    places, lines = _place(graph, {box: order[members[box][0]] for box in graph})
    number = {box: at for at, box in enumerate(places)}
    chain = set(itertools.pairwise(longest))
    return {
        "lines": lines,
        "boxes": [
            {
                "name": " + ".join(name.rpartition("/")[2] for name in members[box]),
                "x": x,
                "y": y,
                "ways": [round(part, 3) for part in _weigh([divided.get(name, (0.0, 0.0)) for name in members[box]])],
                "longest": box in longest,
                "text": "\n".join(f"{name}\n{texts.get(name, '')}" for name in members[box]),
            }
            for box, (x, y) in places.items()
        ],
        "arrows": [
            [number[a], number[b], *_describe_tensors(layers, members[a], members[b]), (a, b) in chain]
            for a, b in graph.edges
        ],
    }


def _find_forward(step: networkx.DiGraph) -> set[str]:
    """Finds the operations that no gradient leads to."""
    import networkx

    behind: set[str] = set()
    for name in networkx.topological_sort(step):
        if any(part in _BACKWARD for part in name.split("/")) or not behind.isdisjoint(step.pred[name]):
            behind.add(name)
    return set(step) - behind


def _join_layers(step: networkx.DiGraph, forward: Collection[str]) -> networkx.DiGraph:
    """Makes a graph of layers: its arrows have the bytes of the tensors, and the changes of layout on the way."""
    import networkx

    layers = networkx.DiGraph()
    layers.add_nodes_from(layer_of(name) for name in step if name in forward)
    for before, after, tensors in step.edges(data=True):
        if before in forward and after in forward and tensors["bytes"]:
            a, b = layer_of(before), layer_of(after)
            if a != b:
                _add_tensors(layers, a, b, tensors["bytes"], tensors["resharded"])
    return layers


def _add_tensors(layers: networkx.DiGraph, before: str, after: str, size: int, resharded: Sequence[str]) -> None:
    if not layers.has_edge(before, after):
        layers.add_edge(before, after, bytes=0, resharded=[])
    layers.edges[before, after]["bytes"] += size
    layers.edges[before, after]["resharded"] += resharded


def _pass_by(layers: networkx.DiGraph, dropped: Collection[str]) -> None:
    """Removes layers: what they read leads on to what reads them."""
    for name in sorted(dropped):
        for before in list(layers.pred[name]):
            for after in list(layers.succ[name]):
                if name not in (before, after) and before != after:
                    into, out = layers.edges[before, name], layers.edges[name, after]
                    changes = [*into["resharded"], *out["resharded"]]
                    _add_tensors(layers, before, after, min(into["bytes"], out["bytes"]), changes)
        layers.remove_node(name)


def _place(graph: networkx.DiGraph, order: Mapping[int, int]) -> tuple[dict[int, tuple[float, int]], int]:
    """Returns each box's place, in boxes from the middle and lines from the top, and the number of lines."""
    import networkx

    places: dict[int, tuple[float, int]] = {}
    line = 0
    for generation in networkx.topological_generations(graph):
        above = {box: [places[one][0] for one in graph.pred[box]] for box in generation}
        ordered = sorted(generation, key=lambda box: (sum(above[box]) / max(1, len(above[box])), order[box]))
        for first in range(0, len(ordered), ACROSS):
            row = ordered[first : first + ACROSS]
            for column, box in enumerate(row):
                places[box] = (column - (len(row) - 1) / 2, line)
            line += 1
    return places, line


def _weigh(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    rows, tensors = zip(*parts)
    return sum(rows) / len(parts), sum(tensors) / len(parts)


def _describe_tensors(
    layers: networkx.DiGraph, before: Sequence[str], after: Sequence[str]
) -> tuple[str, dict[str, int]]:
    """Returns (the bytes of the tensors from the layers of one box to those of another, their changes of layout)."""
    size, changes = 0, defaultdict[str, int](int)
    for a in before:
        for b in after:
            if layers.has_edge(a, b):
                size += layers.edges[a, b]["bytes"]
                for change in layers.edges[a, b]["resharded"]:
                    changes[change] += 1
    return format_bytes(size), dict(changes)
