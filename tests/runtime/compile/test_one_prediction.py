"""What `auto_parallel` predicted is what compilation lowers, and what limits a run limits the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf

import whale as wh
from cost_model.graph.machine import Rates
from tests.draws import one_of
from tests.runtime.compile.test_auto import FREE_LINK, MIDDLE, SLOW_LINK, THIN_LINK, Deep, double, speed
from tests.runtime.layouts.test_split import Classifier
from tests.zoo.case import Setting, build
from tests.zoo.catalogue import case_named
from whale.errors import PlanError
from whale.ir.program import Program
from whale.ir.strategy import ParallelStrategy
from whale.kernels.substitute import substitute_kernels
from whale.passes.memory.step_bytes import step_bytes
from whale.passes.settings import FuseSettings, PlanSettings
from whale.planner.graph_search import predict, search, team
from whale.runtime import context
from whale.runtime.compile import compile, memory_plan

__all__ = ["double", "speed"]

Step = Callable[[], Any]


def classifier(**options: Any) -> Step:
    made = Classifier(wh.function, **options)
    return lambda: made.step(*made.batch(0))


def deep() -> Step:
    made = Deep(wh.function)
    return lambda: made.step(*made.batch(0))


def of_zoo(name: str) -> Step:
    program = build(case_named(name), Setting("float64", "sgd", function=wh.function, gradients=False))
    return lambda: program.run_step(program.batches(1)[0])


CASES: dict[str, tuple[Callable[[], Step], Sequence[Rates], dict[str, Any]]] = {
    "rows": (lambda: of_zoo("mlp"), [FREE_LINK], {}),
    "alone": (classifier, [SLOW_LINK], {}),
    "tensors": (classifier, [MIDDLE], {}),
    "optimizer state": (lambda: classifier(adam=True), [Rates(1e15, 1e6, 0.0, 0.0, 1e15, "for the test")], {}),
    "pipeline": (deep, [THIN_LINK], {"pipeline.stages": 2}),
    "micro-batches": (deep, [FREE_LINK], {"pipeline.micro_batches": 2}),
    "zero": (deep, [FREE_LINK], {"memory.zero": 3, "memory.zero_min_bytes": 0}),
    "convolutions": (lambda: of_zoo("convnet"), [FREE_LINK], {}),
    "attention": (lambda: of_zoo("gpt"), [FREE_LINK], {}),
    "a loop": (lambda: of_zoo("lstm"), [FREE_LINK], {}),
    "unequal ranks": (deep, [FREE_LINK, Rates(1e8, 2e8, 0.0, 0.0, 1e15, "for the test")], {}),
    "mixed precision": (deep, [FREE_LINK], {"precision.compute_dtype": "bfloat16"}),
}


def nodes(program: Program) -> int:
    return len(program.nodes) + sum(len(body.nodes) for body in program.functions.values())


@pytest.mark.parametrize("case", one_of(3, CASES))
def test_what_was_predicted_is_what_runs(
    case: str, ranks: Callable[..., None], speed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, rates, config = CASES[case]
    speed(*rates)
    lowered: list[list[Program]] = []
    foreseen: dict[str, list[Program]] = {}
    lower_some, predicts, lower = predict.lower_ranks, team.predict, compile.lower_ranks

    def lowered_some(*args: Any) -> list[Program]:
        lowered.append(lower_some(*args))
        return lowered[-1]

    def predicted(plans: Any, strategy: ParallelStrategy, needed_s: float, computing_s: float) -> search.Candidate:
        way = predicts(plans, strategy, needed_s, computing_s)
        foreseen[strategy.name] = lowered[-1]
        return way

    ran: list[list[Program]] = []

    def lower_ranks(*args: Any) -> list[Program]:
        ran.append(lower(*args))
        return ran[-1]

    monkeypatch.setattr(predict, "lower_ranks", lowered_some)
    monkeypatch.setattr(team, "predict", predicted)
    monkeypatch.setattr(compile, "lower_ranks", lower_ranks)
    ranks(2, **{"mesh.auto_parallel": True, **config})
    make()()
    chosen = context.require_current().planning.auto
    assert chosen is not None
    programs = foreseen[chosen.strategy.name]
    (here,) = [one for one in ran if one[0].name == programs[0].name]
    assert [nodes(p) for p in programs] == [nodes(p) for p in here[: len(programs)]]
    run = substitute_kernels(here[: len(programs)], PlanSettings(2, fuse=FuseSettings.all_on()))
    held = [sum(step_bytes(p, rank, 2).values()) for rank, p in enumerate(run)]
    assert chosen.held_bytes == max(held)


def test_memory_limit_bytes_binds_the_choice(ranks: Callable[..., None], speed: Callable[..., None]) -> None:
    speed(SLOW_LINK)  # every rank alone is the fastest way, and needs the whole weight and its two moments
    ranks(2, **{"mesh.auto_parallel": True})
    classifier(adam=True)()
    free = context.require_current().planning.auto
    assert free is not None and free.strategy.replicated
    wh.shutdown()
    ranks(2, **{"mesh.auto_parallel": True, "memory.limit_bytes": int(0.8 * free.held_bytes)})
    classifier(adam=True)()
    bound = context.require_current().planning.auto
    assert bound is not None and bound.held_bytes <= 0.8 * free.held_bytes
    wh.shutdown()
    ranks(2, **{"mesh.auto_parallel": True, "memory.limit_bytes": 100_000})
    with pytest.raises(PlanError, match="does not fit into the ranks' memory"):
        classifier(adam=True)()


def test_the_cgroups_limit_binds_the_choice(
    ranks: Callable[..., None], speed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed(SLOW_LINK)
    ranks(2, **{"mesh.auto_parallel": True})
    classifier(adam=True)()
    free = context.require_current().planning.auto
    assert free is not None and free.strategy.replicated
    wh.shutdown()
    limit = int(0.8 * free.held_bytes)
    monkeypatch.setattr(memory_plan, "memory_limit_bytes", lambda: 2 * limit)  # of the host's two ranks together
    ranks(2, **{"mesh.auto_parallel": True})
    classifier(adam=True)()
    bound = context.require_current().planning.auto
    assert bound is not None and bound.held_bytes <= limit
    assert not tf.config.list_physical_devices("GPU")  # whose memory no cgroup limits
