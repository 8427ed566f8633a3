"""Draws a captured plan's layers as a graph: which layer reads which, how each is divided, what moves between them."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whale.ir.plan_text import format_bytes
from whale.planner.report.analysis import NO_SCOPE, layer_of

if TYPE_CHECKING:
    import networkx

ACROSS = 6  # most boxes in a line; more layers of the same depth are drawn on several lines
_BACKWARD = ("gradient_tape", "gradients")  # scopes of tf.GradientTape and of tf.gradients


def describe_layer_graph(
    step: networkx.DiGraph,
    kept: Collection[str],
    seconds: Mapping[str, float],
    texts: Mapping[str, str],
) -> dict[str, Any] | None:
    """Returns the boxes and arrows of the page's graph of layers; None: no layer reads another one.

    Layers are name scopes of the forward pass, and single operations that are in no scope, or in a scope that contains
    other layers. Layers that read each other's results share a box. A layer stands one line below the lowest layer that
    it reads, and within its line near the layers that it reads.

    Args:
        step: the graph of operations and tensors (see `whale.planner.report.plan_graph`).
        kept: the scopes to draw; arrows bypass the others.
        seconds: seconds of kernels by layer; the chain of layers that takes the longest is marked.
        texts: the tooltip of each layer.
    """
    import networkx

    layer = _find_layers(_find_forward(step))
    layers = _join_layers(step, layer)
    alone = {name for name, of in layer.items() if name == of and step.nodes[name]["flops"] and layer_of(name) in kept}
    _pass_by(layers, set(layers) - set(kept) - alone)
    graph = networkx.condensation(layers)
    if not graph.number_of_edges():
        return None
    order = {name: place for place, name in enumerate(layers)}
    members = {box: sorted(graph.nodes[box]["members"], key=order.__getitem__) for box in graph}
    time_s = {box: sum(seconds.get(name, 0.0) for name in members[box]) for box in graph}
    # networkx weights arrows, not boxes: an arrow gets the time of its end, and those from a first layer also its time.
    weights = ((a, b, time_s[b] + (0.0 if graph.pred[a] else time_s[a])) for a, b in graph.edges)
    graph.add_weighted_edges_from(weights, weight="seconds")
    longest = networkx.dag_longest_path(graph, weight="seconds")
    operations: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for name, of in layer.items():
        operations[of].append(step.nodes[name])
    moved = {box: sum(one["moved_bytes"] for of in members[box] for one in operations[of]) for box in graph}
    divided = {box: _measure_divided([one for of in members[box] for one in operations[of]]) for box in graph}
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
                "ways": [round(part, 3) for part in divided[box]],
                "longest": box in longest,
                "moved": format_bytes(moved[box]) if moved[box] else "",
                "text": "\n".join(f"{name}\n{texts.get(name) or step.nodes[name]['op']}" for name in members[box]),
            }
            for box, (x, y) in places.items()
        ],
        "arrows": [
            [number[a], number[b], *_describe_tensors(layers, members[a], members[b]), (a, b) in chain]
            for a, b in graph.edges
        ],
    }


def _find_forward(step: networkx.DiGraph) -> set[str]:
    """Returns the operations of the forward pass: no gradient precedes them and, if there are gradients, one depends on
    them.
    """
    import networkx

    order = list(networkx.topological_sort(step))
    gradients = {name for name in order if any(part in _BACKWARD for part in name.split("/"))}
    behind, before = set(gradients), set(gradients)
    for name in order:
        if not behind.isdisjoint(step.pred[name]):
            behind.add(name)
    for name in reversed(order):
        if not before.isdisjoint(step.succ[name]):
            before.add(name)
    return (before if gradients else set(order)) - behind


def _find_layers(forward: Collection[str]) -> dict[str, str]:
    """Returns the layer of each operation.

    Operations in no scope, or in a scope that contains other layers, are layers of their own: together they would read,
    and be read by, half of the program's layers.
    """
    scopes = {name: layer_of(name) for name in forward}
    outer = {scope[:at] for scope in scopes.values() for at, sign in enumerate(scope) if sign == "/"} | {NO_SCOPE}
    return {name: name if scope in outer else scope for name, scope in scopes.items()}


def _join_layers(step: networkx.DiGraph, layer: Mapping[str, str]) -> networkx.DiGraph:
    """Returns a graph of layers; an arrow has the bytes of the tensors, and their changes of layout on the way."""
    import networkx

    layers = networkx.DiGraph()
    layers.add_nodes_from(layer[name] for name in step if name in layer)
    for before, after, tensors in step.edges(data=True):
        if before in layer and after in layer and tensors["bytes"] and layer[before] != layer[after]:
            _add_tensors(layers, layer[before], layer[after], tensors["bytes"], tensors["resharded"])
    return layers


def _add_tensors(layers: networkx.DiGraph, before: str, after: str, size: int, resharded: Sequence[str]) -> None:
    if not layers.has_edge(before, after):
        layers.add_edge(before, after, bytes=0, resharded=[])
    layers.edges[before, after]["bytes"] += size
    layers.edges[before, after]["resharded"] += resharded


def _pass_by(layers: networkx.DiGraph, dropped: Collection[str]) -> None:
    """Removes layers from the graph in place, and connects the layers before each of them with the layers after it."""
    for name in sorted(dropped):
        for before in list(layers.pred[name]):
            for after in list(layers.succ[name]):
                if name not in (before, after) and before != after:
                    into, out = layers.edges[before, name], layers.edges[name, after]
                    changes = [*into["resharded"], *out["resharded"]]
                    _add_tensors(layers, before, after, min(into["bytes"], out["bytes"]), changes)
        layers.remove_node(name)


def _place(graph: networkx.DiGraph, order: Mapping[int, int]) -> tuple[dict[int, tuple[float, int]], int]:
    """Returns the position of each box, (columns from the middle, lines from the top), and the number of lines.

    Args:
        order: place of each box in the program; orders boxes that read equal ones.
    """
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


def _measure_divided(operations: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns two fractions of a layer's work: what ranks divide by rows, and what they divide by other dimensions or
    sum.

    Work is FLOPs, or elements of results if the layer has no FLOPs.
    """
    works = any(one["flops"] for one in operations)
    rows = others = total = 0.0
    for one in operations:
        weight = one["flops"] if works else sum(_count_elements(shape) for shape in one["shapes"])
        kinds = {placement[:4] for placements in one["layouts"].values() for placement in placements}
        total += weight
        rows += weight * ("S(0)" in kinds)
        others += weight * any(kind.startswith(("S(", "P(")) and kind != "S(0)" for kind in kinds)
    return (rows / total, others / total) if total else (0.0, 0.0)


def _count_elements(shape: Sequence[int | None] | None) -> int:
    return math.prod(size or 1 for size in shape or ())


def _describe_tensors(
    layers: networkx.DiGraph, before: Sequence[str], after: Sequence[str]
) -> tuple[str, dict[str, int]]:
    """Returns the bytes of the tensors between two boxes, and how often each change of layout occurs on the way.

    Args:
        before, after: the layers of either box.
    """
    size, changes = 0, defaultdict[str, int](int)
    for a in before:
        for b in after:
            if layers.has_edge(a, b):
                size += layers.edges[a, b]["bytes"]
                for change in layers.edges[a, b]["resharded"]:
                    changes[change] += 1
    return format_bytes(size), dict(changes)
