"""Computes the seconds of collectives between devices: alpha-beta models by algorithm, topology and concurrency.

Names: p ranks, of which `per_host` share a host; T bytes is the whole tensor (all-reduce: each rank's tensor;
all-gather: the result; reduce-scatter: the operand). Steps and protocols follow NCCL's own model (NCCL,
src/graph/tuning.cc); for rings and trees see Thakur et al., "Optimization of collective communication operations in
MPICH", 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cost_model.hardware import Link, Network
from cost_model.hardware.catalogue import StepTimes

# (name, start of a collective in seconds, part of the bandwidth), same source: LL128 uses 120 of 128 bytes and LL half
# of each line, and both keep fewer bytes in flight.
PROTOCOLS = (("simple", 8.4e-6, 1.0), ("ll128", 14.0e-6, 0.92), ("ll", 6.6e-6, 0.25))
START_S = PROTOCOLS[0][1]  # start of all that is not sent along a ring, by the simple protocol
TREE_FRACTION = 0.9  # of a ring's bandwidth, same source
# Steps of an all-reduce in the switch: operands there and their sum back, the sum there and to all ranks.
SWITCH_STEPS = 4
SWITCH_RANKS = 4  # fewer ranks do not use the switch: they are as fast without


@dataclass(frozen=True, slots=True)
class Group:
    """Describes the ranks of a collective, and the bandwidths between them.

    Attributes:
        size: number of ranks in the group.
        per_host: number of ranks that share a host (the largest number, if hosts differ).
        link_bytes_per_s: bandwidth of one device inside its host in one direction.
        link_steps: time of a step inside a host.
        host_bytes_per_s: bandwidth of a host's adapters for all of the group's ranks on the host together; if several
            groups of the host communicate at once, this group's share. Infinite without a network.
        network_steps: time of a step between hosts; None without a network.
        in_network_reduction: factor by which a switch that sums speeds up an all-reduce inside a host.
        rings: cache: number of trips around the ring -> (seconds of latency, bytes/s) of each protocol.
    """

    size: int
    per_host: int
    link_bytes_per_s: float
    link_steps: StepTimes
    host_bytes_per_s: float = math.inf
    network_steps: StepTimes | None = None
    in_network_reduction: float = 1.0
    rings: dict[int, tuple[tuple[float, float], ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def hosts(self) -> int:
        """Returns the number of hosts that the ranks are on."""
        return -(-self.size // self.per_host)

    @property
    def ring_bytes_per_s(self) -> float:
        """Returns the bytes/s that each rank of a ring sends: those of its slowest link, inside hosts or between
        them.
        """
        inside = self.link_bytes_per_s if self.per_host > 1 else math.inf
        between = self.host_bytes_per_s if self.hosts > 1 else math.inf
        return min(inside, between)


def make_group(
    size: int,
    per_host: int,
    link: Link,
    network: Network | None = None,
    nics: int = 1,
    groups_per_host: int = 1,
    oversubscription: float = 1.0,
    adapter_bytes_per_s: float = math.inf,
) -> Group:
    """Returns a group of `size` ranks, of which `per_host` are on each host.

    Args:
        link: link between devices of a host.
        network: network between hosts; None: all ranks are on one host.
        nics: number of a host's adapters.
        groups_per_host: number of such groups on a host that communicate at once, and so share its adapters.
        oversubscription: factor by which the network's core is slower than its edge.
        adapter_bytes_per_s: rate at which an adapter reads the ranks' memory, if that is less than it can send.
    """
    per_host = min(size, per_host)
    inside = link.bytes_per_s_among(per_host)
    if size == per_host or network is None:
        return Group(size, size, inside, link.step_us, in_network_reduction=link.in_network_reduction)
    share = min(network.bytes_per_s / oversubscription, adapter_bytes_per_s) * nics / groups_per_host
    return Group(size, per_host, inside, link.step_us, share, network.step_us)


def _compute_steps_s(group: Group, protocol: str, rounds: int) -> float:
    """Returns the latency of `rounds` trips around the ring, in seconds: steps between hosts, and all others inside
    hosts.
    """
    total = rounds * (group.size - 1)
    between = rounds * (group.hosts - 1)
    inside_us = getattr(group.link_steps, protocol)
    between_us = getattr(group.network_steps, protocol) if group.network_steps else inside_us
    return 1e-6 * ((total - between) * inside_us + between * between_us)


def _compute_ring_s(group: Group, sent_bytes: float, rounds: int) -> float:
    """Returns the seconds in which each rank sends `sent_bytes` in `rounds` trips around the ring, by the fastest
    protocol.
    """
    lines = group.rings.get(rounds)
    if lines is None:
        rate = group.ring_bytes_per_s
        lines = tuple((start + _compute_steps_s(group, name, rounds), rate * part) for name, start, part in PROTOCOLS)
        group.rings[rounds] = lines
    return min([latency_s + sent_bytes / rate for latency_s, rate in lines])


def ring_all_reduce_s(group: Group, tensor_bytes: float) -> float:
    """Returns the seconds of a ring all-reduce: 2 (p-1) steps (reduce-scatter, all-gather), each rank sends 2
    (p-1)/p T.
    """
    p = group.size
    if p == 1:
        return 0.0
    return _compute_ring_s(group, 2 * (p - 1) / p * tensor_bytes, 2)


def switch_all_reduce_s(group: Group, tensor_bytes: float) -> float:
    """Returns the seconds of an all-reduce whose sums the switch computes (NVLink SHARP).

    Its bandwidth is a ring's, times a measured factor. Infinite if the group's switch does not support it.
    """
    if group.hosts > 1 or group.in_network_reduction == 1.0 or group.size < SWITCH_RANKS:
        return math.inf
    p = group.size
    sent = 2 * (p - 1) / p * tensor_bytes
    steps_s = SWITCH_STEPS * 1e-6 * group.link_steps.simple
    return START_S + steps_s + sent / (group.ring_bytes_per_s * group.in_network_reduction)


def tree_all_reduce_s(group: Group, tensor_bytes: float) -> float:
    """Returns the seconds of an all-reduce by double binary trees between hosts, with chains inside them.

    2 (log2 hosts + per_host - 1) steps. Infinite on one host.
    """
    if group.hosts == 1:
        return math.inf
    p = group.size
    sent = 2 * (p - 1) / p * tensor_bytes
    best = math.inf
    for name, start, part in PROTOCOLS:
        inside_us = getattr(group.link_steps, name)
        between_us = getattr(group.network_steps, name)
        steps = 2 * (math.ceil(math.log2(group.hosts)) * between_us + (group.per_host - 1) * inside_us)
        best = min(best, start + 1e-6 * steps + sent / (group.ring_bytes_per_s * part * TREE_FRACTION))
    return best


def halving_doubling_all_reduce_s(group: Group, tensor_bytes: float) -> float:
    """Returns the seconds of an all-reduce by recursive halving and doubling: 2 log2 p steps.

    The first pairs of ranks exchange half of the tensor over the slowest link.
    """
    p = group.size
    if p == 1:
        return 0.0
    rounds = 2 * math.ceil(math.log2(p))
    step_us = (group.network_steps or group.link_steps).simple if group.hosts > 1 else group.link_steps.simple
    # Pairs between hosts use the host's adapters all at once, so each rank has a share of them.
    slowest = min(group.link_bytes_per_s, group.host_bytes_per_s / group.per_host)
    return START_S + rounds * step_us * 1e-6 + 2 * (p - 1) / p * tensor_bytes / slowest


def hierarchical_all_reduce_s(group: Group, tensor_bytes: float) -> float:
    """Returns the seconds of a reduce-scatter inside hosts, an all-reduce of the shards between hosts, an all-gather
    inside.

    Infinite on one host, or with one rank per host.
    """
    if group.hosts == 1 or group.per_host == 1:
        return math.inf
    inside = Group(group.per_host, group.per_host, group.link_bytes_per_s, group.link_steps)
    between = Group(
        group.hosts,
        1,
        group.link_bytes_per_s,
        group.link_steps,
        group.host_bytes_per_s / group.per_host,
        group.network_steps,
    )
    return 2 * reduce_scatter_s(inside, tensor_bytes) + ring_all_reduce_s(between, tensor_bytes / group.per_host)


ALL_REDUCE = {
    "ring": ring_all_reduce_s,
    "tree": tree_all_reduce_s,
    "switch": switch_all_reduce_s,
    "halving-doubling": halving_doubling_all_reduce_s,
    "hierarchical": hierarchical_all_reduce_s,
}
NCCL_ALGORITHMS = ("ring", "tree", "switch")


def all_reduce_s(group: Group, tensor_bytes: float, algorithms: tuple[str, ...] = NCCL_ALGORITHMS) -> float:
    """Returns the seconds of an all-reduce by the fastest of a library's algorithms, as its own tuning would choose."""
    if group.size == 1:
        return 0.0
    return min(ALL_REDUCE[name](group, tensor_bytes) for name in algorithms)


def all_gather_s(group: Group, tensor_bytes: float) -> float:
    """Returns the seconds of a ring all-gather: p-1 steps, each rank sends (p-1)/p T, where T is the result."""
    p = group.size
    return 0.0 if p == 1 else _compute_ring_s(group, (p - 1) / p * tensor_bytes, 1)


def reduce_scatter_s(group: Group, tensor_bytes: float) -> float:
    """Returns the seconds of a ring reduce-scatter: p-1 steps, each rank sends (p-1)/p T, where T is the operand."""
    return all_gather_s(group, tensor_bytes)


def broadcast_s(group: Group, tensor_bytes: float) -> float:
    """Returns the seconds of a pipelined ring broadcast: T bytes over the slowest link, and the latency of one trip."""
    return 0.0 if group.size == 1 else _compute_ring_s(group, tensor_bytes, 1)


def all_to_all_s(group: Group, tensor_bytes: float) -> float:
    """Returns the seconds of an all-to-all in which each rank sends 1/p of its T bytes to each rank."""
    p = group.size
    if p == 1:
        return 0.0
    inside_s = tensor_bytes * (group.per_host - 1) / p / group.link_bytes_per_s
    between_s = tensor_bytes * (p - group.per_host) / p * group.per_host / group.host_bytes_per_s
    return START_S + _compute_steps_s(group, "simple", 1) + max(inside_s, between_s)


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Describes the tokens that one rank sends to a layer's experts, and gets back from them.

    Attributes:
        there_bytes, back_bytes: bytes to the experts and back; a token counts once for each of its experts.
        top: number of experts of a token.
        experts: number of experts of the layer.
        groups, top_groups: number of groups of experts, and of the groups in which one token's experts may be; 0: any.
        once: whether a token is sent once to each host, and from there over the links inside once to each rank.
    """

    there_bytes: float
    back_bytes: float
    top: int
    experts: int
    groups: int = 0
    top_groups: int = 0
    once: bool = False

    def count_hosts(self, hosts: int) -> float:
        """Returns the mean number of hosts, of `hosts`, on which a token's experts are."""
        return _count_drawn(self._count_able(hosts), self.top)

    def count_ranks(self, ranks: int, hosts: int) -> float:
        """Returns the mean number of ranks, of `ranks` on `hosts` hosts, on which a token's experts are."""
        if self.experts <= ranks:  # no rank has two of them
            return float(self.top)
        return _count_drawn(ranks * self._count_able(hosts) / hosts, self.top)

    def _count_able(self, hosts: int) -> int:
        """Returns on how many of `hosts` hosts the experts of one token may be."""
        return min(hosts, self.top_groups * -(-hosts // self.groups)) if self.top_groups else hosts


def _count_drawn(parts: float, draws: int) -> float:
    """Returns the mean number of different parts, of equally likely ones, in so many draws.

    One of n parts is in none of d draws with probability (1 - 1/n)^d.
    """
    return parts * (1.0 - (1.0 - 1.0 / parts) ** draws)


def exchange_tokens_s(group: Group, routed: RoutedTokens) -> float:
    """Returns the seconds to send tokens to their experts on other ranks and back: two all-to-alls.

    With `routed.once`, each token crosses to a host once, and goes over the links inside hosts once to each rank that
    has some of its experts, which adds their results before they return (DeepSeek-AI, "DeepSeek-V3", 2024, section
    3.2.2; DeepEP, deep_ep/buffer.py, dispatch and combine).
    """
    if group.size == 1:
        return 0.0
    if not routed.once:
        return all_to_all_s(group, routed.there_bytes) + all_to_all_s(group, routed.back_bytes)
    hosts, each = group.hosts, group.per_host
    away = routed.count_hosts(hosts) * (hosts - 1) / hosts / routed.top
    beside = routed.count_ranks(group.size, hosts) * (each - 1) / each / routed.top
    found = 0.0
    for copies in (routed.there_bytes, routed.back_bytes):
        between_s = copies * away * each / group.host_bytes_per_s if hosts > 1 else 0.0
        inside_s = copies * beside / group.link_bytes_per_s
        found += START_S + _compute_steps_s(group, "simple", 1) + max(inside_s, between_s)
    return found


def point_to_point_s(sent_bytes: float, bytes_per_s: float, step_us: float) -> float:
    """Returns the seconds of one message: latency plus bytes over bandwidth."""
    return START_S + step_us * 1e-6 + sent_bytes / bytes_per_s


COLLECTIVES = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "broadcast": broadcast_s,
    "all_to_all": all_to_all_s,
}
