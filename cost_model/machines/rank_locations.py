"""Where ranks lie in a cluster, and what the groups of a plan have to communicate with.

Ranks are numbered over the cluster's hosts in the order of its file; tensor-parallel ranks are neighbours, then
data-parallel ones, then pipeline stages (Megatron-LM's order).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cost_model.described.describe import Parallel
from cost_model.formulas.collectives import Group, group
from cost_model.machines.cluster import Cluster, DeviceEntry, HostEntry
from whale.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Part:
    """Some ranks of one stage on equal hosts: host and device entries."""

    host: HostEntry
    entry: DeviceEntry


@dataclass(frozen=True, slots=True)
class Place:
    """A stage's ranks and their groups.

    Attributes:
        parts: the kinds of devices that the stage's ranks are, each once.
        tensor, data: the groups of one of its ranks.
        embedding: the first and the last stage's ranks that hold the same part of the embedding.
        forward_bytes_per_s, forward_step_us: what one rank has for its sends to the next stage.
    """

    parts: tuple[Part, ...]
    tensor: Group
    data: Group
    embedding: Group
    forward_bytes_per_s: float
    forward_step_us: float


def _runs(cluster: Cluster, ranks: int) -> list[tuple[int, int, Part]]:
    """(first rank, end, part) of every run of equal devices on one host, in rank order."""
    runs: list[tuple[int, int, Part]] = []
    first = 0
    for host in cluster.hosts:
        parts = [Part(host, entry) for entry in host.devices]
        for _ in range(host.count):
            for part in parts:
                runs.append((first, first + part.entry.count, part))
                first += part.entry.count
            if first >= ranks:
                return runs
    raise ClusterError(
        f"the plan needs {ranks} devices and the cluster {cluster.name} has {first}",
        given=f"{ranks} ranks",
        expected=f"at most {first}",
        action="add hosts to the cluster file or spread the program over fewer ranks",
    )


def places(cluster: Cluster, p: Parallel) -> list[Place]:
    """The place of every pipeline stage; stages on equal devices share one value."""
    runs = _runs(cluster, p.ranks)
    per_stage = p.tensor * p.data
    known: dict[tuple[int, ...], Place] = {}
    found: list[Place] = []
    for stage in range(p.pipeline):
        low, high = stage * per_stage, (stage + 1) * per_stage
        parts = {id(part): part for first, end, part in runs if first < high and end > low}
        if tuple(parts) not in known:
            known[tuple(parts)] = _place(cluster, p, tuple(parts.values()))
        found.append(known[tuple(parts)])
    return found


def _place(cluster: Cluster, p: Parallel, parts: tuple[Part, ...]) -> Place:
    host, entry = min(((x.host, x.entry) for x in parts), key=lambda x: x[1].intra_link().bytes_per_s)
    link, devices = entry.intra_link(), sum(e.count for e in host.devices)
    on_host = min(p.tensor, devices)
    together = min(p.data, max(1, devices // p.tensor))
    network, nics, over, tensor_nic, data_nic = None, 1, 1.0, math.inf, math.inf
    if host.networks:
        other = min((x.host for x in parts), key=lambda h: len(h.networks))
        name, net, nics = cluster.path(host, other)
        network, over = net.network, net.oversubscription
        tensor_nic = min(h.adapter_bytes_per_s(name, on_host, 1) for h in (host, other))
        data_nic = min(h.adapter_bytes_per_s(name, together, p.tensor) for h in (host, other))
    tensor = group(p.tensor, on_host, link, network, nics, max(1, devices // on_host), over, tensor_nic)
    # Ranks of one data-parallel group are `tensor` apart; all groups of a host reduce at once.
    data = group(p.data, together, link, network, nics, max(1, devices // together), over, data_nic)
    spread = p.tensor * p.data * (p.pipeline - 1) >= devices
    embedding = group(2 if p.pipeline > 1 else 1, 1 if spread and network else 2, link, network, nics, devices, over)
    if p.tensor * p.data < devices or network is None:
        return Place(parts, tensor, data, embedding, link.bytes_per_s, link.step_us.simple)
    return Place(parts, tensor, data, embedding, network.bytes_per_s * nics / devices / over, network.step_us.simple)
