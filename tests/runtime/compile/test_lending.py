"""`auto_parallel` lets rank 0 compute alone on all cores of a host where that is measured to be faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import whale as wh
from cost_model.graph.machine import Rates
from tests.oracle.metric import difference, limit
from tests.programs import Builder, mlp
from tests.runtime.layouts.test_split import Classifier, double
from whale.errors import ProgramError
from whale.ir.plan import plan_from_json
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.ir.strategy import ChosenStrategy
from whale.ir.values import TensorType
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.environment import SearchEnvironment
from whale.planner.graph_search.search import Found, way_or_lending
from whale.planner.graph_search.strategies import divide_over_all
from whale.runtime.compile import auto

__all__ = ["double"]


@dataclass
class Cores:
    """Two cores of a host, on which a step takes so long; None: it cannot be run."""

    step_s: float | None
    threads: int = 2
    asked: int = 0

    def measure_step(self, program: Program) -> float:
        self.asked += 1
        assert not any(node.op.startswith("WhaleSend") for node in program.nodes)
        if self.step_s is None:
            raise ProgramError("no random values can be made")
        return self.step_s


def test_rank_0_computes_all(ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Classifier(adam=True).train()
    lent = ChosenStrategy(divide_over_all("rank 0 alone", 2, lent_threads=2), 1.0)
    monkeypatch.setattr(auto, "_agree", lambda *_: (lent, None))
    ranks(2, **{"mesh.auto_parallel": True})
    classifier = Classifier(wh.function, adam=True)
    worst = difference(expected, classifier.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    plan = classifier.step.plan(*classifier.batch(0))
    assert plan.lent_threads == 2
    assert [group.ranks for group in plan.stage_groups] == [(0,), (1,)]
    assert plan_from_json(plan.to_json()) == plan
    text = format_plan(plan)
    assert "Rank 0 computes with 2 threads, on the cores of all ranks" in text and "1 rank lends its cores" in text


def compare(program: Program, cores: Cores, **asked: Any) -> Found:
    """Compares with steps that took 0.7 s."""
    settings = PlanSettings(2).but(**asked)
    nothing_costs = Rates(1e15, 1e15, 0.0, 0.0, 1e15, "for the test")
    environment = SearchEnvironment([nothing_costs] * 2, None, [1e12] * 2, lending=cores)
    present = divide_over_all("data parallel", 2)
    return way_or_lending(normalise(program, settings), settings, environment, present, 0.7)


def printing(b: Builder) -> Program:
    x = b.input("x", (4, 3))
    text = b.node("AsString", [x], [TensorType("string", (4, 3))])
    return b.build([b.op("Tanh", x)], effects=[b.node("PrintV2", [text], []).node])


@pytest.mark.parametrize(
    ("program", "step_s", "lends", "asked", "why"),
    [
        (mlp(), 0.6, True, 1, "with 2 threads on the cores that the others lend, predicted 600.00 ms"),
        (mlp(), 0.69, False, 1, "others lend: 690.00 ms, measured"),  # which is no faster by enough
        (mlp(), None, False, 1, "not tried: no random values can be made"),
        (printing(Builder()), 0.1, False, 0, "effects that the script sees: PrintV2"),
    ],
    ids=["faster", "slower", "cannot be run", "seen"],
)
def test_a_measured_step_counts_against_what_steps_took(
    program: Program, step_s: float | None, lends: bool, asked: int, why: str
) -> None:
    cores = Cores(step_s)
    found = compare(program, cores)
    assert bool(found.chosen.strategy.lent_threads) == lends and cores.asked == asked
    assert found.chosen.step_s == (step_s if lends else 0.7)
    assert why in "\n".join(found.lines)


def test_what_the_user_divides_is_not_given_to_one_rank() -> None:
    cores = Cores(0.1)
    assert compare(mlp(), cores, batch__shares=(3, 1)).chosen.strategy.lent_threads == 0
    assert cores.asked == 0
