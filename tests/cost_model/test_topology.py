"""Exchanges priced by the links between hosts, and the topology of a described cluster."""

from __future__ import annotations

from dataclasses import astuple

import msgspec
import pytest

from cost_model.cluster.cluster_file import Attachment, Cluster, DeviceEntry, HostEntry, NetworkEntry
from cost_model.graph.machine import Rates, cluster_topology, make_measured_machine, make_rated_machine
from cost_model.graph.machine_profile import HostLink, MachineProfile
from cost_model.graph.traffic import Exchange
from tests.cost_model.test_captured import TABLE
from whale.ir.topology import Link, Topology, make_topology

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


def test_links_of_a_profile_price_exchanges_of_some_ranks() -> None:
    """Those of all ranks were measured themselves."""
    links = [HostLink("b", "a", *astuple(SLOW)), HostLink("a", "c", *astuple(FAST)), HostLink("c", "b", *astuple(FAST))]
    profile = msgspec.structs.replace(TABLE, hosts=3, links=links)
    assert profile.find_links(("a", "b", "c")) == {(0, 1): SLOW, (0, 2): FAST, (1, 2): FAST}
    assert profile.find_links(("a", "d")) == {}
    topology = make_topology("abc", profile.find_links("abc"))

    def seconds(profile: MachineProfile, topology: Topology | None, *ranks: int) -> float:
        machine = make_measured_machine(profile, 3, topology=topology)
        return machine.exchange_s(Exchange("all_reduce", "key", ranks, T, T))

    assert seconds(profile, topology, 0, 1) == pytest.approx(1e-3 + T / 1e6)
    assert seconds(profile, topology, 0, 2) == pytest.approx(1e-4 + T / 1e8)
    assert seconds(profile, topology, 0, 1, 2) == seconds(profile, None, 0, 1, 2) < 0.1
    # All of them take three times as long, and computing twice.
    slower = profile.slow_down(2.0, 3.0)
    assert topology is not None and topology.slow_down(3.0).links == slower.find_links("abc")
    for ranks in ((0, 1), (0, 1, 2)):
        found = seconds(slower, topology.slow_down(3.0), *ranks)
        assert found == pytest.approx(3 * seconds(profile, topology, *ranks))
    assert [one.seconds for one in slower.operations] == [2 * one.seconds for one in profile.operations]


def test_rates_are_slower_as_asked() -> None:
    rates = Rates(1e9, 2e9, 1e-6, 1e-4, 1e8, "for the test", devices=Link(1e-5, 1e10))
    found = Rates(5e8, 1e9, 2e-6, 3e-4, 1e8 / 3, "for the test", devices=Link(3e-5, 1e10 / 3))
    slower = rates.slow_down(2.0, 3.0)
    assert astuple(slower)[:5] == pytest.approx(astuple(found)[:5]) and slower.devices is not None
    assert astuple(slower.devices) == pytest.approx(astuple(found.devices or FAST))


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
