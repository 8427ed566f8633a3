"""Predicts step time and memory of a captured program under a plan, from the ranks' programs.

Ranks whose programs take as long and hold as much as another rank's are found first, so that one of them is simulated
(``find_simulated``).

Decision: 0041.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random

from cost_model.graph.executor_graph import Exchange, Graph, Steps, graph_of, steps_of
from cost_model.graph.fusion import fuse_work
from cost_model.graph.liveness import live_bytes, peak_bytes
from cost_model.graph.machine import Machine
from cost_model.graph.simulate import Played, run
from cost_model.graph.traffic import exchange
from whale.ir.ops import EXCHANGES
from whale.ir.program import Program

SLOW_EXCHANGES = 4.0  # what another play takes for the exchanges, to see what is in flight then
PLAYS, VARIES = 40, 0.65  # further plays of a step, and how much the logarithm of kernels' times differs


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a step on one rank.

    Attributes:
        end_s: when its last node ends.
        peak_bytes: peak memory, including memory from before the step.
        resident_bytes: memory between steps: variables, inputs, buffers of communication.
        asked_bytes: peak of bytes requested by tensors and kernels; the allocator's pieces are larger.
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
    """A kernel or exchange of a rank: its name, start and end; `seconds` alone on a core, or without waiting."""

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
        """Returns the seconds during which at least one exchange (or kernel) runs."""
        return measure_union_s((span.start_s, span.end_s) for span in self.spans if span.exchange is exchange)


def measure_union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of some intervals, in seconds."""
    covered, last = 0.0, float("-inf")
    for start_s, end_s in sorted(intervals):
        if end_s > last:
            covered += end_s - max(last, start_s)
            last = end_s
    return covered


@dataclass(frozen=True, slots=True)
class CapturedPrediction:
    """The prediction of one step.

    Attributes:
        step_s: on the slowest rank.
        ranks: of each rank, its end, peak memory, and the seconds of its kernels and exchanges.
        logical_bytes: of each rank, its part of the bytes that the step has to move; equal to the counters of
            whale_ops.
        timelines: of each rank, if requested.
    """

    step_s: float
    ranks: tuple[Ran, ...]
    logical_bytes: tuple[int, ...]
    timelines: tuple[Timeline, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Returns the peak bytes of the fullest rank."""
        return max(rank.peak_bytes for rank in self.ranks)


def predict_ranks(
    programs: Sequence[Program], machine: Machine, with_timelines: bool = False, plays: int = PLAYS
) -> CapturedPrediction:
    """Predicts time and memory of one step of ranks that run ``programs`` (see whale.partition.spmd), rank i the i-th.

    Args:
        plays: number of additional execution orders that are simulated for memory; time is that of the first.

    Raises:
        PlanError: data decide how often a loop or branch of a program runs, or the ranks wait for each other.
        ClusterError: the machine has fewer ranks, or its profile lacks operations of a program.
    """
    size = len(programs)
    machine.check_holds(size)
    stands_for = find_simulated(programs, machine)
    members = sorted(set(stands_for))
    priced = [_price_graph(programs[rank], rank, size, machine) for rank in members]
    graphs, seconds, scratch = [one[0] for one in priced], [one[1] for one in priced], [one[2] for one in priced]
    sharing = machine.sharing
    played = run(graphs, seconds, machine.exchange_s, sharing, members)
    # What is held at once, and where it lies, depends on who happens to be first: no two steps have the same order.
    others: list[list[Played]] = []
    if sharing.threads > 1:
        slower = replace(sharing, cores=[0.5 * c for c in sharing.cores])
        others.append(run(graphs, seconds, machine.exchange_s, slower, members))
        generator = Random(0)
        for _ in range(plays):
            varied = []
            for one in seconds:
                pace = generator.lognormvariate(0.0, VARIES)  # a rank that is ahead of the others holds more
                varied.append([s * pace * generator.lognormvariate(0.0, VARIES) for s in one])
            others.append(run(graphs, varied, machine.exchange_s, sharing, members))
    if size > 1:
        others.append(run(graphs, seconds, lambda what: SLOW_EXCHANGES * machine.exchange_s(what), sharing, members))
    ran = [
        Ran(
            one.end_s,
            *peak_bytes(graphs[r], [one.order, *(o[r].order for o in others)], scratch[r]),
            one.compute_s,
            one.exchange_s,
        )
        for r, one in enumerate(played)
    ]
    moved = [sum(e.logical_bytes for e in g.exchanges.values()) for g in graphs]
    timelines = [_timeline(*one, machine) for one in zip(graphs, seconds, scratch, played)] if with_timelines else []
    at = [members.index(rank) for rank in stands_for]
    return CapturedPrediction(
        step_s=max(rank.end_s for rank in ran) + machine.call_s,
        ranks=tuple(ran[i] for i in at),
        logical_bytes=tuple(
            moved[i] if members[i] == rank else _count_logical_bytes(programs[rank], rank, size)
            for rank, i in enumerate(at)
        ),
        timelines=tuple(timelines[i] for i in at) if with_timelines else (),
    )


def step_seconds(programs: Mapping[int, Program], size: int, machine: Machine) -> float:
    """Predicts the seconds of a step of ``size`` ranks, by simulating some that represent the others; no memory.

    Args:
        programs: rank -> its program. Branches, and loops with an unknown trip count, count as one iteration.

    Raises:
        PlanError: the ranks wait for each other.
    """
    steps = [steps_of(program, rank, size, strict=False) for rank, program in programs.items()]
    seconds = [_seconds(one, _prices(one, machine, rank)) for one, rank in zip(steps, programs)]
    played = run(steps, seconds, machine.exchange_s, machine.sharing, list(programs))
    return max(one.end_s for one in played) + machine.call_s


class PricedStep:
    """A step of ``size`` ranks whose kernels and exchanges are priced, predicted with either of them slower.

    Args:
        programs: as of ``step_seconds``.

    Attributes:
        exchanges_s: of the rank with most, the seconds of all its exchanges, alone and one after the other.
    """

    def __init__(self, programs: Mapping[int, Program], size: int, machine: Machine) -> None:
        self._machine, self._ranks = machine, list(programs)
        self._steps = [steps_of(program, rank, size, strict=False) for rank, program in programs.items()]
        self._seconds = [_seconds(one, _prices(one, machine, rank)) for one, rank in zip(self._steps, programs)]
        self.exchanges_s = max(sum(map(machine.exchange_s, one.exchanges.values())) for one in self._steps)

    def predict_s(self, computing: float, exchanging: float) -> float:
        """Predicts the seconds of a step where kernels, and exchanges, take so many times as long.

        Raises:
            PlanError: the ranks wait for each other.
        """
        seconds = [[computing * s for s in one] for one in self._seconds]
        machine = self._machine
        played = run(self._steps, seconds, partial(_faster, machine, 1 / exchanging), machine.sharing, self._ranks)
        return max(one.end_s for one in played) + computing * machine.call_s


def what_if_seconds(
    programs: Sequence[Program], machine: Machine, exchanges: Sequence[float], paces: Sequence[Sequence[float]]
) -> list[float]:
    """Predicts a step with exchanges, and ranks, sped up by factors: for each of `exchanges`, all `paces`.

    Args:
        paces: of each rank, the factor for its kernels.

    Raises:
        PlanError: data decide how often a loop or branch of a program runs, or the ranks wait for each other.
    """
    priced = [_price_graph(program, rank, len(programs), machine) for rank, program in enumerate(programs)]
    graphs = [one[0] for one in priced]
    found = []
    for faster, pace in product(exchanges, paces):
        seconds = [[s / p for s in one[1]] for one, p in zip(priced, pace)]
        ends = run(graphs, seconds, partial(_faster, machine, faster), machine.sharing)
        found.append(max(one.end_s for one in ends) + machine.call_s)
    return found


def _faster(machine: Machine, times: float, what: Exchange) -> float:
    return machine.exchange_s(what) / times


def rank_seconds(program: Program, rank: int, size: int, machines: Sequence[Machine]) -> list[float]:
    """Returns the total seconds of all nodes of ``rank`` of ``size`` in a step, on each of ``machines``.

    Nodes run one after the other, without waiting for other ranks.
    """
    steps = steps_of(program, rank, size, strict=False)
    return [
        sum(_seconds(steps, _prices(steps, one, rank))) + sum(map(one.exchange_s, steps.exchanges.values()))
        for one in machines
    ]


def _price_graph(program: Program, rank: int, size: int, machine: Machine) -> tuple[Graph, list[float], list[int]]:
    """Returns the graph of ``rank`` of ``size``, with the seconds and the scratch bytes of each node."""
    graph = graph_of(program, rank, size, machine.round_up_bytes)
    prices = _prices(graph, machine, rank)
    scratch = [machine.round_up_bytes(one[1]) for one in prices]
    for i, what in graph.exchanges.items():
        scratch[i] = sum(map(machine.round_up_bytes, what.scratch_bytes))
    return graph, _seconds(graph, prices), scratch


def _prices(steps: Steps, machine: Machine, rank: int) -> list[tuple[float, int]]:
    """Returns the seconds and scratch bytes of each node, except for exchanges."""
    price = machine.operations[rank]
    work = fuse_work(steps.program, steps.work) if machine.prices_work else steps.work
    return [
        (0.0, 0) if i in steps.exchanges or not does.kernels else price(steps.program, node, does)
        for i, (node, does) in enumerate(zip(steps.nodes, work))
    ]


def _seconds(steps: Steps, prices: Sequence[tuple[float, int]]) -> list[float]:
    return [0.0 if fused else one[0] for one, fused in zip(prices, steps.fused)]


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


def find_alike(programs: Sequence[Program]) -> list[int]:
    """Returns for each program the number of the first one that has the same operations, but for values of constants.

    Programs with loops or branches, whose turns constants may decide, are alike only if they are the same.
    """
    found: list[int] = []
    for number, program in enumerate(programs):
        firsts = (first for first in dict.fromkeys(found) if _are_alike(programs[first], program))
        found.append(next(firsts, number))
    return found


def _are_alike(one: Program, other: Program) -> bool:
    if one is other:
        return True
    if one.functions or other.functions or len(one.nodes) != len(other.nodes):
        return False
    if (one.inputs, one.outputs) != (other.inputs, other.outputs):
        return False
    if [(v.node, v.type) for v in one.variables] != [(v.node, v.type) for v in other.variables]:
        return False
    return all(
        a is b
        or (
            (a.op, a.name, a.inputs, a.controls, a.outputs, a.marks)
            == (b.op, b.name, b.inputs, b.controls, b.outputs, b.marks)
            and len(a.attrs.get("ranks", ())) == len(b.attrs.get("ranks", ()))
        )
        for a, b in zip(one.nodes, other.nodes)
    )


def find_simulated(programs: Sequence[Program], machine: Machine) -> list[int]:
    """Returns for each rank the one that is simulated for it: the first of equal ones that do the same.

    That needs ranks that share no cores, and exchanges among all of them: then equal ranks wait for the same.
    """
    size = len(programs)
    hosts = machine.sharing.hosts[:size]
    among_all = all(
        len(node.attrs.get("ranks", ())) in (0, size) for one in programs for node in one.nodes if node.op in EXCHANGES
    )
    if len(set(hosts)) < size or not among_all:
        return list(range(size))
    alike = find_alike(programs)
    first: dict[tuple[int, int], int] = {}
    return [first.setdefault((alike[r], id(machine.operations[r])), r) for r in range(size)]


def _count_logical_bytes(program: Program, rank: int, size: int) -> int:
    """Returns a rank's part of the bytes that the exchanges of a program without functions have to move."""
    return sum(
        exchange(node, [program.find_type(ref) for ref in node.inputs], rank, size).logical_bytes
        for node in program.nodes
        if node.op in EXCHANGES
    )
