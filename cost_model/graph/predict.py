"""Predicts step time and memory of a captured program under a plan, from the ranks' programs.

Of ranks whose programs take the same time and memory, only one is simulated (``find_simulated``).

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

SLOW_EXCHANGES = 4.0  # factor on exchanges in a further simulation, to find the memory held while they are in flight
PLAYS, VARIES = 40, 0.65  # further simulations, and the standard deviation of the logarithm of kernels' times in them


@dataclass(frozen=True, slots=True)
class Ran:
    """Holds the predicted time and memory of a step on one rank.

    Attributes:
        end_s: seconds until its last node ends.
        peak_bytes: peak memory, variables and all else from before the step included.
        resident_bytes: memory between steps: variables, inputs, communication buffers.
        asked_bytes: peak of the bytes that tensors and kernels request; the allocator's pieces are larger.
        compute_s: sum of its kernels' seconds, each alone on a core.
        exchange_s: sum of its exchanges' seconds, without waiting for other ranks.
    """

    end_s: float
    peak_bytes: int
    resident_bytes: int
    asked_bytes: int
    compute_s: float
    exchange_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """Represents a kernel or exchange in a rank's timeline.

    Attributes:
        name, op: name and type of the node.
        start_s, end_s: when it runs, waits included.
        seconds: how long it takes alone on a core, or without waiting for other ranks.
        exchange: whether it is an exchange.
    """

    name: str
    op: str
    start_s: float
    end_s: float
    seconds: float
    exchange: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    """Holds what one rank does during a step.

    Attributes:
        spans: kernels and exchanges in order of their start.
        held: (seconds since the start, bytes held from then on), for every change.
    """

    spans: tuple[Span, ...]
    held: tuple[tuple[float, int], ...]

    def busy_s(self, exchange: bool) -> float:
        """Returns the seconds during which at least one exchange (`exchange` is True) or one kernel (False) runs."""
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
    """Holds the prediction of one step of a captured program.

    Attributes:
        step_s: seconds of the step on the slowest rank.
        ranks: time and memory of each rank.
        logical_bytes: each rank's part of the bytes that the step's exchanges have to move; a run's counters in
            whale_ops show the same numbers.
        timelines: timeline of each rank, if requested; else ().
    """

    step_s: float
    ranks: tuple[Ran, ...]
    logical_bytes: tuple[int, ...]
    timelines: tuple[Timeline, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Returns the peak memory of the rank that needs most."""
        return max(rank.peak_bytes for rank in self.ranks)


def predict_ranks(
    programs: Sequence[Program], machine: Machine, with_timelines: bool = False, plays: int = PLAYS
) -> CapturedPrediction:
    """Predicts time and memory of one step of ranks; rank i runs ``programs[i]``.

    Args:
        with_timelines: whether to return what each rank does, for a trace.
        plays: number of further simulations with varied kernel times, whose execution orders decide the peak memory;
            times are those of the first simulation.

    Raises:
        PlanError: how often a loop or branch runs depends on data, or the ranks wait for each other for ever.
        ClusterError: the machine has fewer devices than ranks, or its profile lacks operations of a program.
    """
    size = len(programs)
    machine.check_holds(size)
    stands_for = find_simulated(programs, machine)
    members = sorted(set(stands_for))
    priced = [_price_graph(programs[rank], rank, size, machine) for rank in members]
    graphs, seconds, scratch = [one[0] for one in priced], [one[1] for one in priced], [one[2] for one in priced]
    sharing = machine.sharing
    played = run(graphs, seconds, machine.exchange_s, sharing, members)
    # The peak, and how pieces of memory fit, depends on which thread happens to be first: no two steps have one order.
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
            *peak_bytes(graphs[r], [one.order, *(o[r].order for o in others)], scratch[r], machine.whole_blocks),
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
    """Predicts the seconds of a step of ``size`` ranks, but not its memory, from the programs of some of the ranks.

    Args:
        programs: rank -> its program, for ranks that represent all others. Branches, and loops with an unknown trip
            count, count as one iteration.

    Raises:
        PlanError: the ranks wait for each other for ever.
    """
    steps = [steps_of(program, rank, size, strict=False) for rank, program in programs.items()]
    seconds = [_seconds(one, _prices(one, machine, rank)) for one, rank in zip(steps, programs)]
    played = run(steps, seconds, machine.exchange_s, machine.sharing, list(programs))
    return max(one.end_s for one in played) + machine.call_s


class PricedStep:
    """Predicts a step with slower kernels or exchanges, several times, after pricing its operations once.

    Args:
        programs: rank -> its program, as in ``step_seconds``.

    Attributes:
        exchanges_s: sum of the seconds of a rank's exchanges without waiting, for the rank with the largest sum.
    """

    def __init__(self, programs: Mapping[int, Program], size: int, machine: Machine) -> None:
        self._machine, self._ranks = machine, list(programs)
        self._steps = [steps_of(program, rank, size, strict=False) for rank, program in programs.items()]
        self._seconds = [_seconds(one, _prices(one, machine, rank)) for one, rank in zip(self._steps, programs)]
        self.exchanges_s = max(sum(map(machine.exchange_s, one.exchanges.values())) for one in self._steps)

    def predict_s(self, computing: float, exchanging: float) -> float:
        """Predicts the seconds of a step if kernels take `computing` times as long, and exchanges `exchanging` times.

        Raises:
            PlanError: the ranks wait for each other for ever.
        """
        seconds = [[computing * s for s in one] for one in self._seconds]
        machine = self._machine
        played = run(self._steps, seconds, partial(_faster, machine, 1 / exchanging), machine.sharing, self._ranks)
        return max(one.end_s for one in played) + computing * machine.call_s


def what_if_seconds(
    programs: Sequence[Program], machine: Machine, exchanges: Sequence[float], paces: Sequence[Sequence[float]]
) -> list[float]:
    """Predicts the seconds of a step with faster exchanges and faster ranks, for every combination.

    Args:
        exchanges: factors by which exchanges are faster.
        paces: for each case, the factor by which each rank's kernels are faster.

    Returns:
        Seconds of `exchanges[0]` with each of `paces`, then of `exchanges[1]`, and so on.

    Raises:
        PlanError: how often a loop or branch runs depends on data, or the ranks wait for each other for ever.
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
    """Returns the sum of the seconds of all nodes of ``rank`` in a step, on each of ``machines``.

    As if nodes ran one after the other, without waiting for other ranks: a measure to compare machines by.
    """
    steps = steps_of(program, rank, size, strict=False)
    return [
        sum(_seconds(steps, _prices(steps, one, rank))) + sum(map(one.exchange_s, steps.exchanges.values()))
        for one in machines
    ]


def _price_graph(program: Program, rank: int, size: int, machine: Machine) -> tuple[Graph, list[float], list[int]]:
    """Returns (numbered nodes, seconds of each node, scratch bytes of each node) of the program of ``rank``."""
    graph = graph_of(program, rank, size, machine.round_up_bytes)
    prices = _prices(graph, machine, rank)
    scratch = [machine.round_up_bytes(one[1]) for one in prices]
    for i, what in graph.exchanges.items():
        scratch[i] = sum(map(machine.round_up_bytes, what.scratch_bytes))
    return graph, _seconds(graph, prices), scratch


def _prices(steps: Steps, machine: Machine, rank: int) -> list[tuple[float, int]]:
    """Returns (seconds, scratch bytes) of each node; (0, 0) for exchanges, which are priced when their ranks meet."""
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
    held = live_bytes(graph, played.order, scratch, machine.whole_blocks)
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
    """Returns, for each program, the index of the first program that takes the same time and memory.

    These are programs that differ only in attributes such as the values of constants. Programs with loops or branches,
    whose trip count may depend on constants, are alike only if they are the same object.
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
    """Returns, for each rank, the rank that is simulated in its place: the first with an equal program and device.

    Ranks that share cores, or exchange with some ranks only, are all simulated, as they may wait for different things.
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
    """Counts a rank's part of the bytes that the exchanges of a program without functions have to move."""
    return sum(
        exchange(node, [program.find_type(ref) for ref in node.inputs], rank, size).logical_bytes
        for node in program.nodes
        if node.op in EXCHANGES
    )
