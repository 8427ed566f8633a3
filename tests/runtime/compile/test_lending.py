"""`auto_parallel` lets rank 0 compute alone on all cores of a host where that is faster: priced, then measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import whale as wh
from cost_model.graph.machine import Rates
from tests.oracle.metric import difference, limit
from tests.programs import mlp
from tests.runtime.layouts.test_split import Classifier, double
from whale.errors import ProgramError
from whale.ir.plan import plan_from_json
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.environment import SearchEnvironment
from whale.planner.graph_search.search import way_or_lending
from whale.planner.graph_search.strategies import divide_over_all
from whale.runtime.compile import auto
from whale.runtime.context import require_current

__all__ = ["double"]

# Work takes seconds, a number between ranks next to nothing, and a weight's gradient minutes.
FAR_APART = Rates(1e6, 1e6, 0.0, 1e-6, 1e2, "for the test")


@dataclass
class Cores:
    """Two cores of a host; ``gain``: how much faster a step was with both, None: it cannot be run."""

    gain: float | None
    own_threads: int = 1
    threads: int = 2
    asked: list[str] = field(default_factory=list)

    def measure_rates(self, own: Rates, threads: int) -> Rates:
        self.asked.append("rates")
        if threads == self.own_threads:
            return own
        return replace(own, flops_per_s=1.8 * own.flops_per_s, bytes_per_s=1.8 * own.bytes_per_s)

    def measure_step(self, program: Program) -> tuple[float, float]:
        self.asked.append("step")
        assert not any(node.op.startswith("WhaleSend") for node in program.nodes)
        if self.gain is None:
            raise ProgramError("no random values can be made")
        return 1.0, 1.0 / self.gain


@pytest.fixture
def started(ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def start(cores: Cores, rates: Rates = FAR_APART, **config: Any) -> None:
        monkeypatch.setattr(auto, "measure_rates", lambda context, dry, program: [rates] * context.size)
        monkeypatch.setattr(auto, "find_lending", lambda program, context: cores)
        ranks(2, **{"mesh.auto_parallel": True, **config})

    return start


def test_rank_0_computes_all_where_a_step_gains_by_threads(
    started: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = Classifier(adam=True).train()
    cores = Cores(1.7)
    started(cores)
    classifier = Classifier(wh.function, adam=True)
    worst = difference(expected, classifier.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    plan = classifier.step.plan(*classifier.batch(0))
    assert (plan.lent_threads, cores.asked) == (2, ["rates", "step", "rates"])
    assert [group.ranks for group in plan.stage_groups] == [(0,), (1,)]
    assert plan_from_json(plan.to_json()) == plan
    text = format_plan(plan)
    assert "Rank 0 computes with 2 threads, on the cores of all ranks" in text and "1 rank lends its cores" in text
    said = capsys.readouterr().err
    assert "auto_parallel: rank 0 alone, with 2 threads on the cores that the others lend" in said
    assert "measured: 1000.00 ms with 1, and 588.24 with 2 threads" in said
    assert "whale run -np 1" not in said


@pytest.mark.parametrize(
    ("cores", "rates", "asked", "why"),
    [
        (Cores(0.9), FAR_APART, ["rates", "step", "rates"], "measured: 1000.00 ms with 1, and 1111.11 with 2"),
        (Cores(None), FAR_APART, ["rates", "step"], "not tried: no random values can be made"),
        (Cores(2.0, 100, 101), FAR_APART, [], "ms at least"),
    ],
    ids=["slower", "cannot be run", "hardly more threads"],
)
def test_ranks_lend_nothing_where_that_gains_nothing(
    started: Callable[..., None], cores: Cores, rates: Rates, asked: list[str], why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    started(cores, rates)
    classifier = Classifier(wh.function)
    plan = classifier.step.plan(*classifier.batch(0))
    chosen = require_current().planning.auto
    assert chosen is not None and chosen.strategy.lent_threads == plan.lent_threads == 0
    assert cores.asked == asked
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(("took_s", "lends"), [(0.7, True), (0.5, False)])
def test_a_measured_step_counts_against_what_steps_took(took_s: float, lends: bool) -> None:
    settings, cores = PlanSettings(2), Cores(1.7)  # with which a step takes 0.59 s
    program = normalise(mlp(), settings)
    nothing_costs = Rates(1e15, 1e15, 0.0, 0.0, 1e15, "for the test")
    environment = SearchEnvironment([nothing_costs] * 2, None, [1e12] * 2, lending=cores)
    present = divide_over_all("data parallel", 2)
    found = way_or_lending(program, settings, environment, present, took_s)
    assert bool(found.chosen.strategy.lent_threads) == lends
    assert found.chosen.step_s == pytest.approx(1.0 / 1.7 if lends else took_s)
    assert cores.asked == ["rates", "step"]


def test_what_the_user_divides_is_not_given_to_one_rank(started: Callable[..., None]) -> None:
    cores = Cores(2.0)
    started(cores, **{"batch.shares": [3, 1]})
    classifier = Classifier(wh.function)
    assert classifier.step.plan(*classifier.batch(0)).lent_threads == 0
    assert cores.asked == []
