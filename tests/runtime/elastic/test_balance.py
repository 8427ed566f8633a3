"""Rows that are divided anew: what is taken for a rank's own work, and when it is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from whale.distributed.balance import (
    STEPS,
    Balance,
    BalanceHistory,
    WatchedSteps,
    compute_chained_s,
    divide_by_speed,
)
from whale.distributed.msgpack_values import pack
from whale.ir.program import Node, Program, Ref

pytestmark = pytest.mark.core


def _exchange(name: str, *inputs: str, controls: tuple[str, ...] = ()) -> Node:
    return Node(name, "WhaleAllReduce", tuple(Ref(i) for i in inputs), controls, {"key": name})


# Sums a and b wait for nobody, c waits for a; the update waits for all.
PROGRAM = Program("step", (Node("x", "Placeholder"), _exchange("a", "x"), _exchange("b", "x"), _exchange("c", "a"),
                           Node("end", "NoOp", controls=("b", "c"))), ("x",), ())  # fmt: skip


class Ranks:
    """All ranks of a run, of which the first asks; each needs so long for a row, and waits in the last sum."""

    def __init__(self, row_s: Sequence[float]) -> None:
        self.row_s, self.counted = row_s, {"a": 0.0, "b": 0.0, "c": 0.0}
        self.rows: tuple[int, ...] = ()

    def times(self) -> list[tuple[float, list[float]]]:
        work_s = [n * s for n, s in zip(self.rows, self.row_s)]
        return [(max(work_s) + 0.003, [0.001, 0.001, 0.001 + max(work_s) - own]) for own in work_s]

    def step(self) -> None:
        for key, seconds in zip(self.counted, self.times()[0][1]):
            self.counted[key] += seconds

    def counters(self) -> list[Any]:
        return [SimpleNamespace(key=key, seconds=seconds) for key, seconds in self.counted.items()]

    def allgather_bytes(self, key: str, mine: bytes, *_: object) -> list[bytes]:
        return [mine, *(pack(one) for one in self.times()[1:])]


def _divisions(ranks: Ranks, balance: Balance, rows: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """The rows after so many steps, and that none were divided without a reason."""
    ranks.rows = rows
    watched = WatchedSteps(rows, PROGRAM)
    for _ in range(steps):
        watched.take(ranks.step)
        watched.seconds = watched.steps * ranks.times()[0][0]
        found, why = balance.check_after_step(watched, ranks)
        assert bool(found) == bool(why)
        if found:
            ranks.rows = found
            watched = WatchedSteps(found, PROGRAM)
    return ranks.rows


def test_waits_add_up_along_chains() -> None:
    assert compute_chained_s(PROGRAM, {"a": 1.0, "b": 5.0, "c": 3.0}) == 5.0
    assert compute_chained_s(PROGRAM, {"a": 3.0, "b": 5.0, "c": 3.0}) == 6.0


def test_rows_are_in_proportion_to_speeds() -> None:
    rows, gain = divide_by_speed((8, 8, 8), (1.0, 2.0, 1.0))
    assert rows == (10, 5, 9) and gain == pytest.approx(1.6)
    assert divide_by_speed((8, 0), (1.0, 0.5))[0] == (8, 0)
    found, gain = divide_by_speed((10, 10), (1.0, 1.0))
    assert found == (10, 10) and gain == 1.0


def test_a_slow_rank_gets_fewer_rows_and_equal_ranks_keep_theirs() -> None:
    assert _divisions(Ranks((0.01, 0.02)), Balance(), (32, 32), 40) == (43, 21)
    assert _divisions(Ranks((0.01, 0.01)), Balance(), (32, 32), 40) == (32, 32)
    assert _divisions(Ranks((0.01, 0.0105, 0.01)), Balance(), (10, 10, 10), 40) == (10, 10, 10)


def test_it_takes_two_looks() -> None:
    ranks, balance = Ranks((0.1, 0.2)), Balance()
    assert _divisions(ranks, balance, (6, 6), 2 * STEPS) == (6, 6)
    assert _divisions(ranks, balance, (6, 6), 2 + 2 * STEPS) == (8, 4)


def test_rows_follow_within_twenty_steps_whenever_a_rank_gets_slower() -> None:
    for taken in range(40, 50):  # 50 ms each: ten steps between looks, and five after one that found better rows
        ranks, watched, balance = Ranks((0.01, 0.01)), WatchedSteps((5, 5), PROGRAM), Balance()
        ranks.rows, step = watched.rows, 0
        found: tuple[int, ...] = ()
        while not found:
            if step == taken:
                ranks.row_s = (0.01, 0.02)
            before_s = watched.seconds
            watched.take(ranks.step)
            watched.seconds = (before_s + ranks.times()[0][0]) * (watched.steps > 0)
            found, _ = balance.check_after_step(watched, ranks)
            step += 1
        assert found == (7, 3) and step - taken < 20, (taken, step)


def test_stages_are_planned_anew_where_steps_stay_longer_and_that_pays() -> None:
    ranks, watched, balance = Ranks((0.01, 0.01)), WatchedSteps((), PROGRAM), Balance()
    ranks.rows, said = (5, 5), []
    for step in range(60):
        if step == 30:
            ranks.row_s = (0.01, 0.02)
        watched.take(ranks.step)
        watched.seconds = watched.steps * ranks.times()[0][0]
        rows, why = balance.check_after_step(watched, ranks)
        assert not rows
        said += [(step, why)] if why else []
    assert said and 35 < said[0][0] < 50 and "stages planned anew" in said[0][1]
    assert (
        watched.is_replanning_worthwhile(None)
        and watched.is_replanning_worthwhile((10.0, 4.0))
        and not watched.is_replanning_worthwhile((10.0, 6.0))
    )


def _decide_twice(balance: Balance, row_s: Sequence[float]) -> list[tuple[tuple[int, ...], str]]:
    """Returns what two looks decide about 16 rows on each of two ranks."""
    ranks, watched = Ranks(row_s), WatchedSteps((16, 16), PROGRAM)
    ranks.rows = watched.rows
    found = []
    while len(found) < 2:
        watched.take(ranks.step)
        watched.seconds = watched.steps * ranks.times()[0][0]
        before = balance.history.looks
        decided = balance.check_after_step(watched, ranks)
        if balance.history.looks > before:
            found.append(decided)
    return found


def test_a_joining_rank_decides_as_those_that_have_divided_rows_before() -> None:
    veteran, joining = Balance(), Balance()
    veteran.history = BalanceHistory(looks=7, gain=1.25, slower=1.5, before_s=0.024)
    row_s = (0.020, 0.025)  # promises 1.11, which is enough for a fresh run only
    assert _decide_twice(Balance(), row_s) != _decide_twice(veteran, row_s)
    joining.take_over([veteran.history])
    veteran.take_over([veteran.history, BalanceHistory(looks=2)])  # one was gone while it looked
    assert joining.history == veteran.history and joining.history.gain == 1.5
    assert _decide_twice(joining, row_s) == _decide_twice(veteran, row_s)
    assert joining.history == veteran.history
