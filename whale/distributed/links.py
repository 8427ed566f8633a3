"""Finds the hosts of a run's ranks, and measures the links between the hosts.

Decision: 0174.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from whale.config import Config
from whale.distributed.between_hosts import time_all_reduces
from whale.distributed.msgpack_values import pack, unpack
from whale.ir.topology import Link, Topology, make_topology
from whale.log import log
from whale.started import ProcessPlace
from whale_ops import Communicator

_EXCHANGE_S = 60.0
_SMALL_BYTES, _SMALL_CALLS = 1 << 10, 7
# A large exchange has as many bytes as should take _LARGE_S, judged by the first one, within these limits.
_FIRST_BYTES, _MOST_BYTES, _LARGE_S, _LARGE_CALLS = 64 << 10, 4 << 20, 0.1, 4
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def find_topology(comm: Communicator, place: ProcessPlace, config: Config) -> Topology | None:
    """Returns which host each rank is on, without measured links; None if all are on one host. Collective between
    processes.

    Two hosts of the same name are told apart by their boot identifiers.
    """
    emulated = name_emulated_hosts(config, comm.size)
    if emulated or place.local_size == comm.size:
        return make_topology(emulated)
    own = socket.gethostname(), _BOOT.read_text() if _BOOT.exists() else ""
    said = [tuple(unpack(one)) for one in comm.allgather_bytes("whale/topology", pack(own), _EXCHANGE_S)]
    boots = {name: {boot for other, boot in said if other == name} for name, _ in said}
    return make_topology([name if len(boots[name]) == 1 else f"{name} {boot[:8]}" for name, boot in said])


def name_emulated_hosts(config: Config, size: int) -> list[str]:
    """Returns the name of each rank's emulated host; [] if no hosts are emulated, or their ranks do not add up to
    `size`.
    """
    names = [f"host {host}" for host, count in enumerate(config.network.hosts) for _ in range(count)]
    return names if len(names) == size else []


def measure_links(comm: Communicator, topology: Topology) -> Topology:
    """Measures all-reduces between each two hosts and within hosts, and returns the topology with these links;
    collective.

    Disjoint pairs of hosts are measured at the same time, in rounds of about half a second.
    """
    ranks_of = topology.ranks_of
    links: dict[tuple[int, int], Link] = {}
    for pairs in _list_rounds(len(ranks_of)):
        groups = [[ranks_of[one][0], ranks_of[other][0]] for one, other in pairs]
        links.update(zip(pairs, _measure_groups(comm, groups, "hosts")))
    within = _measure_groups(comm, [ranks for ranks in ranks_of if len(ranks) > 1], "within")
    slowest = min(within, key=lambda link: link.bytes_per_s, default=None)
    found = replace(topology, links=links, inside=slowest)
    if comm.rank == 0:
        for (one, other), link in sorted(links.items()):
            log.debug(
                f"the link between {topology.names[one]} and {topology.names[other]} was measured: {format_link(link)}"
            )
    return found


def format_link(link: Link) -> str:
    """Formats a link's bandwidth and latency for the log."""
    return f"{8e-6 * link.bytes_per_s:.3g} Mbit/s, 1 KB summed in {1e3 * link.exchange_s:.3g} ms"


def _list_rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yields all pairs of `count` hosts, in rounds in which each host is in at most one pair (the circle method)."""
    hosts = list(range(count + count % 2))
    for _ in range(len(hosts) - 1):
        pairs = (sorted((hosts[i], hosts[-1 - i])) for i in range(len(hosts) // 2))
        yield [(one, other) for one, other in pairs if other < count]
        hosts.insert(1, hosts.pop())


def _measure_groups(comm: Communicator, groups: Sequence[Sequence[int]], name: str) -> list[Link]:
    """Returns the measured link of each group of ranks, all measured at the same time; collective over all ranks.

    In an all-reduce of k ranks each rank sends 2(k-1)/k bytes per byte of the tensor.

    Args:
      comm: the communicator of all ranks.
      groups: disjoint groups of ranks.
      name: name of the measurement, part of the exchanges' keys.
    """
    if not groups:
        return []
    mine = next((group for group in groups if comm.rank in group), ())
    name = f"{name}/{'+'.join(map(str, mine))}"

    def slowest_s(taken_s: float) -> list[float]:
        said = [unpack(one) for one in comm.allgather_bytes(f"whale/links/{groups[0][0]}", pack(taken_s), _EXCHANGE_S)]
        return [max(said[rank] for rank in group) for group in groups]

    def take(size_bytes: int, calls: int) -> list[float]:
        return time_all_reduces(comm, mine, name, size_bytes, calls)

    small_s = slowest_s(statistics.median(take(_SMALL_BYTES, _SMALL_CALLS)))
    first_s = slowest_s(min(take(_FIRST_BYTES, _LARGE_CALLS)))
    sizes = [min(_MOST_BYTES, max(_FIRST_BYTES, int(_FIRST_BYTES * _LARGE_S / one_s) // 4 * 4)) for one_s in first_s]
    own_bytes = next((size for size, group in zip(sizes, groups) if group is mine), _FIRST_BYTES)
    large_s = slowest_s(min(take(own_bytes, _LARGE_CALLS)))
    sent = [2 * (len(group) - 1) / len(group) * size for size, group in zip(sizes, groups)]
    return [
        Link(small, sent_bytes / max(1e-6, large - small)) for small, large, sent_bytes in zip(small_s, large_s, sent)
    ]
