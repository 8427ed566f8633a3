"""Steps that are far off their prediction are told, and another way is looked for; what is found is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from whale.errors import PlanError
from whale.ir.strategy import ChosenStrategy, ParallelStrategy
from whale.planner.graph_search.environment import Slowdown, find_slowdown
from whale.runtime.compile import forecast
from whale.runtime.compile.auto import SearchedAgain
from whale.runtime.compile.forecast import FIRST, STEPS, StepForecast, StepsTook, StepTimes
from whale_ops import OpCounter

BETTER = ChosenStrategy(ParallelStrategy(name="every rank alone"), 0.1)


@dataclass
class LoneRank:
    """A communicator whose exchange of 10 bytes takes half of each step so far."""

    clock_s: list[float]
    rank: int = 0

    def allgather_bytes(self, key: str, data: bytes, timeout_s: float, purpose: str) -> list[bytes]:
        return [data]

    def counters(self) -> list[OpCounter]:
        steps = round(self.clock_s[0] / 2.5)
        return [OpCounter("gradient", "AllReduce", steps, 10 * steps, 10 * steps, self.clock_s[0] / 2, 0.0)]


@dataclass
class Watched:
    """A forecast of 0.5 s a step, and what it does."""

    now_s: list[float] = field(default_factory=lambda: [0.0])
    kept: list[ChosenStrategy | None] = field(default_factory=list)
    searched: list[StepsTook] = field(default_factory=list)
    moving: tuple[float, str] = (0.0, "")
    found: SearchedAgain | None = None
    may_lend: bool = False
    near: list[bool] = field(default_factory=list)

    def search(self, took: StepsTook, is_near: bool) -> SearchedAgain:
        self.searched.append(took)
        self.near.append(is_near)
        if self.found is None:
            raise PlanError("no strategy for the program was found")
        return self.found

    def take(self, steps: int, step_s: float, searches: bool = True) -> list[tuple[int, ChosenStrategy]]:
        """Takes steps; returns those after which the run goes over to another strategy."""
        comm = LoneRank(self.now_s)
        search = self.search if searches else None
        foreseen = StepForecast(3, 0.5, comm, search, self.kept.append, lambda _: self.moving, self.may_lend)  # type: ignore[arg-type]

        def call(seconds: float) -> None:
            self.now_s[0] += seconds

        step, moves = foreseen.watch_steps(call, "train", 3), []
        assert foreseen.watch_steps(call, "evaluate", 4) is call
        for number in range(steps):
            step(60.0 if number in (0, FIRST + 2) else step_s)  # the first one compiles, and one is disturbed
            if (chosen := foreseen.look()) is not None:
                moves.append((number + 1, chosen))
        return moves


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: found.now_s[0])
    return found


def found_again(gain_s: float, took_s: float = 1.0, is_whole: bool = True) -> SearchedAgain:
    chosen = BETTER if gain_s else ChosenStrategy(ParallelStrategy(name="data parallel"), 2.5)
    return SearchedAgain(chosen, chosen.step_s + gain_s, Slowdown(1.2, 7.0), is_whole, 1e9, 1e9, took_s)


@pytest.mark.parametrize(("step_s", "said"), [(0.9, 0), (0.3, 0), (2.5, 1), (0.2, 1)])
def test_steps_far_from_their_prediction_are_said_once(
    watched: Watched, capsys: pytest.CaptureFixture[str], step_s: float, said: int
) -> None:
    assert watched.take(FIRST + 2 * STEPS, step_s, searches=False) == []
    err = capsys.readouterr().err
    assert err.count(f"steps of `train` take {1e3 * step_s:.4g} ms, where 500 ms were predicted") == said, err
    assert watched.kept == [None] * said


def test_the_run_goes_over_where_that_pays(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    watched.found = found_again(gain_s=8.0)  # of 61 s: the first step and the search
    assert watched.take(40, 2.5) == [(FIRST + STEPS, BETTER)]
    assert watched.kept == [BETTER] and len(watched.searched) == 1
    err = capsys.readouterr().err
    assert (
        "computing takes 1.2 and exchanging 7 times as long as the machine's figures predict: `every rank alone`" in err
    )
    assert err.count("\n") == 1 and err.rstrip().endswith("and the run goes over to it")


def test_it_goes_over_later_where_less_is_saved(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    watched.found, watched.moving = found_again(gain_s=2.0, took_s=3.0), (1.0, "")
    assert watched.take(40, 2.5) == [(32, BETTER)]  # 60 + 3 + 1 s
    assert "goes over to it after 32 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "why", "kept", "text"),
    [
        (found_again(0.0), "", found_again(0.0).chosen, "no other strategy is predicted to be faster"),
        (found_again(8.0), "they do not fit", BETTER, "but they do not fit: the next run takes it"),
        (found_again(8.0, is_whole=False), "they do not fit", None, "but they do not fit"),
        (None, "", None, "no other strategy was found (no strategy for the program was found)"),
    ],
)
def test_it_stays_where_it_has_to(
    watched: Watched,
    capsys: pytest.CaptureFixture[str],
    found: SearchedAgain | None,
    why: str,
    kept: ChosenStrategy | None,
    text: str,
) -> None:
    watched.found, watched.moving = found, (float("inf") if why else 0.0, why)
    assert watched.take(200, 2.5) == []
    assert watched.kept == [kept]
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("step_s", "may_lend", "near"), [(0.6, True, [True]), (0.9, False, []), (3.0, True, [False])])
def test_one_rank_on_all_cores_is_compared_once_steps_have_taken_as_long_as_that(
    watched: Watched, capsys: pytest.CaptureFixture[str], step_s: float, may_lend: bool, near: list[bool]
) -> None:
    watched.may_lend, watched.found = may_lend, SearchedAgain(BETTER, 9.0, Slowdown(), True, 1e9, 1e9, 0.0)
    moves = watched.take(400, step_s)
    assert watched.near == near and watched.kept == [BETTER] * len(near)
    after = 202 if near == [True] else FIRST + STEPS  # 121 s of steps
    assert moves == [(after, BETTER)] * len(near)
    assert ("one rank was measured on the cores of all: `every rank alone`" in capsys.readouterr().err) == bool(near)


def test_nothing_is_said_where_one_rank_is_no_faster(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    watched.may_lend = True  # and the comparison fails
    assert watched.take(400, 0.6) == [] and watched.near == [True] and watched.kept == []
    assert capsys.readouterr().err == ""


def test_waits_for_other_ranks_are_no_exchange() -> None:
    slow, fast = StepTimes(2.0, 9.0, {"a": 0.3, "b": 0.1}, 10), StepTimes(2.1, 8.0, {"a": 1.5, "b": 0.2, "c": 0.1}, 20)
    assert StepsTook.agree([slow, fast]) == StepsTook(2.0, 9.0, pytest.approx(0.5))
    alone = [StepTimes(one, 9.0, {}, 0) for one in (1.0, 3.0)]
    assert StepsTook.agree(alone) == StepsTook(3.0, 9.0, 0.0)


@dataclass
class Model:
    """A step that computes, exchanges, and hides so much of an exchange behind computing."""

    computing_s: float
    exchanges_s: float
    hidden: float = 0.0

    def predict_s(self, computing: float, exchanging: float) -> float:
        computing_s, exchanges_s = self.computing_s * computing, self.exchanges_s * exchanging
        return max(computing_s + (1 - self.hidden) * exchanges_s, exchanges_s)


@pytest.mark.parametrize(
    ("step", "took", "slower"),
    [
        (Model(0.8, 0.2), (2.0, 1.2), (1.0, 6.0)),  # exchanges alone
        (Model(0.8, 0.2), (4.0, 0.2), (4.75, 1.0)),  # computing alone
        (Model(1.0, 0.0), (3.0, 0.0), (3.0, 1.0)),  # there are no exchanges
        (Model(1.0, 0.0), (3.0, 1.5), (1.5, 1.0)),  # but for what plans always exchange
        (Model(0.8, 0.2), (2.0, 9.0), (2 / 3, 22 / 3)),  # which overlap each other: no more than the step
        (Model(0.5, 0.5), (0.3, 0.1), (0.4, 0.2)),  # all is faster
        (Model(1.0, 0.2, hidden=1.0), (2.0, 2.0), (2 / 3, 10.0)),  # exchanges are no longer hidden
        (Model(1.0, 1e-9, hidden=1.0), (2.0, 1.9), (2.0, 1.9e9)),  # nor are those that were to take no time
    ],
)
def test_what_steps_took_tells_what_is_slower(
    step: Model, took: tuple[float, float], slower: tuple[float, float]
) -> None:
    found = find_slowdown(step, *took)
    assert (found.computing, found.exchanging) == pytest.approx(slower, rel=0.02)
    unpriced_s = 0.0 if step.exchanges_s else took[1]
    assert step.predict_s(found.computing, found.exchanging) + unpriced_s == pytest.approx(took[0], rel=0.02)
