"""Cheapest cuts, beside those of another library."""

import random

import networkx as nx
import pytest

from whale.errors import PlanError
from whale.passes.propagation.partial_sums import UNBOUNDED, Network


@pytest.mark.parametrize("seed", range(40))
def test_of_cheapest_cuts_the_one_nearest_to_the_source_is_found(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 14)
    graph, network = nx.DiGraph(), Network()
    graph.add_nodes_from(["s", "t"])
    for _ in range(draw.randint(count, 4 * count)):
        a, b = draw.choice(["s", *range(count)]), draw.choice([*range(count), "t"])
        price = UNBOUNDED if draw.random() < 0.2 and (a, b) != ("s", "t") else float(draw.randint(1, 5))
        if a != b:
            network.add(a, b, price)
            graph.add_edge(a, b, capacity=price)
    try:
        least, _ = nx.minimum_cut(graph, "s", "t")
    except nx.NetworkXUnbounded:
        with pytest.raises(PlanError):
            network.find_reachable(range(count), "s", "t")
        return
    reached = network.find_reachable(range(count), "s", "t")
    assert "s" in reached and "t" not in reached
    assert sum(c for a, b, c in graph.edges(data="capacity") if a in reached and b not in reached) == least
    residual = nx.algorithms.flow.edmonds_karp(graph, "s", "t")
    open_ = nx.DiGraph([(a, b) for a, b, e in residual.edges(data=True) if e["capacity"] > e["flow"]])
    open_.add_node("s")
    assert reached == {"s", *nx.descendants(open_, "s")}


def test_parts_are_what_is_connected_without_the_ends() -> None:
    network = Network()
    for a, b in (("s", 1), (2, 1), ("s", 3), (3, "t"), (4, 3)):
        network.add(a, b)
    assert [set(part) for part in network.parts(("s", "t"))] == [{1, 2}, {3, 4}]
