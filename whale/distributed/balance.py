"""Divides the rows of a batch again during a run, when ranks turn out faster or slower than their numbers of rows
suggest.

A rank's speed is its rows divided by the time of its own work, which is the step time without waiting. Waiting is
measured in the exchanges: these end on all ranks at the same time, so the time that an exchange takes longer on a rank
than on the rank where it is shortest was spent waiting for a slower rank. These waits are added up along the longest
chain of dependent exchanges in the rank's program. If rows in proportion to the speeds would shorten the slowest rank's
work by more than a factor `GAIN`, in two comparisons in a row, the rows are divided so.

With pipeline stages the work does not follow rows. There the step time itself is watched: if it has grown by more than
a factor `SLOWER`, in two comparisons in a row, the ranks measure their speeds and plan the stages again.

WatchedSteps     times one program's steps on this rank
Balance          compares the ranks from time to time, and decides
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
    """Times the steps of one compiled program on this rank, since the last comparison of the ranks; ``Balance.watch``
    creates it.

    Args:
      rows: rows of the batch on each rank; () if pipeline stages divide the work.
      program: the rank's program, in which exchanges are looked up.

    Attributes:
      keys: the keys of the program's exchanges, sorted.
      steps: number of steps taken since the last comparison.
      seconds: total time of these steps.
      due: number of steps after which the ranks compare again.
      least_s: the shortest mean step time of any comparison so far.
      longer: the fraction of the present step time by which it exceeds `least_s`.
      found: result of the last comparison, acted on if the next one agrees: the better rows of each rank; (1,) if
        pipeline stages should be planned again; () if nothing should change.
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
        """Runs a step by calling `run`, adds it to the count, and returns the result; the first `SETTLES` steps are not
        counted.
        """
        start_s = time.perf_counter()
        result = run()
        if self._skipped < SETTLES:
            self._skipped += 1
        else:
            self.steps, self.seconds = self.steps + 1, self.seconds + time.perf_counter() - start_s
        return result

    def is_replanning_worthwhile(self, weighed: tuple[float, float] | None) -> bool:
        """Returns True if planning again probably saves more time in the remaining steps than it takes.

        It is assumed that steps become as short as the shortest so far (`least_s`).

        Args:
          weighed: (seconds that all remaining steps take, seconds that a change of plan takes); None: unknown, returns
            True.
        """
        return weighed is None or weighed[0] * self.longer > weighed[1]

    def look(self, counted_s: Mapping[str, float]) -> tuple[float, list[float]] | None:
        """Returns (mean seconds of a step, mean seconds of each exchange per step, in the order of `keys`) since the
        last comparison, and starts to count anew; None if fewer than `due` steps were taken.

        Args:
          counted_s: key of an exchange -> its total seconds since the run began, as the communicator counts them.
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
    """Computes the length, in seconds, of the longest chain of exchanges that depend on each other.

    Args:
      program: the program; a function that it calls counts with its own longest chain, at each call.
      seconds: key of an exchange -> its seconds; other exchanges count 0.
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
    """Divides rows in proportion to the ranks' speeds.

    Args:
      rows: present number of rows of each rank; a rank without rows gets none.
      work_s: seconds that each rank's own work on these rows took, without waiting.

    Returns:
      (new rows of each rank, expected speed-up: present work time of the slowest rank / its work time with the new
      rows).
    """
    longest = max(work_s)
    speeds = tuple(round(PRECISION * n * longest / s) for n, s in zip(rows, work_s))
    found = divide_proportionally(sum(rows), speeds)
    expected = max(s * m / n for n, m, s in zip(rows, found, work_s) if n)
    return found, max(work_s) / expected


@dataclass(frozen=True, slots=True)
class BalanceHistory:
    """Holds what the decisions of ``Balance`` depend on besides the latest times; it is equal on all ranks, and sent to
    joining ranks.

    Attributes:
      looks: number of comparisons so far.
      gain: factor by which a new division of rows has to shorten the slowest rank's work to be made.
      slower: factor by which steps have to become longer for stages to be planned again.
      before_s: step time before the latest division of rows, kept for one comparison, which raises `gain` if steps
        became slower; otherwise 0.
    """

    looks: int = 0
    gain: float = GAIN
    slower: float = SLOWER
    before_s: float = 0.0


class Balance:
    """Compares the ranks' steps and decides when to divide rows again; an elastic run with the key ``fault.rebalance``
    has one.

    All ranks decide alike without a vote, since each computes with the times of all.

    Attributes:
      history: what the decisions depend on besides the latest times.
    """

    def __init__(self) -> None:
        self.history = BalanceHistory()
        self._told: set[str] = set()  # why ranks keep their rows

    def take_over(self, histories: Sequence[BalanceHistory]) -> None:
        """Continues, after the set of ranks has changed, with the history of the rank that took part in most
        comparisons.

        A rank that joins or returns may lack the last comparison. `before_s` is dropped, since steps take another time
        with other ranks.

        Args:
          histories: the history of each rank, by rank.
        """
        self.history = replace(max(histories, key=lambda one: one.looks), before_s=0.0)

    def watch(self, plan: Plan, program: Program, ranks: Ranks, stays: str, cut: bool) -> WatchedSteps | None:
        """Returns a timer for a program's steps, or None if its rows are never divided again, for a reason that is
        logged once.

        Args:
          plan: the plan under which the program runs.
          program: this rank's program.
          ranks: the ranks of the run.
          stays: why the rows must stay as they are, or "".
          cut: whether `auto_parallel` has cut the program into pipeline stages, and may do so again.
        """
        if cut and not stays:
            return WatchedSteps((), program)
        placement = plan.batch_inputs[0].placement if plan.batch_inputs else None
        if placement is None:
            return None
        if not stays and isinstance(placement, Shard) and len(placement.sizes) == ranks.size:
            rows = sorted(zip(plan.mesh_ranks, placement.sizes))
            return WatchedSteps(tuple(size for _, size in rows), program)
        why = stays or "the batch is not divided over all ranks"
        if ranks.rank == 0 and why not in self._told:
            log.info(f"fault.rebalance has no effect: ranks that get slower keep their rows of the batch ({why})")
            self._told.add(why)
        return None

    def check_after_step(self, watched: WatchedSteps, comm: Any) -> tuple[tuple[int, ...], str]:
        """Decides, after a step, whether to divide the rows again or to plan again.

        It is collective when the timer says that a comparison is due, which is after the same number of steps on every
        rank.

        Returns:
          ((), "") for no change; (rows of every rank, a sentence for the log) for a new division; ((), a sentence for
          the log) if pipeline stages are to be planned again.

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
        """Decides whether pipeline stages are planned again; returns ((), a sentence for the log) if so, else ((), "").

        Args:
          watched: the timer of the program's steps.
          step_s: the mean step time of the slowest rank since the last comparison.
        """
        twice, watched.least_s = bool(watched.found), min(watched.least_s, step_s)
        watched.longer = 1 - watched.least_s / step_s
        watched.found = (1,) if step_s > self.history.slower * watched.least_s else ()
        if not (watched.found and twice):
            return (), ""
        # What made steps longer may not be a rank that got slower.
        self.history = replace(self.history, slower=SLOWER * self.history.slower)
        return (), (
            f"steps take {1e3 * step_s:.0f} ms, {step_s / watched.least_s:.1f} times as long as before: "
            "the ranks' speeds are measured, and the pipeline stages planned anew"
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
            f"they are divided anew, {_format_rows(watched.rows)} -> {_format_rows(rows)}; a step is expected to take "
            f"{1e3 * then_s:.0f} ms instead of {1e3 * step_s:.0f} ms"
        )


def _format_rows(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows))
