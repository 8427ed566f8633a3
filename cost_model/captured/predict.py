"""Step time and memory of a captured program under a plan: from the programs that its ranks run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from cost_model.captured.execute import Played, Sharing, run
from cost_model.captured.graph import Graph, graph_of
from cost_model.captured.liveness import live_bytes, peak_bytes
from cost_model.captured.table import CONTRACTIONS, Measured, Table
from cost_model.captured.traffic import Exchange
from cost_model.formulas.collectives import COLLECTIVES, group, point_to_point_s
from cost_model.formulas.compute import SIZE_BYTES, matmul_s, rates_of, streaming_s
from cost_model.machines.cluster import Cluster, DeviceEntry, HostEntry
from cost_model.ops.work import Work
from whale.errors import ClusterError
from whale.ir.program import Node, Program

# TensorFlow's allocator rounds sizes up to a multiple of this (bfc_allocator.h: kMinAllocationSize).
GRAIN_BYTES = 256
SLOW_EXCHANGES = 4.0  # what another play takes for the exchanges, to see what is in flight then
PLAYS, VARIES = 40, 0.65  # further plays of a step, and how much the logarithm of kernels' times differs


@dataclass(frozen=True, slots=True)
class Machine:
    """What the ranks run on.

    Attributes:
        operations: of each rank, (seconds, scratch bytes) of a node with its work.
        exchange_s: seconds of an exchange, by its kind, ranks and bytes.
        sharing: how they share it.
        call_s: what calling a step takes beside its operations.
        memory_bytes: of each rank's device, or its part of the host's.
        counted_from_bytes: smaller tensors are left out (TensorFlow's counters of host memory do so).
    """

    operations: Sequence[Callable[[Program, Node, Work], tuple[float, int]]]
    sharing: Sharing
    exchange_s: Callable[[Exchange], float]
    memory_bytes: Sequence[float]
    call_s: float = 0.0
    counted_from_bytes: int = 0

    def allocated(self, size: int) -> int:
        """Bytes that the allocator gives for a tensor."""
        return -(-size // GRAIN_BYTES) * GRAIN_BYTES if size and size >= self.counted_from_bytes else 0


@dataclass(frozen=True, slots=True)
class Ran:
    """What a step takes on one rank.

    Attributes:
        end_s: when its last node ends.
        peak_bytes: the most memory that it holds, with what is there before the step.
        resident_bytes: what is there between steps: variables, inputs, buffers of communication.
        asked_bytes: the most that tensors and kernels ask for at a time; the allocator's pieces are larger.
        compute_s: its kernels, alone on a core.
        exchange_s: the same of its exchanges.
    """

    end_s: float
    peak_bytes: int
    resident_bytes: int
    asked_bytes: int
    compute_s: float
    exchange_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel or exchange of a rank: what it is, and when it runs; `seconds` alone on a core, or without waiting."""

    name: str
    op: str
    start_s: float
    end_s: float
    seconds: float
    exchange: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    """One rank's step: kernels and exchanges by start, and (seconds, bytes held) at every change."""

    spans: tuple[Span, ...]
    held: tuple[tuple[float, int], ...]

    def busy_s(self, exchange: bool) -> float:
        """Seconds during which at least one exchange, or kernel, runs."""
        return covered_s((span.start_s, span.end_s) for span in self.spans if span.exchange is exchange)


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of some intervals."""
    covered, last = 0.0, float("-inf")
    for start_s, end_s in sorted(intervals):
        if end_s > last:
            covered += end_s - max(last, start_s)
            last = end_s
    return covered


@dataclass(frozen=True, slots=True)
class CapturedPrediction:
    """What one step takes.

    Attributes:
        step_s: on the slowest rank.
        ranks: of each rank, its end, peak memory, and the seconds of its kernels and exchanges.
        logical_bytes: of each rank, its part of what the step has to move; equal to the counters of whale_ops.
        timelines: of each rank, where they were asked for.
    """

    step_s: float
    ranks: tuple[Ran, ...]
    logical_bytes: tuple[int, ...]
    timelines: tuple[Timeline, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.ranks)


def predict_ranks(
    programs: Sequence[Program], machine: Machine, with_timelines: bool = False, plays: int = PLAYS
) -> CapturedPrediction:
    """One step of ranks that run ``programs`` (see whale.lowering.local), rank i the i-th.

    Args:
        plays: how many more orders of a step are played for its memory; its time is that of the first.

    Raises:
        PlanError: data decide how often a loop or branch of a program runs, or the ranks wait for each other.
        ClusterError: the machine has fewer ranks, or its profile lacks what a program runs.
    """
    if len(programs) > len(machine.sharing.hosts):
        raise ClusterError(
            "the plan has more ranks than the cluster has devices",
            given=f"{len(programs)} ranks, {len(machine.sharing.hosts)} devices",
            action="give a larger cluster, or plan for fewer ranks",
        )
    graphs = [graph_of(p, rank, len(programs), machine.allocated) for rank, p in enumerate(programs)]
    seconds, scratch = [], []
    for rank, g in enumerate(graphs):
        price = machine.operations[rank]
        pairs = [
            (0.0, 0) if i in g.exchanges or not does.kernels else price(g.program, node, does)
            for i, (node, does) in enumerate(zip(g.nodes, g.work))
        ]
        seconds.append([0.0 if fused else one[0] for one, fused in zip(pairs, g.fused)])
        scratch.append([machine.allocated(one[1]) for one in pairs])
        for i, what in g.exchanges.items():
            scratch[rank][i] = sum(map(machine.allocated, what.scratch_bytes))

    sharing = machine.sharing
    played = run(graphs, seconds, machine.exchange_s, sharing)
    # What is held at once, and where it lies, depends on who happens to be first: no two steps have the same order.
    others: list[list[Played]] = []
    if sharing.threads > 1:
        slower = replace(sharing, cores=[0.5 * c for c in sharing.cores])
        others.append(run(graphs, seconds, machine.exchange_s, slower))
        generator = Random(0)
        for _ in range(plays):
            varied = []
            for one in seconds:
                pace = generator.lognormvariate(0.0, VARIES)  # a rank that is ahead of the others holds more
                varied.append([s * pace * generator.lognormvariate(0.0, VARIES) for s in one])
            others.append(run(graphs, varied, machine.exchange_s, sharing))
    if len(graphs) > 1:
        others.append(run(graphs, seconds, lambda what: SLOW_EXCHANGES * machine.exchange_s(what), sharing))
    ran = [
        Ran(
            one.end_s,
            *peak_bytes(graphs[r], [one.order, *(o[r].order for o in others)], scratch[r]),
            one.compute_s,
            one.exchange_s,
        )
        for r, one in enumerate(played)
    ]
    return CapturedPrediction(
        step_s=max(rank.end_s for rank in ran) + machine.call_s,
        ranks=tuple(ran),
        logical_bytes=tuple(sum(e.logical_bytes for e in g.exchanges.values()) for g in graphs),
        timelines=tuple(_timeline(g, s, c, p, machine) for g, s, c, p in zip(graphs, seconds, scratch, played))
        if with_timelines
        else (),
    )


def _timeline(
    graph: Graph, seconds: Sequence[float], scratch: Sequence[int], played: Played, machine: Machine
) -> Timeline:
    held = live_bytes(graph, played.order, scratch)
    started: dict[int, float] = {}
    spans, curve = [], []
    last = -1
    for event, at_s, size in zip(played.order, played.order_s, held):
        if size != last:
            curve.append((at_s, size))
            last = size
        if event >= 0:
            started[event] = at_s
            continue
        node, begun_s = graph.nodes[~event], started.pop(~event)
        what = graph.exchanges.get(~event)
        alone_s = machine.exchange_s(what) if what is not None else seconds[~event]
        if alone_s > 0:
            spans.append(Span(node.name, node.op, begun_s, at_s, alone_s, what is not None))
    return Timeline(tuple(sorted(spans, key=lambda s: s.start_s)), tuple(curve))


def measured_machine(table: Table, ranks: int, marks: Sequence[str] = (), counted_from_bytes: int = 0) -> Machine:
    """So many ranks on the one host that a table describes; ``marks``: fingerprints, see `Measured`."""
    known = Measured(table, marks, ranks)

    def exchange_s(what: Exchange) -> float:
        return known.exchange_s(what.kind, len(what.ranks), what.tensor_bytes, what.is_packed)

    return Machine(
        operations=[known.operation] * ranks,
        sharing=Sharing([0] * ranks, [table.cores], slice_s=table.slice_s, wake_s=table.wake_s),
        exchange_s=exchange_s,
        memory_bytes=[table.memory_gb * 1e9 / ranks] * ranks,
        call_s=table.call_s,
        counted_from_bytes=counted_from_bytes,
    )


def cluster_machine(cluster: Cluster) -> Machine:
    """The devices of a cluster in the order of its file, one rank each, by the catalogue's formulas."""
    devices: list[tuple[int, HostEntry, DeviceEntry]] = []
    number = 0
    for host in cluster.hosts:
        for _ in range(host.count):
            devices += [(number, host, entry) for entry in host.devices for _ in range(entry.count)]
            number += 1

    def exchange_s(what: Exchange) -> float:
        mine = [devices[r] for r in what.ranks]
        hosts = {at for at, _, _ in mine}
        per_host = max(sum(at == h for at, _, _ in mine) for h in hosts)
        link = min((entry.intra_link() for _, _, entry in mine), key=lambda one: one.bytes_per_s)
        if len(hosts) == 1:
            among = group(len(mine), per_host, link)
        else:
            name, between, nics = cluster.path(mine[0][1], mine[-1][1])
            apart = what.ranks[1] - what.ranks[0]
            adapter = min(host.adapter_bytes_per_s(name, per_host, apart) for _, host, _ in (mine[0], mine[-1]))
            among = group(len(mine), per_host, link, between.network, nics, 1, between.oversubscription, adapter)
        if what.kind == "point_to_point":
            inside = len(hosts) == 1
            rate = link.bytes_per_s if inside else among.host_bytes_per_s
            steps = link.step_us if inside else (among.network_steps or link.step_us)
            return point_to_point_s(what.tensor_bytes, rate, steps.simple)
        return COLLECTIVES[what.kind](among, what.tensor_bytes)

    return Machine(
        operations=[_catalogued(entry) for _, _, entry in devices],
        sharing=Sharing(range(len(devices)), [1.0] * len(devices), threads=1, exchanges_compute=False),
        exchange_s=exchange_s,
        memory_bytes=[entry.device.memory_bytes for _, _, entry in devices],
    )


def _catalogued(entry: DeviceEntry) -> Callable[[Program, Node, Work], tuple[float, int]]:
    """Seconds of a node by the roofline of a catalogued device."""
    device = entry.device
    known = {}

    def operation(program: Program, node: Node, does: Work) -> tuple[float, int]:
        dtype = next((t.dtype for t in node.outputs if t.dtype in SIZE_BYTES), "float32")
        if node.op not in CONTRACTIONS:
            dtype = "float32"  # streams bytes, whatever they are
        if dtype not in known:
            known[dtype] = rates_of(device, dtype, entry.share)
        if node.op in CONTRACTIONS and does.flops:
            out = node.outputs[0]
            columns = (out.shape or (1,))[-1] or 1
            rows = max(1, out.elements // columns)
            inner = max(1, round(does.flops / (2 * max(1, out.elements))))
            return matmul_s(known[dtype], rows, columns, inner), 0
        return streaming_s(known[dtype], does.moved_bytes), 0

    return operation
