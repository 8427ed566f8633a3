"""Models the machines of ranks: measured ones, described clusters, and ranks with a few known figures.

make_measured_machine   a host that `whale profile` measured, operation by operation
cluster_machine         the devices of a cluster file, by the catalogue's formulas
cluster_rates           the same in a few figures each
make_rated_machine      ranks that were measured briefly (`Rates`), on hosts with links that were (`Topology`)

Decisions: 0174, 0175.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from cost_model.cluster.cluster_file import Cluster, DeviceEntry, HostEntry
from cost_model.graph.machine_profile import MachineProfile, Measured
from cost_model.graph.simulate import Sharing
from cost_model.graph.traffic import Exchange
from cost_model.kernels.collectives import COLLECTIVES, make_group, point_to_point_s
from cost_model.kernels.compute import SIZE_BYTES, find_rates, matmul_s, streaming_s
from cost_model.kernels.op_work import Work
from whale.errors import ClusterError
from whale.ir.ops import CONTRACTIONS, FUSED_LOOP, MATMULS
from whale.ir.program import Node, Program
from whale.ir.topology import Link, Topology, make_topology

# TensorFlow's allocator rounds sizes up to a multiple of this (bfc_allocator.h: kMinAllocationSize).
GRAIN_BYTES = 256
OFFLOAD = "WhaleOffload"  # copies between the device's and the host's memory
# Bytes that a host's processors read and write in a second: Ren et al., "ZeRO-Offload", ATC 2021, table 5, Adam's 28
# bytes for each of 10 billion parameters in 2.57 s.
HOST_BYTES_PER_S = 1.09e11
# How often a product on a processor moves its bytes while it does not compute: operands are read and written in tiles.
# Measured with weights of 1024 x 1024 and one thread: 8 to 256 rows, forward and backward, take 0.45 ms (median) more
# than their arithmetic at the rate of 1024 rows, whatever their number; reading the weights takes 0.2 ms.
PACKED_PASSES = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the ranks: it prices their operations and exchanges.

    Attributes:
        operations: for each rank, returns (seconds, scratch bytes) of a node with its work.
        exchange_s: returns the seconds of an exchange, by its kind, ranks and bytes.
        sharing: how ranks share the machine's cores.
        call_s: seconds of calling a step, beside its operations.
        memory_bytes: of each rank's device, or its part of the host's.
        counted_from_bytes: smaller tensors are not counted (as in TensorFlow's counters of host memory).
        prices_work: the price of a node follows from its work alone, so that what XLA fuses can be priced.
    """

    operations: Sequence[Callable[[Program, Node, Work], tuple[float, int]]]
    sharing: Sharing
    exchange_s: Callable[[Exchange], float]
    memory_bytes: Sequence[float]
    call_s: float = 0.0
    counted_from_bytes: int = 0
    prices_work: bool = False

    def check_holds(self, ranks: int) -> None:
        """Raises ClusterError if the machine has fewer devices than ranks."""
        if ranks > len(self.sharing.hosts):
            raise ClusterError(
                "the plan has more ranks than the cluster has devices",
                given=f"{ranks} ranks, {len(self.sharing.hosts)} devices",
                action="give a larger cluster, or plan for fewer ranks",
            )

    def round_up_bytes(self, size: int) -> int:
        """Returns the bytes that the allocator reserves for a tensor."""
        return -(-size // GRAIN_BYTES) * GRAIN_BYTES if size and size >= self.counted_from_bytes else 0


def make_measured_machine(
    table: MachineProfile,
    ranks: int,
    marks: Sequence[str] = (),
    counted_from_bytes: int = 0,
    topology: Topology | None = None,
) -> Machine:
    """Returns ``ranks`` ranks on the one host that a table describes; ``marks``: fingerprints, see `Measured`.

    Where it has GPUs the ranks take turns with them, as ``wh.init`` deals them out.

    Args:
        topology: the hosts of the ranks, by whose links exchanges of some ranks are priced, as the table's are of all;
            None: the table's hold for any ranks.
    """
    known = Measured(table, marks, ranks)

    def exchange_s(what: Exchange) -> float:
        of_some = topology is not None and len(what.ranks) < ranks and not what.through
        return topology_exchange_s(topology, what) if of_some and topology else known.exchange_s(what)

    sharing = Sharing([0] * ranks, [table.cores], slice_s=table.slice_s, wake_s=table.wake_s)
    memory_bytes = [table.memory_gb * 1e9 / ranks] * ranks
    if table.gpus:
        at = [rank % len(table.gpus) for rank in range(ranks)]
        sharing = Sharing(at, [1.0] * len(table.gpus), threads=1, exchanges_compute=False)
        memory_bytes = [table.gpus[gpu].memory_gb * 1e9 / at.count(gpu) for gpu in at]
    return Machine(
        operations=[known.operation] * ranks,
        sharing=sharing,
        exchange_s=exchange_s,
        memory_bytes=memory_bytes,
        call_s=table.call_s,
        counted_from_bytes=counted_from_bytes,
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """The work that one rank does per second while all ranks work, and the speed of exchanges between them.

    Attributes:
        start_s: seconds of an almost empty operation; exchange_s: the same of an exchange.
        exchanged_bytes_per_s: bytes that a rank sends and receives in a second.
        origin: describes the source of the figures.
        exchanges_compute: whether exchanges occupy the core (or device) that computes; else they overlap it.
        devices: the same two figures of exchanges that devices carry out; None: they carry out none.
        packs: whether matrix products copy their operands into tiles before they compute, as libraries do on a
            processor: then bytes are moved besides the arithmetic, `PACKED_PASSES` times, and not meanwhile. It decides
            what products of few rows take, as those of micro-batches are.
    """

    flops_per_s: float
    bytes_per_s: float
    start_s: float
    exchange_s: float
    exchanged_bytes_per_s: float
    origin: str
    exchanges_compute: bool = True
    devices: Link | None = None
    packs: bool = False

    def slow_down(self, computing: float, exchanging: float) -> Rates:
        """Returns the rates of a rank that takes so many times as long for what it computes, and for exchanges."""
        link = Link(self.exchange_s, self.exchanged_bytes_per_s).slow_down(exchanging)
        return replace(
            self,
            flops_per_s=self.flops_per_s / computing,
            bytes_per_s=self.bytes_per_s / computing,
            start_s=self.start_s * computing,
            exchange_s=link.exchange_s,
            exchanged_bytes_per_s=link.bytes_per_s,
            devices=self.devices and self.devices.slow_down(exchanging),
        )

    def link(self, through: str) -> Link:
        """Returns the link of exchanges: between devices, or through the host if ``through`` is ""."""
        if through and self.devices is not None:
            return self.devices
        return Link(self.exchange_s, self.exchanged_bytes_per_s)


def make_rated_machine(
    rates: Sequence[Rates], memory_bytes: float = float("inf"), topology: Topology | None = None
) -> Machine:
    """Returns a machine of ranks with few known figures: a roofline for operations, bytes for exchanges.

    Args:
        topology: the hosts, whose links have been measured; None: one figure holds for all exchanges, that of `rates`.
    """

    def operation_of(one: Rates) -> Callable[[Program, Node, Work], tuple[float, int]]:
        def operation(program: Program, node: Node, does: Work) -> tuple[float, int]:
            computing_s, moving_s = does.flops / one.flops_per_s, does.moved_bytes / one.bytes_per_s
            packs = one.packs and node.op in MATMULS
            taken_s = computing_s + PACKED_PASSES * moving_s if packs else max(computing_s, moving_s)
            return one.start_s + taken_s, does.scratch_bytes

        return operation

    def exchange_s(what: Exchange) -> float:
        # The bytes that a rank sends: its part of the tensor, or all of it where it goes one way.
        if topology is not None and not what.through:
            return topology_exchange_s(topology, what)
        one_way = what.kind in ("point_to_point", "broadcast")
        sent_bytes = what.tensor_bytes if one_way else what.logical_bytes
        links = (rates[r].link(what.through) for r in what.ranks)
        return max(link.exchange_s + sent_bytes / link.bytes_per_s for link in links)

    return Machine(
        operations=[operation_of(one) for one in rates],
        # Each rank's figures were taken while the others worked, so its part of a shared host is a host of its own.
        sharing=Sharing(range(len(rates)), [1.0] * len(rates), 1, exchanges_compute=rates[0].exchanges_compute),
        exchange_s=exchange_s,
        memory_bytes=[memory_bytes] * len(rates),
    )


def topology_exchange_s(topology: Topology, what: Exchange) -> float:
    """Returns the seconds of an exchange within hosts and between them, by the links of a topology, which are known.

    What a host has to get from others crosses its link once (`whale_ops/core/collective/hierarchical.cc`), and all
    groups that have ranks of a host use it at the same time, as those along one axis of a mesh do. Of T bytes m hosts
    send: (m-1)/m T each in an all-gather or a reduce-scatter, twice that in an all-reduce; k ranks of a host send
    k (p-k)/p T in an all-to-all of p ranks.
    """
    here = Counter(topology.hosts[rank] for rank in what.ranks)
    per_host, hosts, size = max(here.values()), len(here), len(what.ranks)
    tensor, times = what.tensor_bytes, 2 if what.kind == "all_reduce" else 1
    one_way = what.kind in ("point_to_point", "broadcast")
    seconds = 0.0
    if per_host > 1:
        assert topology.inside is not None
        sent_bytes = tensor if one_way else times * (per_host - 1) / per_host * tensor
        if what.kind == "all_to_all":
            sent_bytes = (per_host - 1) / size * tensor
        seconds += topology.inside.exchange_s + sent_bytes / topology.inside.bytes_per_s
    if hosts > 1:
        links = [link for pair in combinations(sorted(here), 2) if (link := topology.find_link(*pair)) is not None]
        groups = max(topology.hosts.count(host) / count for host, count in here.items())
        sent_bytes = tensor if one_way else times * (hosts - 1) / hosts * tensor
        if what.kind == "all_to_all":
            sent_bytes = per_host * (size - per_host) / size * tensor
        slowest = min(link.bytes_per_s for link in links)
        start_s = max(link.exchange_s for link in links) * math.ceil(math.log2(hosts))
        seconds += start_s + groups * sent_bytes / slowest
    return seconds


def cluster_topology(cluster: Cluster, size: int) -> Topology | None:
    """Returns the hosts of a cluster's first ``size`` devices, one rank each, and the networks between them.

    None: they are all on one host.
    """
    devices = _devices(cluster)[:size]
    entries = {at: host for at, host, _ in devices}
    numbers = {at: number for number, at in enumerate(entries)}
    links: dict[tuple[int, int], Link] = {}
    of_kinds: dict[tuple[int, int], Link] = {}
    for one, other in combinations(entries, 2):
        kinds = id(entries[one]), id(entries[other])
        if kinds not in of_kinds:
            _, between, nics = cluster.find_path(entries[one], entries[other])
            rate = between.network.bytes_per_s * nics / between.oversubscription
            of_kinds[kinds] = Link(between.network.step_us.simple * 1e-6, rate)
        links[numbers[one], numbers[other]] = of_kinds[kinds]
    return make_topology([f"{entries[at].name}/{at}" for at, _, _ in devices], links)


def cluster_machine(cluster: Cluster) -> Machine:
    """Returns the devices of a cluster in the order of its file, one rank each, by the catalogue's formulas."""
    devices = _devices(cluster)
    # Equal devices have the same pricer.
    pricers = {
        id(entry): _make_catalogue_pricer(entry, sum(e.count for e in host.devices)) for _, host, entry in devices
    }

    def exchange_s(what: Exchange) -> float:
        mine = [devices[r] for r in what.ranks]
        hosts = {at for at, _, _ in mine}
        per_host = max(sum(at == h for at, _, _ in mine) for h in hosts)
        link = min((entry.intra_link() for _, _, entry in mine), key=lambda one: one.bytes_per_s)
        if len(hosts) == 1:
            among = make_group(len(mine), per_host, link)
        else:
            name, between, nics = cluster.find_path(mine[0][1], mine[-1][1])
            apart = what.ranks[1] - what.ranks[0]
            adapter = min(host.find_adapter_bytes_per_s(name, per_host, apart) for _, host, _ in (mine[0], mine[-1]))
            among = make_group(len(mine), per_host, link, between.network, nics, 1, between.oversubscription, adapter)
        if what.kind == "point_to_point":
            inside = len(hosts) == 1
            rate = link.bytes_per_s_among(2) if inside else among.host_bytes_per_s
            steps = link.step_us if inside else (among.network_steps or link.step_us)
            return point_to_point_s(what.tensor_bytes, rate, steps.simple)
        return COLLECTIVES[what.kind](among, what.tensor_bytes)

    return Machine(
        operations=[pricers[id(entry)] for _, _, entry in devices],
        sharing=Sharing(range(len(devices)), [1.0] * len(devices), threads=1, exchanges_compute=False),
        exchange_s=exchange_s,
        memory_bytes=[entry.device.memory_bytes for _, _, entry in devices],
        prices_work=True,
    )


def cluster_rates(cluster: Cluster, dtype: str = "float32") -> list[Rates]:
    """Returns the peak rates of each device of a cluster, in the order of its file, and of exchanges between them.

    Args:
        dtype: of the operands of products.
    """
    found = []
    for _, _, entry in _devices(cluster):
        one = find_rates(entry.device, dtype, entry.share)
        found.append(
            Rates(
                flops_per_s=one.matmul_flops_per_s,
                bytes_per_s=one.memory_bytes_per_s,
                start_s=one.kernel_s,
                exchange_s=0.0,
                exchanged_bytes_per_s=one.memory_bytes_per_s,
                origin=f"{cluster.name}, by the catalogue's figures",
                exchanges_compute=False,
            )
        )
    return found


def _devices(cluster: Cluster) -> list[tuple[int, HostEntry, DeviceEntry]]:
    """Returns (number of its host, the host, the entry) of each device, in the order of the file."""
    found: list[tuple[int, HostEntry, DeviceEntry]] = []
    number = 0
    for host in cluster.hosts:
        for _ in range(host.count):
            found += [(number, host, entry) for entry in host.devices for _ in range(entry.count)]
            number += 1
    return found


def _make_catalogue_pricer(entry: DeviceEntry, beside: int) -> Callable[[Program, Node, Work], tuple[float, int]]:
    """Returns a function that prices a node by the roofline of a catalogued device.

    Args:
        beside: devices of its host, all of which use the host's memory at the same time.
    """
    device, to_host = entry.device, entry.host_link()
    known = {}

    def operation(program: Program, node: Node, does: Work) -> tuple[float, int]:
        if node.op == OFFLOAD:
            return to_host.step_us.simple * 1e-6 + does.written_bytes / to_host.bytes_per_s, 0
        if node.marks.on_host:
            return does.moved_bytes * beside / HOST_BYTES_PER_S, does.scratch_bytes
        dtype = next((t.dtype for t in node.outputs if t.dtype in SIZE_BYTES), "float32")
        if node.op not in CONTRACTIONS:
            dtype = "float32"  # streams bytes, whatever they are
        if dtype not in known:
            known[dtype] = find_rates(device, dtype, entry.share)
        if node.op == FUSED_LOOP:
            compute_s = does.flops / known[dtype].matmul_flops_per_s
            return max(compute_s, streaming_s(known[dtype], does.moved_bytes)), does.scratch_bytes
        if node.op in CONTRACTIONS and does.flops:
            out = node.outputs[0]
            columns = (out.shape or (1,))[-1] or 1
            rows = max(1, out.elements // columns)
            inner = max(1, round(does.flops / (2 * max(1, out.elements))))
            return matmul_s(known[dtype], rows, columns, inner), 0
        return streaming_s(known[dtype], does.moved_bytes), 0

    return operation
