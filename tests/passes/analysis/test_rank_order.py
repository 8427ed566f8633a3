"""Ranks laid on a mesh by the links between their hosts."""

from __future__ import annotations

import random
from itertools import permutations
from math import prod

import networkx
import pytest

from whale.config import Mesh
from whale.ir.mesh import Axis
from whale.ir.mesh import Mesh as Grid
from whale.ir.topology import Link, Topology, make_topology
from whale.passes.analysis.axes import data_coordinates, fill_mesh
from whale.passes.analysis.rank_order import order_ranks
from whale.passes.analysis.stages import share_ranks

MB = 1e6


def topology(counts: str, **links: float) -> Topology:
    """Hosts a, b, c, ... of so many ranks: ``topology("2+1+1", ab=100, ac=10)``, in 10^6 bytes/s; others are not known.

    ``counts`` may also be the host of each rank: "abab".
    """
    names = "".join("abcdefgh"[i] * int(n) for i, n in enumerate(counts.split("+"))) if counts[0].isdigit() else counts
    known = {
        tuple(sorted((ord(pair[0]) - 97, ord(pair[1]) - 97))): Link(1e-4, rate * MB) for pair, rate in links.items()
    }
    found = make_topology(list(names), known)
    assert found is not None
    return found


def lay(counts: str, mesh: str, **links: float) -> dict[str, list[str]]:
    """Returns the groups along each axis, by the hosts of their ranks."""
    axes = [Axis(name, size) for name, size in Mesh.parse(mesh).items()]
    here = topology(counts, **links)
    order = order_ranks(here, axes) or tuple(range(len(here.hosts)))
    assert sorted(order) == list(range(len(here.hosts)))
    grid = Grid(tuple(axes), order)
    groups = {a.name: sorted({grid.list_ranks_along(rank, a.name) for rank in order}) for a in axes}
    if "stage" not in groups:
        assert order[0] == 0
    return {
        name: ["".join(here.names[here.hosts[r]] for r in group) for group in found] for name, found in groups.items()
    }


def test_tensors_are_divided_within_hosts_and_rows_between() -> None:
    assert lay("2+2", "data=2,tensor=2") == {"data": ["ab", "ab"], "tensor": ["aa", "bb"]}
    assert lay("2+2", "tensor=2,data=2")["tensor"] == ["aa", "bb"]
    assert lay("abab", "data=2,tensor=2")["tensor"] == ["aa", "bb"]
    assert lay("abcabc", "data=3,expert=2")["expert"] == ["aa", "bb", "cc"]
    assert lay("4+4", "expert=4,data=2")["expert"] == ["aaaa", "bbbb"]
    assert lay("3+3", "tensor=3,data=2")["tensor"] == ["aaa", "bbb"]


def test_stages_are_what_slow_links_lie_between() -> None:
    assert lay("2+2", "data=2,stage=2") == {"data": ["aa", "bb"], "stage": ["ab", "ab"]}
    found = lay("4+4", "tensor=2,stage=2,data=2")
    assert found["tensor"] == ["aa", "aa", "bb", "bb"] and found["data"] == ["aa", "aa", "bb", "bb"]
    # Hosts in pairs: rows over the fast links, stages over the slow ones.
    pairs = {"ac": 1000.0, "bd": 1000.0, "ab": 10.0, "ad": 10.0, "bc": 10.0, "cd": 10.0}
    assert lay("1+1+1+1", "stage=2,data=2", **pairs) == {"data": ["ac", "bd"], "stage": ["ab", "cd"]}
    # Stages follow each other along the fast links.
    assert lay("1+1+1", "stage=3,data=1") == {"data": ["a", "b", "c"], "stage": ["abc"]}


def test_a_chain_of_stages_avoids_the_slowest_link() -> None:
    along = lay("2+2+2", "stage=3,data=2", ab=10, ac=100, bc=100)["stage"]
    assert along in (["acb", "acb"], ["bca", "bca"])
    slow = lay("2+2+2+2", "stage=4,data=2", ac=100, cb=100, bd=100, ab=10, ad=10, cd=10)["stage"]
    assert slow in (["acbd", "acbd"], ["dbca", "dbca"])


def test_uneven_hosts_cross_as_seldom_as_they_can() -> None:
    assert lay("1+2+1", "data=2,tensor=2")["tensor"] == ["ac", "bb"]
    assert sorted(lay("3+1", "data=2,tensor=2")["tensor"]) == ["aa", "ab"]
    assert sorted(lay("5+3", "data=2,tensor=4")["tensor"]) == ["aaaa", "abbb"]
    assert sorted(lay("4+2", "data=2,tensor=3")["tensor"]) == ["aaa", "abb"]
    # What is left of hosts meets over the fastest links.
    assert sorted(lay("3+3+1+1", "data=4,tensor=2", ab=10, ac=100, ad=10, bc=10, bd=100, cd=10)["tensor"]) == [
        "aa", "ac", "bb", "bd",
    ]  # fmt: skip


def test_ranks_stay_as_they_are_where_that_is_as_good() -> None:
    two = [Axis("data", 2), Axis("tensor", 2)]
    assert order_ranks(None, two) == ()
    assert order_ranks(topology("2+2"), two) == ()
    assert order_ranks(topology("2+2"), [Axis("data", 4)]) == () == order_ranks(topology("3+3"), two)
    assert order_ranks(topology("2+2"), [Axis("tensor", 2), Axis("data", 2)]) == (0, 2, 1, 3)
    # Links that differ by noise are alike.
    assert order_ranks(topology("1+1+1+1", ab=90, ac=100, ad=110, bc=95, bd=105, cd=99), two) == ()


@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_as_good_as_the_best_of_all_orders(seed: int) -> None:
    """Of 2 to 4 hosts with drawn links and drawn ranks: no order has groups that divide tensors over faster links."""
    rng = random.Random(seed)
    hosts = rng.randrange(2, 5)
    names = "".join(rng.choice("abcd"[:hosts]) for _ in range(6 - hosts)) + "abcd"[:hosts]
    names = names.translate({ord(one): "abcd"[i] for i, one in enumerate(dict.fromkeys(names))})
    pairs = ["abcd"[i] + "abcd"[j] for i in range(hosts) for j in range(i + 1, hosts)]
    here = topology(names, **{pair: rng.choice([10, 100, 1000]) for pair in pairs})
    axes = [Axis("data", 3), Axis("tensor", 2)]
    distances = here.distances()

    def cost(order: tuple[int, ...]) -> int:
        grid = Grid(tuple(axes), order)
        groups = {grid.list_ranks_along(rank, "tensor") for rank in order}
        of = [tuple(sorted(here.hosts[rank] for rank in group)) for group in groups]
        return sum(0 if one == other else 4 ** distances[one, other] for one, other in of)

    found = order_ranks(here, axes) or tuple(range(6))
    assert cost(found) == min(map(cost, permutations(range(6))))


def test_large_meshes_are_laid_in_no_time() -> None:
    names = "abcdefgh" * 16  # as a launcher gives ranks to hosts in turn
    here = topology(names)
    axes = [Axis("stage", 2), Axis("data", 8), Axis("tensor", 8)]
    order = order_ranks(here, axes)
    grid = Grid(tuple(axes), order)
    assert all(len({here.hosts[r] for r in grid.list_ranks_along(rank, "tensor")}) == 1 for rank in range(128))
    assert prod(a.size for a in axes) == len(set(order))


def test_hosts_and_links_are_a_graph() -> None:
    graph = topology("2+1+1", ab=1000, ac=10, bc=12).graph()
    assert isinstance(graph, networkx.Graph) and graph.nodes["a"]["ranks"] == [0, 1]
    assert graph.edges["a", "b"] == {"distance": 1, "bytes_per_s": 1e9, "exchange_s": 1e-4}
    tree = networkx.minimum_spanning_tree(graph, weight="distance")
    assert len(tree.edges) == 2 and tree.has_edge("a", "b") and graph.edges["a", "c"]["distance"] == 2
    assert topology("2+1").graph().edges["a", "b"] == {"distance": 1}


def test_stages_without_devices_have_their_replicas_on_one_host() -> None:
    assert share_ranks(2, 4) == [(0, 2), (1, 3)] == share_ranks(2, 4, (0, 0, 0, 0))
    assert share_ranks(2, 4, (0, 0, 1, 1)) == [(0, 1), (2, 3)]
    assert share_ranks(2, 4, (0, 1, 0, 1)) == [(0, 2), (1, 3)]
    assert share_ranks(3, 4, (0, 0, 1, 1)) == [(0, 3), (1,), (2,)]


def test_rows_follow_the_order() -> None:
    assert fill_mesh({"tensor": 2}, 4) == {"data": 2, "tensor": 2} and fill_mesh({"tensor": 2}, 5) == {}
    assert data_coordinates({"data": 2, "tensor": 2}, 4) == (0, 0, 1, 1)
    assert data_coordinates({"data": 2, "tensor": 2}, 4, (0, 2, 1, 3)) == (0, 1, 0, 1)
