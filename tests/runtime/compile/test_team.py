"""Processes that look for a way together find what one would find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

import whale as wh
from tests.oracle.metric import difference, limit
from tests.runtime.compile.test_auto import FREE_LINK, MIDDLE, SLOW_LINK, speed
from tests.runtime.layouts.test_split import Classifier, double
from whale.ir.plan import Plan
from whale.planner.captured.predict import Plans
from whale.planner.captured.search import Found, best_way
from whale.planner.captured.team import Answer, Asked, Member
from whale.runtime.compile import auto
from whale.runtime.run import context

__all__ = ["double", "speed"]


class InOneProcess:
    """A team whose members look when they are asked; what they say is said in bytes."""

    def __init__(self, size: int, plans: Callable[[], Plans]) -> None:
        self.size, self._members = size, [Member(plans()) for _ in range(size - 1)]
        self._said: list[bytes] = []
        self.looked_at: list[str] = []

    def ask(self, ways: Sequence[Asked]) -> None:
        assert len(ways) <= len(self._members) and not self._said
        for one, member in zip(ways, self._members):
            self.looked_at.append(one.choice.name)
            asked = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Asked)
            self._said.append(msgspec.msgpack.encode(member.answer(asked)))

    def answers(self) -> list[Answer]:
        said, self._said = self._said, []
        return [msgspec.msgpack.decode(one, type=Answer) for one in said]

    def plan(self, member: int) -> tuple[Plan, int]:
        return self._members[member - 1].plan()


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("rates", [MIDDLE, FREE_LINK, SLOW_LINK])
def test_a_team_finds_what_one_process_finds(
    ranks: Callable[..., None],
    speed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    rates: Any,
    size: int,
) -> None:
    expected = Classifier().train()
    speed(rates)
    found: list[Found] = []
    teams: list[InOneProcess] = []

    def both(program: Any, settings: Any, ground: Any, stages: int, team: None) -> Found:
        teams.append(InOneProcess(size, partial(Plans, program, settings, ground)))
        found[:] = [best_way(program, settings, ground, stages, 1e9, one) for one in (None, teams[-1])]
        return found[1]

    monkeypatch.setattr(auto, "best_way", both)
    ranks(4, auto_parallel=True)
    worst = difference(expected, Classifier(wh.function).train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    alone, together = found
    assert together.choice == alone.choice == context.current().auto
    assert together.made.plan == alone.made.plan
    assert together.is_whole and teams[-1].looked_at
    # Which ways cannot run does not depend on who tries them.
    lost = [{line for line in one.lines if "cannot run" in line} for one in (alone, together)]
    assert lost[0] == lost[1]
