"""Finds what a traced run spent its time on, and advises on the three largest costs (`whale why`).

The time of each rank, from the start of the run to its last event, is divided among kinds that add up to it: what the
script's thread was doing (`wh.init`, a compilation, the wait for a batch, a checkpoint, a step), the time before the
first of these, and the time between them. The time of a step is divided again: all exchanges under way wait for other
ranks, or bytes move, or no exchange is under way. The trace does not tell whether a rank computed during an exchange,
so that the cost stated for an exchange is an upper bound.

Decision: 0163.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whale.errors import PlanError
from whale.ir.plan_text import fit, format_bytes, format_seconds
from whale.planner.report.measured_step import FIRST, Event

TOP = 3  # number of costs that are reported
_ONE_CAUSE = 0.6  # a rank is named as the cause if at least this part of all waits is for it
_SAME = 0.05  # parts of a step that differ between ranks by less than this part of the step count as equal
_EXCHANGE_TRACK = 100  # the first track of the op library's exchanges in a trace
_BESIDE_STEPS = "host/"  # prefix of the keys of messages between ranks that belong to no step

_OF_A_STEP = {"computes": "computing", "waits": "waiting", "moves": "moving", "input": "input", "script": "the script"}
_WORDS = {
    "before": "before wh.init: the processes start, the script imports and reads what it needs",
    "init": "in wh.init, where the ranks connect",
    "setup": "between wh.init and the first step: the script builds its model and reads what it needs",
    "end": "in wh.shutdown",
    "input": "the steps wait for batches",
    "checkpoint": "checkpoints are saved and restored",
    "script": "the script itself, between the steps",
    "computes": "the steps compute",
}
# Cost and advice for a script that calls no step of Whale, such as a Horovod script.
_OWN_STEPS = (
    "the script: its own steps, and all else between its exchanges",
    "a trace contains only the exchanges of such a script: profile its steps with TensorFlow's profiler, or run the "
    "program written for one device, whose steps are in the trace (docs/guides/horovod.md)",
)
_ACTIONS = {
    "before": "it happens once per run, so it matters less in a longer run; import less, and read data in the input "
    "pipeline",
    "init": "`whale doctor` looks for what slows the start; hosts should find each other's names at once",
    "setup": "it happens once per run, so it matters less in a longer run; read data in the input pipeline",
    "end": "ranks wait here for the last one: give all ranks the same number of steps",
    "input": "add prefetch after the last map, num_parallel_calls to the maps, and `wh.shard`, with which each rank "
    "decodes only its own rows (docs/guides/data.md)",
    "checkpoint": "save less often (docs/guides/checkpoints.md)",
    "script": "look at what else the training loop does (reading values, logs, callbacks): do it every tenth step, or "
    "inside the step function",
    "computes": "compare each layer with its prediction (`whale plan -o plan.json`, then `whale show plan.json "
    "--analyze`), set precision.compute_dtype=bfloat16 if the device supports it, or use more ranks",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Represents one activity of the script's thread.

    Attributes:
        kind: "init", "compile", "step", "input", "checkpoint", "end", ...
        start_s, end_s: seconds since the start of the run.
        own_s: duration without the spans inside of this one.
    """

    kind: str
    name: str
    start_s: float
    end_s: float
    own_s: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """Represents an exchange as one rank saw it.

    Attributes:
        kind: the operation, such as "AllReduce" or "Send".
        key: what identifies the exchange on all ranks.
        call: how often the exchange with that key was made before.
        start_s, end_s: seconds since the start of the run.
        come_s: when the first bytes of another rank arrived; until then the rank waited.
        sent_bytes: bytes that this rank sent.
    """

    rank: int
    kind: str
    key: str
    call: int
    start_s: float
    come_s: float
    end_s: float
    sent_bytes: float

    @property
    def meeting(self) -> tuple[str, str, int]:
        """Returns a key that is equal for all ranks that took part in the same exchange; a receive has that of its
        send.
        """
        return ("Send" if self.kind == "Recv" else self.kind), self.key, self.call


@dataclass(slots=True)
class RankTime:
    """Holds how one rank spent its time.

    Attributes:
        end_s: time of its last event.
        kinds_s: seconds by kind, which add up to `end_s`.
        calls_s: seconds of each call of a step function, by its name.
        compiled: how often a step function was compiled, by its name.
        blamed_s: seconds that its steps waited, by the rank that came last.
        staged_s: part of these seconds that was spent waiting for a tensor of another pipeline stage.
        moved: (seconds, bytes) that moved during its steps, by key of the exchange.
        repeated: if the script has steps of its own, its most frequent exchange: (key, number of times, median seconds
            from one to the next).
    """

    end_s: float
    kinds_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    compiled: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    blamed_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    staged_s: float = 0.0
    moved: dict[str, tuple[float, float]] = field(default_factory=dict)
    repeated: tuple[str, int, float] | None = None

    @property
    def main_program(self) -> str:
        """Returns the name of the step function that took most of the time; "": none was called."""
        return max(self.calls_s, key=lambda name: sum(self.calls_s[name]), default="")

    @property
    def later_calls(self) -> int:
        """Returns the number of calls of all step functions, not counting the first `FIRST` calls of each."""
        return sum(max(0, len(taken) - FIRST) for taken in self.calls_s.values())


@dataclass(frozen=True, slots=True)
class Cost:
    """Holds one cost of the run: its seconds as the mean over ranks, a description, and advice."""

    seconds: float
    what: str
    action: str


def format_costs(events: Sequence[Event], path: str, width: int) -> str:
    """Formats where the time of a traced run went: its largest costs, with advice on each.

    Args:
        events: events of the trace, as `measured_step.read` returns them.
        path: path of the trace.
        width: columns of the terminal.

    Raises:
        PlanError: no rank had reached `wh.init` when the trace ended.
    """
    ranks = divide_time(events)
    if not ranks:
        raise PlanError(
            "the trace contains no events of the run's ranks",
            given=path,
            expected="a trace of ranks that have called wh.init()",
            action="check how the run ended, and trace a run that takes some steps",
        )
    whole_s = max(time.end_s for time in ranks.values())
    lines = [f"{path}: {_count(len(ranks), 'rank')}, {format_seconds(whole_s)}", *_describe_steps(ranks)]
    costs = list_costs(ranks)
    for number, cost in enumerate(costs[:TOP], 1):
        lines += ["", f"{number}. {format_seconds(cost.seconds)} ({cost.seconds / whole_s:.0%}): {cost.what}"]
        lines += [f"   next: {cost.action}"]
    if (rest_s := sum(cost.seconds for cost in costs[TOP:])) > 0:
        lines += ["", f"All else takes {format_seconds(rest_s)} ({rest_s / whole_s:.0%})."]
    return "\n".join(fit(lines, width))


def divide_time(events: Sequence[Event]) -> dict[int, RankTime]:
    """Returns how each rank spent its time, by rank."""
    exchanges: dict[int, list[Exchange]] = defaultdict(list)
    arrived: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    for exchange in _read_exchanges(events):
        exchanges[exchange.rank].append(exchange)
        arrived[exchange.meeting][exchange.rank] = exchange.start_s
    last = {meeting: max(ranks, key=lambda rank: ranks[rank]) for meeting, ranks in arrived.items() if len(ranks) > 1}
    found = {}
    for rank, spans in sorted(_read_spans(events).items()):
        time = found[rank] = RankTime(max(span.end_s for span in spans))
        time.kinds_s["before"] = min(span.start_s for span in spans)
        for span in spans:
            if span.kind == "compile" and span.name.startswith("compile "):
                time.compiled[span.name.removeprefix("compile ")] += 1
            if span.kind == "step":
                time.calls_s[span.name.rpartition(" ")[0]].append(span.own_s)
            else:
                time.kinds_s[span.kind] += span.own_s
        ordered = sorted(exchanges[rank], key=lambda exchange: exchange.start_s)
        _divide_steps(time, [span for span in spans if span.kind == "step"], ordered, last)
        inits = [span.end_s for span in spans if span.kind == "init"]
        if not time.calls_s:  # a script that calls no step of Whale, such as a Horovod script
            _divide_stretch(time, max(inits, default=0.0), time.end_s, ordered, last)
            time.repeated = _find_repeated(ordered)
        elif inits:
            later = [span.start_s for span in spans if span.kind not in ("init", "end")]
            time.kinds_s["setup"] = max(0.0, min(later) - min(inits))
        time.kinds_s["script"] = max(0.0, time.end_s - sum(time.kinds_s.values()))
    return found


def _find_repeated(exchanges: Sequence[Exchange]) -> tuple[str, int, float] | None:
    """Returns (key, number of times, median seconds from one to the next) of the most frequent exchange.

    None: no exchange was made often enough to tell.
    """
    begun_s: dict[str, list[float]] = defaultdict(list)
    for exchange in exchanges:
        begun_s[exchange.key].append(exchange.start_s)
    key = max(begun_s, key=lambda key: len(begun_s[key]), default="")
    if len(begun_s[key]) < FIRST + 2:
        return None
    apart_s = [after_s - before_s for before_s, after_s in itertools.pairwise(begun_s[key])]
    return key, len(begun_s[key]), statistics.median(apart_s)


def _divide_steps(
    time: RankTime, steps: Sequence[Span], ordered: Sequence[Exchange], last: Mapping[tuple[str, str, int], int]
) -> None:
    """Adds the time of a rank's steps to `time`: first calls, computation, waits, and moving bytes.

    Args:
        ordered: the rank's exchanges by start.
        last: meeting -> the rank that arrived last.
    """
    seen: dict[str, int] = defaultdict(int)
    for step in steps:
        program = step.name.rpartition(" ")[0]
        seen[program] += 1
        if seen[program] <= FIRST:
            time.kinds_s["first"] += step.own_s
        else:
            exchanged_s = _divide_stretch(time, step.start_s, step.end_s, ordered, last)
            time.kinds_s["computes"] += max(0.0, step.own_s - exchanged_s)


def _divide_stretch(
    time: RankTime,
    begin_s: float,
    end_s: float,
    ordered: Sequence[Exchange],
    last: Mapping[tuple[str, str, int], int],
) -> float:
    """Adds the waits and moving bytes of exchanges in a stretch of a rank's time to `time`; returns the seconds of
    both.
    """
    first = bisect.bisect_left(ordered, begin_s, key=lambda exchange: exchange.start_s)
    inside = ordered[first : bisect.bisect_right(ordered, end_s, key=lambda exchange: exchange.start_s)]
    exchanged_s = 0.0
    for from_s, until_s, exchange, moves in _sweep(inside, end_s):
        seconds = until_s - from_s
        exchanged_s += seconds
        came_last = last.get(exchange.meeting, exchange.rank)
        if moves or came_last == exchange.rank:
            time.kinds_s["moves"] += seconds
            moved_s, sent_bytes = time.moved.get(exchange.key, (0.0, 0.0))
            time.moved[exchange.key] = moved_s + seconds, sent_bytes
        else:
            time.kinds_s["waits"] += seconds
            time.blamed_s[came_last] += seconds
            time.staged_s += seconds * (exchange.kind in ("Send", "Recv"))
    for exchange in inside:
        moved_s, sent_bytes = time.moved.get(exchange.key, (0.0, 0.0))
        time.moved[exchange.key] = moved_s, sent_bytes + exchange.sent_bytes
    return exchanged_s


def _sweep(exchanges: Sequence[Exchange], until_s: float) -> Iterator[tuple[float, float, Exchange, bool]]:
    """Yields the stretches of time with at least one exchange under way, as (start, end, exchange, whether bytes move).

    The exchange is one whose bytes move, or else the one that began first.

    Args:
        exchanges: the exchanges by start.
        until_s: later times are cut off.
    """
    times = sorted({min(t, until_s) for e in exchanges for t in (e.start_s, e.come_s, e.end_s)})
    coming = iter(exchanges)
    following = next(coming, None)
    under_way: list[Exchange] = []
    for start_s, end_s in itertools.pairwise(times):
        while following is not None and following.start_s <= start_s:
            under_way.append(following)
            following = next(coming, None)
        under_way = [exchange for exchange in under_way if exchange.end_s > start_s]
        if under_way:
            moving = next((exchange for exchange in under_way if exchange.come_s <= start_s), None)
            yield start_s, end_s, moving or under_way[0], moving is not None


def list_costs(ranks: Mapping[int, RankTime]) -> list[Cost]:
    """Returns the costs of the run, largest first."""

    def mean(kind: str) -> float:
        return statistics.fmean(time.kinds_s.get(kind, 0.0) for time in ranks.values())

    found = [Cost(mean(kind), what, _ACTIONS[kind]) for kind, what in _WORDS.items() if kind != "script"]
    own = not any(time.calls_s for time in ranks.values())
    found.append(Cost(mean("script"), *(_OWN_STEPS if own else (_WORDS["script"], _ACTIONS["script"]))))
    found += [_describe_compilation(ranks, mean("compile")), _describe_first_calls(ranks, mean("first"))]
    found += [_describe_moves(ranks, mean("moves")), _describe_waits(ranks, mean("waits"))]
    return sorted((cost for cost in found if cost.seconds > 0), key=lambda cost: -cost.seconds)


def _describe_compilation(ranks: Mapping[int, RankTime], seconds: float) -> Cost:
    time = max(ranks.values(), key=lambda time: time.kinds_s.get("compile", 0.0))
    name, times = max(time.compiled.items(), key=lambda item: item[1], default=("", 0))
    if times > 2:
        return Cost(
            seconds,
            f"steps are compiled, {name} {times} times",
            "a step is compiled for each shape, type and Python value that it is called with: pass batches of one "
            "size (drop_remainder=True), and tensors instead of Python numbers",
        )
    return Cost(
        seconds,
        f"steps are compiled ({_count(sum(time.compiled.values()), 'program')})",
        "it happens once per run, so it matters less in a longer run; later runs reuse the plans and lowered steps, "
        "unless mesh.plan_cache turns that off",
    )


def _describe_first_calls(ranks: Mapping[int, RankTime], seconds: float) -> Cost:
    programs = {name for time in ranks.values() for name in time.calls_s}
    return Cost(
        seconds,
        f"the first {FIRST} calls of {_count(len(programs), 'program')}",
        "TensorFlow optimises a function when it is first called; this matters less in a longer run",
    )


def _describe_moves(ranks: Mapping[int, RankTime], seconds: float) -> Cost:
    moved: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for time in ranks.values():
        for key, (moved_s, sent_bytes) in time.moved.items():
            moved[key][0] += moved_s
            moved[key][1] += sent_bytes
    calls = sum(time.later_calls for time in ranks.values())
    most = max(moved, key=lambda key: moved[key][0], default="")
    sent_bytes = sum(one[1] for one in moved.values())
    return Cost(
        seconds,
        f"bytes move between the ranks: {format_bytes(sent_bytes / (calls or len(ranks)))} {_unit(ranks)} from each, "
        f"most of the time in {most!r}",
        "communication.wire_dtype=bfloat16 halves the bytes, `wh.split` shards large weights instead of moving them, "
        "larger batches exchange less often; `whale plan` lists what moves, largest first",
    )


def _describe_waits(ranks: Mapping[int, RankTime], seconds: float) -> Cost:
    blamed: dict[int, float] = defaultdict(float)
    for time in ranks.values():
        for rank, waited_s in time.blamed_s.items():
            blamed[rank] += waited_s
    whole_s = sum(blamed.values())
    staged = sum(time.staged_s for time in ranks.values()) > whole_s / 2
    if staged:
        return Cost(
            seconds,
            "stages wait for each other's tensors: the bubble of the pipeline",
            "set more micro-batches (pipeline.micro_batches), another schedule, or other stage boundaries "
            "(docs/guides/pipeline.md)",
        )
    slow = max(blamed, key=lambda rank: blamed[rank], default=None)
    if slow is None or blamed[slow] < _ONE_CAUSE * whole_s:
        return Cost(
            seconds,
            "ranks wait for each other in turn: no single rank is the cause",
            "check for other programs on the machine, and for more ranks than cores: `whale doctor` says whether the "
            "machine is busy",
        )
    return Cost(seconds, *_explain_slow_rank(ranks, slow, blamed[slow] / whole_s))


def _explain_slow_rank(ranks: Mapping[int, RankTime], slow: int, part: float) -> tuple[str, str]:
    """Explains why ranks wait for rank `slow`, and what to do: finds the part of a step that takes longer there.

    Args:
        part: fraction of all waits that are for this rank.
    """
    others = [time for rank, time in ranks.items() if rank != slow]

    def each(time: RankTime, kind: str) -> float:
        return time.kinds_s.get(kind, 0.0) / max(1, time.later_calls)

    more = {
        kind: each(ranks[slow], kind) - statistics.fmean(each(time, kind) for time in others)
        for kind in ("computes", "input", "script", "checkpoint")
    }
    kind = max(more, key=lambda kind: more[kind])
    what = f"the ranks wait for rank {slow} ({part:.0%} of all waits)"
    step_s = sum(each(ranks[slow], kind) for kind in _OF_A_STEP)
    if more[kind] < _SAME * step_s:
        return what, f"rank {slow} takes no longer than others in any part of a step: check its network connection"
    figures = (
        f"{format_seconds(each(ranks[slow], kind))} {_unit(ranks)}, the others "
        f"{format_seconds(statistics.fmean(each(time, kind) for time in others))}"
    )
    if kind == "computes":
        return (
            f"{what}, which computes {figures}",
            f"check what else runs on the host of rank {slow} (`whale doctor`, `top`); if its device is slower, give "
            "it fewer rows: batch.shares, or mesh.auto_parallel, which measures the ranks "
            "(docs/tutorials/unequal_devices.md)",
        )
    if kind == "input":
        return f"{what}, whose batches take {figures}", f"check where rank {slow} reads from; {_ACTIONS['input']}"
    return (
        f"{what}, whose script takes {figures} beside its steps",
        f"what only rank {slow} does between steps (logs, files, `if wh.rank() == {slow}`) delays all ranks: do it "
        "less often, or in a thread",
    )


def _describe_steps(ranks: Mapping[int, RankTime]) -> list[str]:
    """Formats lines about the calls of the step function: how many, how long, and which parts a call has."""
    first = next(iter(ranks.values()))
    if not first.calls_s:
        lines = ["The script called no step function of Whale: what it computes counts as time of the script."]
        if first.repeated is not None:
            key, times, apart_s = first.repeated
            lines.append(f"It exchanged {key!r} {times:,} times, once in {format_seconds(apart_s)} (median).")
        return lines
    name = first.main_program
    taken = [seconds for time in ranks.values() for seconds in (time.calls_s[name][FIRST:] or time.calls_s[name])]
    lines = [
        f"{name}: {_count(len(first.calls_s[name]), 'call')}, {format_seconds(statistics.median(taken))} each (median)"
    ]
    calls = sum(time.later_calls for time in ranks.values())
    if calls:
        parts = {
            words: sum(time.kinds_s.get(kind, 0.0) for time in ranks.values()) / calls
            for kind, words in _OF_A_STEP.items()
        }
        lines += [
            "A call and what comes before it, in the mean of calls and ranks: "
            + ", ".join(f"{words} {format_seconds(seconds)}" for words, seconds in parts.items() if seconds > 0)
        ]
    return lines


def _read_spans(events: Sequence[Event]) -> dict[int, list[Span]]:
    """Returns the spans of the thread that takes the steps, for each rank; an unfinished span ends with the trace."""
    spans: dict[tuple[int, int], list[Span]] = defaultdict(list)
    begun: dict[tuple[int, int], list[list[Any]]] = defaultdict(list)  # [event, seconds of spans inside of it]
    end_s: dict[int, float] = defaultdict(float)

    def end(track: tuple[int, int], when_s: float) -> None:
        event, inside_s = begun[track].pop()
        start_s = event["ts"] / 1e6
        span = Span(event.get("cat", ""), event["name"], start_s, when_s, max(0.0, when_s - start_s - inside_s))
        spans[track].append(span)
        if begun[track]:
            begun[track][-1][1] += when_s - start_s

    for event in events:
        if "ts" not in event or event.get("tid", 0) >= _EXCHANGE_TRACK:
            continue
        track = event["pid"], event.get("tid", 0)
        end_s[event["pid"]] = max(end_s[event["pid"]], event["ts"] / 1e6)
        if event["ph"] == "B":
            begun[track].append([event, 0.0])
        elif event["ph"] == "E" and begun[track]:
            end(track, event["ts"] / 1e6)
    for track in list(begun):
        while begun[track]:
            end(track, end_s[track[0]])
    found: dict[int, list[Span]] = {}
    for (rank, _), track_spans in spans.items():
        if len(track_spans) > len(found.get(rank, ())):
            found[rank] = sorted(track_spans, key=lambda span: span.start_s)
    return found


def _read_exchanges(events: Sequence[Event]) -> Iterator[Exchange]:
    for event in events:
        args = event.get("args")
        if event.get("ph") == "X" and args and "call" in args and not str(args["key"]).startswith(_BESIDE_STEPS):
            start_s, waits_s = event["ts"] / 1e6, args.get("waiting_us", 0.0) / 1e6
            end_s = start_s + event["dur"] / 1e6
            come_s = min(end_s, start_s + waits_s)
            kind, sent_bytes = event.get("cat", ""), float(args.get("wire_bytes", 0.0))
            yield Exchange(event["pid"], kind, str(args["key"]), args["call"], start_s, come_s, end_s, sent_bytes)


def _unit(ranks: Mapping[int, RankTime]) -> str:
    """Returns the unit of a rank's figures: "a call" of a step function, or "in all" if the script has steps of its
    own.
    """
    return "a call" if any(time.later_calls for time in ranks.values()) else "in all"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
