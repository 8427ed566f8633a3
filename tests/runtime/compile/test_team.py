"""Processes that look for a way together find what one would find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec
import pytest

import whale as wh
from tests.draws import one_of
from tests.oracle.metric import difference, limit
from tests.runtime.compile.test_auto import FREE_LINK, MIDDLE, SLOW_LINK, speed
from tests.runtime.layouts.test_split import Classifier, double
from whale.errors import AcrossMicroBatchesError
from whale.ir.plan import Plan
from whale.ir.strategy import ParallelStrategy, Stage
from whale.planner.graph_search import team
from whale.planner.graph_search.predict import Candidate, Plans
from whale.planner.graph_search.search import Found, Search, best_way
from whale.planner.graph_search.strategies import divide_over_all
from whale.planner.graph_search.team import Answer, Asked, Member
from whale.runtime import context
from whale.runtime.compile import auto

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
            self.looked_at.append(one.strategy.name)
            asked = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Asked)
            self._said.append(msgspec.msgpack.encode(member.answer(asked)))

    def answers(self) -> list[Answer]:
        said, self._said = self._said, []
        return [msgspec.msgpack.decode(one, type=Answer) for one in said]

    def plan(self, member: int, strategy: ParallelStrategy) -> tuple[Plan, int]:
        return self._members[member - 1].plan(strategy)


@pytest.mark.parametrize("size", one_of(3, [2, 3, 7]))
@pytest.mark.parametrize("rates", one_of(3, [MIDDLE, FREE_LINK, SLOW_LINK]))
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

    def both(program: Any, settings: Any, environment: Any, stages: int, team: None) -> Found:
        teams.append(InOneProcess(size, partial(Plans, program, settings, environment)))
        found[:] = [best_way(program, settings, environment, stages, 1e9, one) for one in (None, teams[-1])]
        return found[1]

    monkeypatch.setattr(auto, "best_way", both)
    ranks(4, **{"mesh.auto_parallel": True})
    worst = difference(expected, Classifier(wh.function).train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    alone, together = found
    assert together.chosen == alone.chosen == context.require_current().planning.auto
    assert together.made.plan == alone.made.plan
    assert together.is_whole and teams[-1].looked_at
    # Which ways cannot run does not depend on who tries them.
    lost = [{line for line in one.lines if "cannot run" in line} for one in (alone, together)]
    assert lost[0] == lost[1]


def test_the_plan_is_that_of_the_way_that_was_chosen(
    ranks: Callable[..., None], speed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows alone do not fit, and the first way that fits is kept before one that is hardly faster."""
    expected = Classifier().train()
    speed(MIDDLE)
    predicted = team.predict

    def hardly_faster(
        plans: Plans, strategy: ParallelStrategy, needed_s: float = float("inf"), computing_s: float = 0.0
    ) -> Candidate:
        way = predicted(plans, strategy)
        lacking_bytes = 1e9 if strategy.name.startswith("data parallel") else 0.0
        first = not any(one.startswith("split") for one in seen)
        seen.append(strategy.name)
        return replace(way, seconds=1000.0 if first and strategy.split else 999.0, lacking_bytes=lacking_bytes)

    seen: list[str] = []
    found: list[Found] = []
    plans: list[Plans] = []

    def together(program: Any, settings: Any, environment: Any, stages: int, team: None) -> Found:
        plans.append(Plans(program, settings, environment))
        helpers = InOneProcess(2, partial(Plans, program, settings, environment))
        found.append(best_way(program, settings, environment, stages, 1e9, helpers))
        assert len(helpers.looked_at) > 1 and helpers.looked_at[0] == found[-1].chosen.strategy.name
        return found[-1]

    monkeypatch.setattr(team, "predict", hardly_faster)
    monkeypatch.setattr(auto, "best_way", together)
    ranks(4, **{"mesh.auto_parallel": True})
    worst = difference(expected, Classifier(wh.function).train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    assert found[0].made == plans[0].complete(plans[0].make(found[0].chosen.strategy))


def test_others_look_while_the_first_one_asks_whether_stages_can_be() -> None:
    said: list[str] = []

    class Others:
        size = 2

        def ask(self, ways: Sequence[Asked]) -> None:
            said.extend(f"asked {one.strategy.name}" for one in ways)

        def answers(self) -> list[Answer]:
            said.append("answered")
            return [Answer(seconds=1.0)]

        def plan(self, member: int, strategy: ParallelStrategy) -> tuple[Plan, int]:
            raise AssertionError(strategy.name)

    class Across:
        def refuse_across(self) -> None:
            said.append("refused")
            raise AcrossMicroBatchesError("a value of all micro-batches is needed")

    looking, plans = Search(float("inf"), Others()), cast("Plans", Across())
    assert looking.begin_before_stages(plans, [divide_over_all("rows", 2)]) == []
    looking.look(plans)
    assert [way.strategy.name for way in looking.found] == ["rows"]
    looking.look(plans, *[ParallelStrategy((Stage(), Stage()), name=name) for name in ("first", "second")])
    assert said == ["asked rows", "refused", "answered"]
    assert [f"{one.strategy.name}: {one.refused}" for one in looking.lost] == [
        "first: cannot run: a value of all micro-batches is needed",
        "second: cannot run: for the same reason as first",
    ]
    # Alone, all is looked at by this process.
    assert Search(float("inf")).begin_before_stages(plans, [divide_over_all("rows", 2)]) == [divide_over_all("rows", 2)]
