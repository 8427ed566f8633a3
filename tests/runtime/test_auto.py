"""`auto_parallel`: what is chosen under given speeds, and that it runs as one device, over ranks of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import whale as wh
from tests.oracle.metric import difference, limit
from tests.runtime.test_split import Classifier, double
from whale.errors import PlanError
from whale.ir.layout import Split
from whale.planner import programs
from whale.planner.programs import Choice, Rates
from whale.runtime import auto, context

__all__ = ["double"]

FREE_LINK = Rates(2e8, 2e8, 0.0, 0.0, 1e15, "for the test")  # whatever is divided pays
SLOW_LINK = Rates(1e12, 1e12, 0.0, 1.0, 1e6, "for the test")  # an exchange costs a second
MIDDLE = Rates(1e10, 1e9, 0.0, 1e-6, 1e8, "for the test")  # a weight's gradient costs more than the work on it


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def of(rates: Rates, *others: Rates) -> None:
        monkeypatch.setattr(
            auto, "_measured", lambda context, dry, program: [rates, *others] if others else [rates] * context.size
        )
        monkeypatch.setattr(programs, "LEAST_BYTES", 1)

    return of


def started(classifier: Classifier) -> Any:
    return classifier.step.plan(*classifier.batch(0))


@pytest.mark.parametrize("count", [2, 4])
def test_a_large_classifier_is_split_without_a_scope(
    ranks: Callable[..., None], speed: Callable[..., None], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = Classifier().train()
    speed(MIDDLE)
    ranks(count, auto_parallel=True)
    classifier = Classifier(wh.function)
    worst = difference(expected, classifier.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    plan = started(classifier)
    hand_made = Classifier(wh.function, wh.replica, wh.split).step.plan(*classifier.batch(0))
    chosen = context.current().auto
    assert chosen is not None and chosen.weights
    inner = plan.inner or plan
    assert any(isinstance(p, Split) for p in inner.variables.values())
    if count == 2:
        assert plan.logical_bytes <= 1.1 * hand_made.logical_bytes
    text = capsys.readouterr().err
    assert "auto_parallel: split from" in text and "data parallel: " in text


def test_over_a_slow_link_every_rank_works_alone(ranks: Callable[..., None], speed: Callable[..., None]) -> None:
    expected = Classifier().train()
    speed(SLOW_LINK)
    ranks(2, auto_parallel=True)
    classifier = Classifier(wh.function)
    worst = difference(expected, classifier.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    assert started(classifier).logical_bytes == 0


def test_scopes_are_kept(ranks: Callable[..., None], speed: Callable[..., None]) -> None:
    speed(SLOW_LINK)
    ranks(2, auto_parallel=True)
    scoped = Classifier(wh.function, wh.replica, wh.split)
    held = [p for p in started(scoped).variables.values() if isinstance(p, Split)]
    assert len(held) == 4


def test_what_does_not_fit_is_not_chosen(
    ranks: Callable[..., None], speed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed(SLOW_LINK)
    ranks(2, auto_parallel=True)
    classifier = Classifier(wh.function, adam=True)
    # Weight, its two moments, gradient and logits take 2 MB: one of two parts fits, the whole does not.
    monkeypatch.setattr(auto, "_memory_bytes", lambda context, size: 1.9e6)
    started(classifier)
    chosen = context.current().auto
    assert chosen is not None and chosen.weights
    wh.shutdown()
    monkeypatch.setattr(auto, "_memory_bytes", lambda context, size: 1e5)
    ranks(2, auto_parallel=True)
    with pytest.raises(PlanError, match="in no way"):
        started(Classifier(wh.function, adam=True))


def test_unequal_ranks_get_rows_by_their_speed(ranks: Callable[..., None], speed: Callable[..., None]) -> None:
    expected = Classifier().train()
    slow = replace(FREE_LINK, flops_per_s=1e8, bytes_per_s=1e8)
    speed(FREE_LINK, slow)
    ranks(2, auto_parallel=True)
    classifier = Classifier(wh.function)
    chosen = auto._by_speed  # what is looked at beside the splits
    found: list[Any] = []
    auto._by_speed, auto.choices = (lambda *a: found.append(chosen(*a)) or found[-1]), lambda *a: [Choice("equal")]
    try:
        worst = difference(expected, classifier.train(), 0.1)
    finally:
        auto._by_speed, auto.choices = chosen, programs.choices
    assert worst.error <= limit("float64", 0.0), worst
    assert found[0].shares == (11, 5)
    assert context.current().auto == found[0]
