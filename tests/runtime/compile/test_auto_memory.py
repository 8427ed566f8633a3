"""`auto_parallel` where memory binds: what is looked at besides, in which order, and that it runs as one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import whale as wh
from tests.oracle.metric import difference, limit
from tests.runtime.compile.test_auto import FREE_LINK, Deep, speed
from tests.runtime.layouts.test_split import double
from whale.errors import PlanError
from whale.ir.strategy import ParallelStrategy
from whale.planner.graph_search import search, team
from whale.runtime import context
from whale.runtime.compile import auto

__all__ = ["double", "speed"]


class Looked:
    """Ways in the order in which they were predicted; memory is what `limit_bytes` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ways: list[search.Candidate] = []
        self.limit_bytes = 1e15
        predict = team.predict

        def predicted(plans: Any, strategy: ParallelStrategy, needed_s: float, computing_s: float) -> search.Candidate:
            self.ways.append(predict(plans, strategy))
            return self.ways[-1]

        monkeypatch.setattr(team, "predict", predicted)
        monkeypatch.setattr(auto, "limits_bytes", lambda *_: [self.limit_bytes] * 4)


@pytest.fixture
def looked(speed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Looked:
    speed(FREE_LINK)
    choices = search.choices
    monkeypatch.setattr(search, "choices", lambda *a: [c for c in choices(*a) if not c.replicated and not c.split])
    return Looked(monkeypatch)


@pytest.mark.long
def test_weights_are_divided_too_where_state_is_not_enough(ranks: Callable[..., None], looked: Looked) -> None:
    rows = 8
    ranks(4, **{"mesh.auto_parallel": True, "memory.zero_min_bytes": 0})
    looked.limit_bytes = 1.0
    deep = Deep(wh.function, 8)
    with pytest.raises(PlanError, match="does not fit"):
        deep.step.plan(*deep.batch(0, rows))
    wh.shutdown()
    without = [way.strategy.is_pipelined for way in looked.ways]
    assert without == sorted(without) and any(without)  # stages last: they take longest to plan
    held = {
        way.strategy.zero: way.bytes
        for way in looked.ways
        if not way.strategy.is_pipelined and way.strategy.recompute == "none"
    }
    assert held[3] < held[1] < held[0]
    looked.limit_bytes = (held[3] + held[1]) / 2
    ranks(4, **{"mesh.auto_parallel": True, "memory.zero_min_bytes": 0})
    deep = Deep(wh.function, 8)
    worst = difference(Deep(depth=8).train(rows), deep.train(rows), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    chosen = context.require_current().planning.auto
    assert chosen is not None and chosen.strategy.zero == 3 and not chosen.strategy.is_pipelined


def test_replicas_of_stages_divide_their_state_where_memory_binds(ranks: Callable[..., None], looked: Looked) -> None:
    asked = {"pipeline.stages": 2, "pipeline.micro_batches": 4, "memory.zero_min_bytes": 0}
    ranks(4, **{"mesh.auto_parallel": True, **asked})
    deep = Deep(wh.function, 8)
    deep.step.plan(*deep.batch(0))
    wh.shutdown()
    (plain,) = looked.ways
    assert plain.strategy.is_pipelined and not plain.strategy.zero
    looked.limit_bytes = 0.95 * plain.bytes
    ranks(4, **{"mesh.auto_parallel": True, **asked})
    deep = Deep(wh.function, 8)
    worst = difference(Deep(depth=8).train(), deep.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    chosen = context.require_current().planning.auto
    assert chosen is not None and chosen.strategy.zero == 1 and chosen.strategy.stages == plain.strategy.stages
