"""Exchanges priced by the links between hosts, and the topology of a described cluster."""

from __future__ import annotations

import pytest

from cost_model.cluster.cluster_file import Attachment, Cluster, DeviceEntry, HostEntry, NetworkEntry
from cost_model.graph.machine import Rates, cluster_topology, make_rated_machine
from cost_model.graph.traffic import Exchange
from whale.ir.topology import Link, Topology

FAST, SLOW, INSIDE = Link(1e-4, 1e8), Link(1e-3, 1e6), Link(1e-5, 1e9)
T = 4_000_000


def seconds(topology: Topology, kind: str, *ranks: int) -> float:
    rates = [Rates(1e9, 1e9, 0.0, 5.0, 1.0, "for the test")] * len(topology.hosts)
    machine = make_rated_machine(rates, topology=topology)
    return machine.exchange_s(Exchange(kind, "key", ranks, T, T))


def test_what_hosts_exchange_crosses_their_link_once() -> None:
    pair = Topology((0, 0, 1, 1), ("a", "b"), {(0, 1): SLOW}, INSIDE)
    assert seconds(pair, "all_reduce", 0, 1) == pytest.approx(1e-5 + T / 1e9)
    assert seconds(pair, "all_reduce", 0, 1, 2, 3) == pytest.approx(1e-5 + T / 1e9 + 1e-3 + T / 1e6)
    assert seconds(pair, "all_gather", 0, 1, 2, 3) == pytest.approx(1e-5 + T / 2 / 1e9 + 1e-3 + T / 2 / 1e6)
    assert seconds(pair, "all_to_all", 0, 1, 2, 3) == pytest.approx(1e-5 + T / 4 / 1e9 + 1e-3 + T / 1e6)
    # Groups of a rank of each host share the link.
    assert seconds(pair, "reduce_scatter", 0, 2) == pytest.approx(1e-3 + 2 * T / 2 / 1e6)
    assert seconds(pair, "point_to_point", 1, 2) == pytest.approx(1e-3 + 2 * T / 1e6)
    assert seconds(pair, "broadcast", 0, 1) == pytest.approx(1e-5 + T / 1e9)


def test_the_slowest_of_the_links_between_a_groups_hosts_counts() -> None:
    three = Topology((0, 1, 2), ("a", "b", "c"), {(0, 1): FAST, (0, 2): SLOW, (1, 2): SLOW})
    assert seconds(three, "all_reduce", 0, 1) == pytest.approx(1e-4 + T / 1e8)
    assert seconds(three, "all_reduce", 0, 1, 2) == pytest.approx(2e-3 + 2 * (2 / 3) * T / 1e6)


def test_a_cluster_file_has_a_topology() -> None:
    def host(name: str, count: int, **nics: int) -> HostEntry:
        networks = {network: Attachment(nics=n) for network, n in nics.items()}
        return HostEntry(name, [DeviceEntry("v100-sxm2-32gb", 2)], count, networks)

    networks = {"slow": NetworkEntry("ethernet-10g"), "fast": NetworkEntry("ethernet-100g", oversubscription=2.0)}
    cluster = Cluster("lab", [host("new", 2, slow=1, fast=2), host("old", 1, slow=1)], networks)
    found = cluster_topology(cluster, 6)
    assert found is not None and found.hosts == (0, 0, 1, 1, 2, 2) and found.names == ("new/0", "new/1", "old/2")
    fast, slow = (networks[name].network.bytes_per_s for name in ("fast", "slow"))
    assert found.links[0, 1].bytes_per_s == fast * 2 / 2 and found.links[0, 2].bytes_per_s == slow
    assert found.distances() == {(0, 1): 1, (0, 2): 2, (1, 2): 2}
    assert cluster_topology(cluster, 2) is None
