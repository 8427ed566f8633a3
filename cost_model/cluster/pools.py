"""Divides a cluster into pools of equal devices, and computes the links of groups of their ranks.

A pool is one device entry of one host entry of a cluster file: a number of equal hosts, each with a number of equal
devices. The ranks of a group need not be equal: stages of a plan may be on several pools.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from cost_model.cluster.cluster_file import Cluster, DeviceEntry, HostEntry
from cost_model.hardware import Device
from cost_model.kernels.collectives import Group, make_group
from cost_model.kernels.compute import Rates, find_rates
from whale.errors import ClusterError

# The part of a host's memory that a job may use for offloaded data; the rest is the system's and the program's.
OFFLOADED_FRACTION = 0.9


@dataclass(frozen=True)
class Pool:
    """Represents equal devices on equal hosts.

    Attributes:
        number: index of the pool in the cluster, in the order of its file.
        host, entry: the entries of the cluster file that describe its hosts and devices.
    """

    number: int
    host: HostEntry
    entry: DeviceEntry

    @cached_property
    def device(self) -> Device:
        """Returns the catalogue's entry of the devices, with the figures that the cluster file overrides."""
        return self.entry.device

    @property
    def hosts(self) -> int:
        """Returns the number of equal hosts that have these devices."""
        return self.host.count

    @property
    def per_host(self) -> int:
        """Returns the number of the pool's devices on each host."""
        return self.entry.count

    @cached_property
    def host_devices(self) -> int:
        """Returns the number of all devices of one of its hosts, those of other pools included."""
        return sum(e.count for e in self.host.devices)

    @cached_property
    def devices(self) -> int:
        """Returns the number of the pool's devices on all hosts."""
        return self.hosts * self.per_host

    @cached_property
    def memory_bytes(self) -> float:
        """Returns the bytes of one device's memory that the job may use."""
        return self.device.memory_bytes * self.entry.share

    @property
    def host_bytes(self) -> float:
        """Returns the bytes of host memory that one device may use for offloading; 0 if the cluster file does not
        say.
        """
        return OFFLOADED_FRACTION * 1e9 * (self.host.memory_gb or 0.0) / self.host_devices

    @property
    def host_bytes_per_s(self) -> float:
        """Returns the bandwidth between one device and its host's memory, in bytes per second."""
        return self.entry.host_link().bytes_per_s

    @property
    def name(self) -> str:
        """Returns the pool's name in reports, e.g. `old/t4 x 0.5`: host, device, and the share of the device that the
        job has.
        """
        share = "" if self.entry.share == 1.0 else f" x {self.entry.share:g}"
        return f"{self.host.name}/{self.device.name}{share}"

    def list_whole_hosts(self, tensor: int, groups: int) -> list[int]:
        """Returns the next smaller and the next larger number of tensor-parallel groups that use all devices of their
        hosts; empty where no host has room for two groups.
        """
        each = self.per_host // tensor
        near = ((groups - 1) // each * each, (groups // each + 1) * each) if each > 1 else ()
        return [n for n in near if 0 < n <= self.hosts * each]

    def tensor_groups(self, tensor: int) -> int:
        """Returns the number of groups of `tensor` devices, each on one host, that the pool can be divided into."""
        return self.hosts * (self.per_host // tensor)


class Machines:
    """Holds the pools of a cluster, and caches the links of groups of their ranks, which plans ask for repeatedly."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        pairs = [(host, entry) for host in cluster.hosts for entry in host.devices]
        self.pools = tuple(Pool(number, host, entry) for number, (host, entry) in enumerate(pairs))
        self.tensor_group = lru_cache(maxsize=None)(self._make_tensor_group)
        self.data_group = lru_cache(maxsize=None)(self._make_data_group)
        self.send_path = lru_cache(maxsize=None)(self._find_send_path)
        self.pair = lru_cache(maxsize=None)(self._make_pair)
        self.rates = lru_cache(maxsize=None)(self._find_rates)

    @cached_property
    def devices(self) -> int:
        """Returns the number of devices of all pools."""
        return sum(pool.devices for pool in self.pools)

    def _find_rates(self, number: int, dtype: str, slower: float) -> Rates:
        """Returns the rates of one device of a pool for a dtype; kernels take `slower` times what the efficiency curve
        says.
        """
        entry = self.pools[number].entry
        return find_rates(entry.device, dtype, entry.share, slower=slower)

    def _make_tensor_group(self, number: int, tensor: int) -> Group:
        """Returns the links of a tensor-parallel group of one pool: neighbouring ranks, on as few hosts as possible."""
        pool = self.pools[number]
        link, together = pool.entry.intra_link(), min(tensor, pool.host_devices)
        if together == tensor or not pool.host.networks:
            return make_group(tensor, tensor, link)
        name, entry, nics = self.cluster.find_path(pool.host, pool.host)
        adapter = pool.host.find_adapter_bytes_per_s(name, together, 1)
        beside = max(1, pool.host_devices // together)
        return make_group(tensor, together, link, entry.network, nics, beside, entry.oversubscription, adapter)

    def _make_data_group(self, members: tuple[tuple[int, int, int], ...]) -> Group:
        """Returns the links of one data-parallel group of a stage: the ranks that hold the same part of its parameters.

        Ranks of such a group are `tensor` apart, and all groups of a host communicate at once, so they share its
        adapters.

        Args:
            members: (pool, tensor-parallel degree, replicas) of each device group of the stage.
        """
        size = sum(replicas for _, _, replicas in members)
        found: list[Group] = []
        for number, tensor in dict.fromkeys((number, tensor) for number, tensor, _ in members):
            pool = self.pools[number]
            together = min(size, self._count_together(pool.host.name, members))
            network, nics, over, adapter = None, 1, 1.0, math.inf
            if pool.host.networks:
                name, entry, nics = min(
                    (self.cluster.find_path(pool.host, self.pools[other].host) for other, _, _ in members),
                    key=lambda path: path[1].network.bytes_per_s * path[2] / path[1].oversubscription,
                )
                network, over = entry.network, entry.oversubscription
                adapter = pool.host.find_adapter_bytes_per_s(name, together, tensor)
            link = min((self.pools[n].entry.intra_link() for n, _, _ in members), key=lambda one: one.bytes_per_s)
            beside = max(1, pool.host_devices // together)
            found.append(make_group(size, together, link, network, nics, beside, over, adapter))
        return min(found, key=lambda one: one.ring_bytes_per_s)

    def _count_together(self, host: str, members: tuple[tuple[int, int, int], ...]) -> int:
        """Counts the ranks of a data-parallel group that are on one host of this name, over all of the host's pools."""
        replicas: dict[int, int] = {}
        tensors: dict[int, int] = {}
        for number, tensor, count in members:
            if self.pools[number].host.name == host:
                replicas[number] = replicas.get(number, 0) + count
                tensors[number] = min(tensor, tensors.get(number, tensor))
        return sum(min(n, max(1, self.pools[k].per_host // tensors[k])) for k, n in replicas.items())

    def _make_pair(self, one: int, other: int, apart: bool) -> Group:
        """Returns the links of a group of two ranks, one of each pool; all devices of a host communicate at once.

        Args:
            one, other: numbers of the pools.
            apart: whether the two ranks are on different hosts.
        """
        first, second = self.pools[one], self.pools[other]
        link = first.entry.intra_link()
        if not first.host.networks or (one == other and first.hosts == 1) or not apart:
            return make_group(2, 2, link)
        _, entry, nics = self.cluster.find_path(first.host, second.host)
        return make_group(2, 1, link, entry.network, nics, first.host_devices, entry.oversubscription)

    def _find_send_path(self, one: int, other: int, ranks: int) -> tuple[float, float]:
        """Returns (bytes/s, microseconds per step) for one rank's send from a stage in pool `one` to a stage in pool
        `other`.

        Args:
            ranks: number of ranks of the sending stage, which tells whether the stages share a host.
        """
        first, second = self.pools[one], self.pools[other]
        same_host = first.host.name == second.host.name
        inside = same_host and (ranks < first.host_devices or first.hosts == 1)
        if inside or not first.host.networks:
            slow = min((first.entry.intra_link(), second.entry.intra_link()), key=lambda link: link.bytes_per_s)
            return slow.bytes_per_s_among(2), slow.step_us.simple
        _, entry, nics = self.cluster.find_path(first.host, second.host)
        network = entry.network
        crowd = max(first.host_devices, second.host_devices)
        return network.bytes_per_s * nics / crowd / entry.oversubscription, network.step_us.simple


def list_pool_runs(machines: Machines, ranks: int) -> list[tuple[int, int, int]]:
    """Returns (first rank, end, pool number) of each run of ranks on equal devices of one host.

    Ranks are numbered over the cluster's hosts in the order of its file, and over a host's devices in the order of its
    entry, as launchers do. The last run may reach beyond `ranks`.

    Raises:
        ClusterError: the cluster has fewer devices.
    """
    cluster = machines.cluster
    runs: list[tuple[int, int, int]] = []
    first = number = 0
    for host in cluster.hosts:
        for _ in range(host.count):
            for place, entry in enumerate(host.devices):
                runs.append((first, first + entry.count, number + place))
                first += entry.count
            if first >= ranks:
                return runs
        number += len(host.devices)
    raise ClusterError(
        f"the plan needs {ranks} devices and the cluster {cluster.name} has {first}",
        given=f"{ranks} ranks",
        expected=f"at most {first}",
        action="add hosts to the cluster file or spread the program over fewer ranks",
    )
