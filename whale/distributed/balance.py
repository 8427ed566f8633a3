"""Divides rows anew while a run goes on, when ranks turn out to be faster or slower than their shares.

A step's exchanges end on all ranks together, so what an exchange takes longer on a rank than where it is shortest is
a wait for the slowest. Along the longest chain of exchanges of the rank's program those waits add up; what is left of
the step is the rank's own work, and its rows divided by it the rank's speed. Where rows in proportion to the speeds
would make the slowest rank's work shorter by more than `GAIN`, twice in a row, they are divided so.

Stages do unlike work, which is not divided by rows. There the step's own time is watched: where it has become
longer by more than `SLOWER`, twice in a row, the ranks measure their speeds and plan anew.

WatchedSteps     one program's steps on this rank
Balance          compares the ranks now and then, and decides
divide_by_speed  divides rows in proportion to speeds

Decisions: 0092, 0113.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import TURN_TIMEOUT_S, Ranks
from whale.ir.layout import Shard, divide_proportionally
from whale.ir.ops import EXCHANGES
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, iterate_function_refs
from whale.log import log

GAIN = 1.10  # rows are divided anew for at least this speedup of the slowest rank's work
STEPS, SECONDS = 5, 0.5  # at least so many steps and seconds between two looks
AGAIN_S = 0.1  # seconds to the second look where the first one found better rows
SLOWER = 1.25  # stages are planned anew when a step takes this many times the shortest one so far
SETTLES = 2  # steps after a division that are not looked at: they compile, and fill caches
LEAST = 0.1  # a rank's own work counts as at least this fraction of a step
PRECISION = 1000  # speeds are integers: thousandths of a row in the longest rank's time
PURPOSE = "comparing how long the ranks work"
_T = TypeVar("_T")


class WatchedSteps:
    """The steps of one compiled program, as this rank has taken them since the last look.

    Attributes:
      rows: of the batch, on each rank, (): stages divide the work; keys: of its exchanges, sorted.
      least_s: the shortest time of a step that a look has found; longer: the part of a step now that exceeds it.
    """

    def __init__(self, rows: tuple[int, ...], program: Program) -> None:
        self.rows, self.program = rows, program
        self.keys = sorted(
            {
                str(node.attrs["key"])
                for graph in (program, *program.functions.values())
                for node in graph.nodes
                if _is_exchange(node)
            }
        )
        self.steps, self.seconds = 0, 0.0
        self.due = STEPS  # steps until the next look
        self.least_s, self.longer = float("inf"), 0.0
        self.found: tuple[int, ...] = ()  # the division that the last look found better; (): none
        self._skipped = 0
        self._before: dict[str, float] = {}

    def take(self, run: Callable[[], _T]) -> _T:
        """Runs a step, and counts it."""
        start_s = time.perf_counter()
        result = run()
        if self._skipped < SETTLES:
            self._skipped += 1
        else:
            self.steps, self.seconds = self.steps + 1, self.seconds + time.perf_counter() - start_s
        return result

    def is_replanning_worthwhile(self, weighed: tuple[float, float] | None) -> bool:
        """Tells whether steps as long as the shortest one would save more, in those that are left, than planning anew
        takes.

        Args:
          weighed: seconds of all steps that are left, and to become other ranks; None: it is not known.
        """
        return weighed is None or weighed[0] * self.longer > weighed[1]

    def look(self, counted_s: Mapping[str, float]) -> tuple[float, list[float]] | None:
        """Returns (seconds of a step since the last look, seconds of each exchange in it); None: too few steps.

        Args:
          counted_s: seconds of exchanges since the run began, by key.
        """
        if not self._before and self._skipped == SETTLES:  # the first one
            self._before, self.steps, self.seconds = dict(counted_s), 0, 0.0
        if self.steps < self.due:
            return None
        exchanges_s = [(counted_s.get(key, 0.0) - self._before.get(key, 0.0)) / self.steps for key in self.keys]
        found = self.seconds / self.steps, exchanges_s
        self._before, self.steps, self.seconds = dict(counted_s), 0, 0.0
        return found


def _is_exchange(node: Node) -> bool:
    return node.op in EXCHANGES and "key" in node.attrs


def compute_chained_s(program: Program, seconds: Mapping[str, float]) -> float:
    """Returns the most seconds that exchanges which wait for each other add up to.

    Args:
      seconds: by key; those that functions of the program run count where they are called.
    """
    ends: dict[str, float] = {}
    most = 0.0
    for node in program.nodes:
        own = seconds.get(str(node.attrs["key"]), 0.0) if _is_exchange(node) else 0.0
        for _, func in iterate_function_refs(node):
            body = program.functions.get(func.name)
            own += compute_chained_s(body, seconds) if body is not None else 0.0
        begins = max([ends[r.node] for r in node.inputs] + [ends[c] for c in node.controls], default=0.0)
        ends[node.name] = begins + own
        most = max(most, ends[node.name])
    return most


def divide_by_speed(rows: Sequence[int], work_s: Sequence[float]) -> tuple[tuple[int, ...], float]:
    """Returns (rows in proportion to speeds, how many times shorter the slowest rank's work is with them).

    Args:
      rows: of each rank so far; work_s: what it needed for them. A rank without rows gets none.
    """
    longest = max(work_s)
    speeds = tuple(round(PRECISION * n * longest / s) for n, s in zip(rows, work_s))
    found = divide_proportionally(sum(rows), speeds)
    expected = max(s * m / n for n, m, s in zip(rows, found, work_s) if n)
    return found, max(work_s) / expected


@dataclass(frozen=True, slots=True)
class BalanceHistory:
    """Keeps what earlier looks at ranks' speeds found, by which the next ones decide; equal on all ranks.

    Attributes:
      looks: how many there were; gain, slower: what a division, or planning anew, has to promise now.
      before_s: seconds of a step under the rows before the last division, until the look after it; else 0.
    """

    looks: int = 0
    gain: float = GAIN
    slower: float = SLOWER
    before_s: float = 0.0


class Balance:
    """Looks at the steps of this run's programs; all ranks decide alike, since they know the same.

    Attributes:
      history: all by which they decide, beside what they say of their steps.
    """

    def __init__(self) -> None:
        self.history = BalanceHistory()
        self._told: set[str] = set()  # why ranks keep their rows

    def take_over(self, histories: Sequence[BalanceHistory]) -> None:
        """Goes on from the latest of the histories of ranks that are others from now on.

        A rank that was gone may have kept some from their last look. Steps of other ranks take other times.
        """
        self.history = replace(max(histories, key=lambda one: one.looks), before_s=0.0)

    def watch(self, plan: Plan, program: Program, ranks: Ranks, stays: str, cut: bool) -> WatchedSteps | None:
        """Returns what counts the steps of a rank's program; None: its rows stay, for a reason that is logged once.

        Args:
          stays: why they stay in any case, or "".
          cut: whether `auto_parallel` has cut the program into stages, and may do it anew.
        """
        if cut and not stays:
            return WatchedSteps((), program)
        placement = plan.batch_inputs[0].placement if plan.batch_inputs else None
        if placement is None:
            return None
        if not stays and isinstance(placement, Shard) and len(placement.sizes) == ranks.size:
            rows = sorted(zip(plan.mesh_ranks, placement.sizes))
            return WatchedSteps(tuple(size for _, size in rows), program)
        why = stays or "a batch is not divided among all of them"
        if ranks.rank == 0 and why not in self._told:
            log.info(f"ranks that get slower keep their rows: {why}")
            self._told.add(why)
        return None

    def check_after_step(self, watched: WatchedSteps, comm: Any) -> tuple[tuple[int, ...], str]:
        """Returns, after a step, (rows for every rank, and why) where they are to be divided anew; else ((), "").

        Where there are stages, ((), why) if all is to be planned anew.
        Collective when it is time to look again, which is after as many steps on every rank.

        Raises:
          CommError: a rank is gone.
        """
        if watched.steps % watched.due:
            return (), ""
        mine = watched.look({counter.key: counter.seconds for counter in comm.counters()})
        if mine is None:
            return (), ""
        said = [unpack(one) for one in comm.allgather_bytes("whale/balance", pack(mine), TURN_TIMEOUT_S, PURPOSE)]
        step_s = max(taken_s for taken_s, _ in said)
        shortest = [min(values) for values in zip(*(exchanges_s for _, exchanges_s in said))]
        work_s = []
        for taken_s, exchanges_s in said:
            waits_s = {key: own - least for key, own, least in zip(watched.keys, exchanges_s, shortest)}
            work_s.append(max(LEAST * taken_s, taken_s - compute_chained_s(watched.program, waits_s)))
        self.history = replace(self.history, looks=self.history.looks + 1)
        decided = self._decide_rows(watched, work_s, step_s) if watched.rows else self._check_stages(watched, step_s)
        watched.due = max(STEPS, round((AGAIN_S if watched.found else SECONDS) / max(step_s, 1e-6)))
        return decided

    def _check_stages(self, watched: WatchedSteps, step_s: float) -> tuple[tuple[int, ...], str]:
        """Returns ((), why) where the stages are to be planned anew; else ((), "")."""
        twice, watched.least_s = bool(watched.found), min(watched.least_s, step_s)
        watched.longer = 1 - watched.least_s / step_s
        watched.found = (1,) if step_s > self.history.slower * watched.least_s else ()
        if not (watched.found and twice):
            return (), ""
        # What made steps longer may not be a rank that got slower.
        self.history = replace(self.history, slower=SLOWER * self.history.slower)
        return (), (
            f"steps take {1e3 * step_s:.0f} ms, {step_s / watched.least_s:.1f} times as long as before: "
            "speeds are measured, and stages planned anew"
        )

    def _decide_rows(
        self, watched: WatchedSteps, work_s: Sequence[float], step_s: float
    ) -> tuple[tuple[int, ...], str]:
        needed = self.history.gain
        if self.history.before_s and step_s > self.history.before_s:
            needed = min(2.0, 1.2 * needed)  # the last division was none too good: divide less readily
        self.history = replace(self.history, gain=needed, before_s=0.0)
        rows, gain = divide_by_speed(watched.rows, work_s)
        better = gain >= needed and rows != watched.rows
        twice, watched.found = bool(watched.found), rows if better else ()
        if not (better and twice):
            return (), ""
        self.history = replace(self.history, before_s=step_s)
        slowest = max(range(len(rows)), key=lambda rank: work_s[rank])
        then_s = step_s - max(work_s) * (1 - 1 / gain)
        return rows, (
            f"rank {slowest} works {work_s[slowest] / min(work_s):.1f} times as long as the fastest rank on its rows: "
            f"they are divided anew, {_format_rows(watched.rows)} -> {_format_rows(rows)}, for {1e3 * then_s:.0f} ms "
            f"a step in place of {1e3 * step_s:.0f}"
        )


def _format_rows(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows))
