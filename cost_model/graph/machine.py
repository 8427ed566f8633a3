"""Models the machines that ranks run on: measured ones, described clusters, and ranks with a few known rates.

make_measured_machine  a host that `whale profile` measured, operation by operation
cluster_machine        the devices of a cluster file, by the catalogue's formulas
cluster_rates          the same devices, each described by a few rates
make_rated_machine     ranks described by a few measured rates (`Rates`), on hosts with measured links (`Topology`)

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
    """Describes the machine that ranks run on, and returns the time of their operations and exchanges.

    Attributes:
        operations: for each rank, a function that returns (seconds, scratch bytes) of a node with its work.
        sharing: how ranks share the machine's cores.
        exchange_s: returns the seconds of an exchange, by its kind, ranks and bytes.
        memory_bytes: memory of each rank's device, or its part of the host's.
        call_s: seconds to call a step, besides its operations.
        counted_from_bytes: smaller tensors are not counted, as in TensorFlow's counters of host memory.
        prices_work: whether a node's time depends on its `Work` alone, so that kernels fused by XLA can be priced.
        whole_blocks: whether tensors may take more memory than they have bytes (see `liveness.Allocator`).
    """

    operations: Sequence[Callable[[Program, Node, Work], tuple[float, int]]]
    sharing: Sharing
    exchange_s: Callable[[Exchange], float]
    memory_bytes: Sequence[float]
    call_s: float = 0.0
    counted_from_bytes: int = 0
    prices_work: bool = False
    whole_blocks: bool = True

    def check_holds(self, ranks: int) -> None:
        """Raises ClusterError if the machine has fewer devices than ranks."""
        if ranks > len(self.sharing.hosts):
            raise ClusterError(
                "the plan has more ranks than the cluster has devices",
                given=f"{ranks} ranks, {len(self.sharing.hosts)} devices",
                action="name a larger cluster by --cluster, or plan for fewer ranks by -np",
            )

    def round_up_bytes(self, size: int) -> int:
        """Returns the bytes that the device's allocator reserves for a tensor of `size` bytes."""
        return -(-size // GRAIN_BYTES) * GRAIN_BYTES if size and size >= self.counted_from_bytes else 0


def make_measured_machine(
    table: MachineProfile,
    ranks: int,
    marks: Sequence[str] = (),
    counted_from_bytes: int = 0,
    topology: Topology | None = None,
) -> Machine:
    """Returns a machine of ``ranks`` ranks on the one host that a profile describes.

    If the host has GPUs, ranks are assigned to them in turn, as ``wh.init`` does.

    Args:
        table: the profile.
        marks: fingerprints under which the program's own step may have been measured (see `Measured`).
        counted_from_bytes: smaller tensors are not counted as memory.
        topology: the hosts of the ranks, whose links price exchanges of only some of the ranks; None: the profile's
            measurements are used for any exchange.
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
        whole_blocks=ranks == 1 or bool(table.gpus),
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """Holds the speed of one rank's computation while all ranks compute, and of exchanges between ranks.

    Attributes:
        flops_per_s, bytes_per_s: FLOPs, and bytes read and written, per second.
        start_s: seconds of an almost empty operation.
        exchange_s: seconds of an almost empty exchange.
        exchanged_bytes_per_s: bytes per second that a rank sends in exchanges through the host.
        origin: where the figures come from, for reports.
        exchanges_compute: whether exchanges occupy the core (or device) that computes; if not, they overlap
            computation.
        devices: speed of exchanges directly between devices (NCCL); None: there are none.
        packs: whether matrix products first copy their operands into tiles, as libraries do on a processor. Then memory
            traffic, `PACKED_PASSES` times, is added to the arithmetic instead of overlapping it; this dominates
            products of few rows, as those of micro-batches are.
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
        """Returns the rates of a rank that takes `computing` times as long to compute, and `exchanging` times to
        exchange.
        """
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
        """Returns the link that an exchange uses.

        Args:
            through: the library that exchanges between devices (`Exchange.through`); "": the exchange goes through the
                host.
        """
        if through and self.devices is not None:
            return self.devices
        return Link(self.exchange_s, self.exchanged_bytes_per_s)


def make_rated_machine(
    rates: Sequence[Rates], memory_bytes: float = float("inf"), topology: Topology | None = None
) -> Machine:
    """Returns a machine that prices operations by a roofline, and exchanges by their bytes.

    Args:
        rates: the rates of each rank.
        memory_bytes: memory of each rank.
        topology: hosts with measured links, which price exchanges through hosts; None: `rates` do.
    """

    def operation_of(one: Rates) -> Callable[[Program, Node, Work], tuple[float, int]]:
        def operation(program: Program, node: Node, does: Work) -> tuple[float, int]:
            computing_s, moving_s = does.flops / one.flops_per_s, does.moved_bytes / one.bytes_per_s
            packs = one.packs and node.op in MATMULS
            taken_s = computing_s + PACKED_PASSES * moving_s if packs else max(computing_s, moving_s)
            return one.start_s + taken_s, does.scratch_bytes

        return operation

    def exchange_s(what: Exchange) -> float:
        # A rank sends its part of the tensor, or all of it in a broadcast or a send.
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
    """Returns the seconds of an exchange through hosts, by the measured links inside hosts and between them.

    The tensor's part that a host needs from other hosts crosses its link once
    (`whale_ops/core/collective/hierarchical.cc`), and all groups that have ranks of a host use the link at the same
    time, as those along one axis of a mesh do. Of T bytes, each of m hosts sends (m-1)/m T in an all-gather or a
    reduce-scatter, and twice that in an all-reduce; k ranks of a host send k (p-k)/p T in an all-to-all of p ranks.
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
    """Returns the hosts of a cluster's first ``size`` devices, with one rank each, and the links of their networks.

    None if all of these devices are on one host.
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
    """Returns a machine with one rank for each device of a cluster, in the order of its file, by the catalogue's
    formulas.
    """
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
    """Returns the rates of each device of a cluster, in the order of its file, by the catalogue's figures.

    Args:
        dtype: dtype of the operands of matrix products.
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
    """Returns (number of the device's host, its host's entry, its entry) for each device, in the order of the file."""
    found: list[tuple[int, HostEntry, DeviceEntry]] = []
    number = 0
    for host in cluster.hosts:
        for _ in range(host.count):
            found += [(number, host, entry) for entry in host.devices for _ in range(entry.count)]
            number += 1
    return found


def _make_catalogue_pricer(entry: DeviceEntry, beside: int) -> Callable[[Program, Node, Work], tuple[float, int]]:
    """Returns a function that prices a node by the roofline of a device of the catalogue: (seconds, scratch bytes).

    Args:
        beside: number of devices of its host, all of which use the host's memory at the same time.
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
