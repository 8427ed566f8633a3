"""Minimum cuts: as cheap as the cheapest of all assignments of nodes to sides, and the nearest of those."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from whale.passes.layout.min_cut import SINK, SOURCE, Network

pytestmark = pytest.mark.core


def cheapest(edges: dict[tuple[object, object], float], nodes: list[int]) -> tuple[float, set[object]]:
    """Cost and source's side by trying all; of equal costs the smallest side."""
    found: list[tuple[float, int, set[object]]] = []
    for chosen in itertools.product((False, True), repeat=len(nodes)):
        side = {SOURCE, *(n for n, stays in zip(nodes, chosen) if stays)}
        found.append((sum(c for (a, b), c in edges.items() if a in side and b not in side), len(side), side))
    cost, _, side = min(found, key=lambda one: one[:2])
    return cost, side


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_the_cheapest_and_nearest_to_the_source(seed: int) -> None:
    generator = np.random.default_rng(seed)
    nodes = list(range(6))
    edges: dict[tuple[object, object], float] = {}
    for tail, head in itertools.permutations([SOURCE, *nodes, SINK], 2):
        if tail is not SINK and head is not SOURCE and (tail, head) != (SOURCE, SINK) and generator.random() < 0.4:
            endless = generator.random() < 0.2 and tail is not SOURCE and head is not SINK
            edges[tail, head] = math.inf if endless else float(generator.integers(1, 5))
    network = Network()
    for (tail, head), capacity in edges.items():
        network.add(tail, head, capacity)
    regions = list(network.regions())
    assert sum(map(len, regions)) == len(set().union(*regions))
    side = set().union({SOURCE}, *map(network.source_side, regions))
    assert side == cheapest(edges, nodes)[1]
