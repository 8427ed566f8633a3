"""`auto_parallel`: what is chosen under given speeds, and that it runs as one device, over ranks of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from cost_model.graph.machine import Rates
from cost_model.graph.machine_profile import write
from tests.cost_model.test_captured import TABLE
from tests.draws import one_of
from tests.oracle.metric import difference, limit
from tests.runtime.layouts.test_split import Classifier, double
from whale.errors import ClusterError, PlanError
from whale.ir.layout import Shard
from whale.ir.strategy import ParallelStrategy
from whale.planner.graph_search import pipelines, search, strategies, team
from whale.planner.graph_search.search import balance_rows
from whale.planner.graph_search.strategies import divide_over_all
from whale.runtime import context
from whale.runtime.compile import auto
from whale.runtime.compile.microbenchmark import average_kinds

__all__ = ["double"]

FREE_LINK = Rates(2e8, 2e8, 0.0, 0.0, 1e15, "for the test")  # whatever is divided pays
SLOW_LINK = Rates(1e12, 1e12, 0.0, 1.0, 1e6, "for the test")  # an exchange costs a second
MIDDLE = Rates(1e10, 1e9, 0.0, 1e-6, 1e8, "for the test")  # a weight's gradient costs more than the work on it


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def of(rates: Rates, *others: Rates) -> None:
        monkeypatch.setattr(
            auto, "measure_rates", lambda context, dry, program: [rates, *others] if others else [rates] * context.size
        )
        monkeypatch.setattr(strategies, "LEAST_BYTES", 1)

    return of


def started(classifier: Classifier) -> Any:
    return classifier.step.plan(*classifier.batch(0))


@pytest.mark.parametrize("count", one_of(2, [2, 4]))
def test_a_large_classifier_is_split_without_a_scope(
    ranks: Callable[..., None], speed: Callable[..., None], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = Classifier().train()
    speed(MIDDLE)
    ranks(count, **{"mesh.auto_parallel": True})
    classifier = Classifier(wh.function)
    worst = difference(expected, classifier.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    plan = started(classifier)
    hand_made = Classifier(wh.function, wh.replica, wh.split).step.plan(*classifier.batch(0))
    chosen = context.require_current().planning.auto
    assert chosen is not None and chosen.strategy.split
    inner = plan.inner or plan
    assert any(isinstance(p, Shard) for p in inner.variables.values())
    if count == 2:
        assert plan.logical_bytes <= 1.1 * hand_made.logical_bytes
    text = capsys.readouterr().err
    assert "auto_parallel: split from" in text and "data parallel: " in text


def test_over_a_slow_link_every_rank_works_alone(ranks: Callable[..., None], speed: Callable[..., None]) -> None:
    expected = Classifier().train()
    speed(SLOW_LINK)
    ranks(2, **{"mesh.auto_parallel": True})
    classifier = Classifier(wh.function)
    worst = difference(expected, classifier.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    assert started(classifier).logical_bytes == 0


def test_scopes_are_kept(ranks: Callable[..., None], speed: Callable[..., None]) -> None:
    speed(SLOW_LINK)
    ranks(2, **{"mesh.auto_parallel": True})
    scoped = Classifier(wh.function, wh.replica, wh.split)
    held = [p for p in started(scoped).variables.values() if isinstance(p, Shard)]
    assert len(held) == 4


def test_what_does_not_fit_is_not_chosen(
    ranks: Callable[..., None], speed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed(SLOW_LINK)
    ranks(2, **{"mesh.auto_parallel": True})
    classifier = Classifier(wh.function, adam=True)
    # Weight, its two moments, gradient and logits take 2 MB: one of two parts fits, the whole does not.
    monkeypatch.setattr(auto, "limits_bytes", lambda *_: [1.9e6] * 2)
    started(classifier)
    chosen = context.require_current().planning.auto
    assert chosen is not None and (chosen.strategy.split or chosen.strategy.zero)
    wh.shutdown()
    monkeypatch.setattr(auto, "limits_bytes", lambda *_: [1e5] * 2)
    ranks(2, **{"mesh.auto_parallel": True})
    with pytest.raises(PlanError, match="does not fit"):
        started(Classifier(wh.function, adam=True))


def test_activations_are_computed_again_where_memory_binds(
    ranks: Callable[..., None], speed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Deep(depth=32).train(8192)
    speed(FREE_LINK)
    monkeypatch.setattr(search, "choices", lambda *_: [divide_over_all("data parallel", 2)])
    monkeypatch.setattr(search, "pipelines", lambda *_: [])
    taken: list[search.Candidate] = []
    predict = team.predict

    def predicted(plans: Any, strategy: ParallelStrategy, needed_s: float, computing_s: float) -> search.Candidate:
        taken.append(predict(plans, strategy))
        return taken[-1]

    monkeypatch.setattr(team, "predict", predicted)
    ranks(2, **{"mesh.auto_parallel": True})
    deep = Deep(wh.function, 32)
    deep.step.plan(*deep.batch(0, 8192))
    wh.shutdown()
    plain = taken[0]
    limit_bytes = 0.95 * min(way.bytes for way in taken)
    monkeypatch.setattr(auto, "limits_bytes", lambda *_: [limit_bytes] * 2)
    taken.clear()
    ranks(2, **{"mesh.auto_parallel": True})
    deep = Deep(wh.function, 32)
    worst = difference(expected, deep.train(8192), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    chosen = context.require_current().planning.auto
    assert chosen is not None and chosen.strategy.recompute == "auto", chosen
    least = min(taken, key=lambda way: way.bytes)
    assert least.bytes <= limit_bytes < plain.bytes and chosen.step_s > plain.seconds  # memory for time
    wh.shutdown()
    monkeypatch.setattr(auto, "limits_bytes", lambda *_: [1e3] * 2)
    ranks(2, **{"mesh.auto_parallel": True})
    deep = Deep(wh.function)
    with pytest.raises(PlanError, match="which takes the least") as error:
        deep.step.plan(*deep.batch(0, 512))
    assert "no setting that was tried makes it fit" in str(error.value)


def test_what_takes_too_long_by_its_operations_alone_is_not_planned(
    ranks: Callable[..., None], speed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed(replace(FREE_LINK, start_s=1e-5, exchange_s=1e-4, exchanged_bytes_per_s=1e9))
    alone = divide_over_all("every rank alone", 2, replicated=True)
    monkeypatch.setattr(search, "choices", lambda *_: [divide_over_all("data parallel", 2), alone])
    ranks(2, **{"mesh.auto_parallel": True, "memory.zero_min_bytes": 0})
    lasting: dict[str, float] = {}
    taken: dict[str, float] = {}
    looked_at, predict = search._list_looked_at, team.predict

    def every(*args: Any) -> list[tuple[ParallelStrategy, float]]:
        found = looked_at(*args)
        lasting.update((choice.name, least_s) for choice, least_s in found)
        return [(choice, 0.0) for choice, _ in found]

    def predicted(*args: Any) -> search.Candidate:
        way = predict(*args)
        taken[way.strategy.name] = way.seconds
        return way

    monkeypatch.setattr(search, "_list_looked_at", every)
    monkeypatch.setattr(team, "predict", predicted)
    deep = Deep(wh.function, 2)
    deep.step.plan(*deep.batch(0, 64))
    chosen = context.require_current().planning.auto
    wh.shutdown()
    shares = {name: s / taken[name] for name, s in lasting.items() if name != "data parallel"}
    assert len(shares) > 4
    assert all(0 < share <= 1 + 1e-9 for share in shares.values()), shares
    assert shares[alone.name] > 0.5 and shares["data parallel, optimizer's state divided"] > 0.5
    monkeypatch.setattr(search, "_list_looked_at", looked_at)
    ranks(2, **{"mesh.auto_parallel": True, "memory.zero_min_bytes": 0})
    planned, _ = set(taken), taken.clear()
    deep = Deep(wh.function, 2)
    deep.step.plan(*deep.batch(0, 64))
    assert set(taken) < planned
    assert context.require_current().planning.auto == chosen


def test_unequal_ranks_get_rows_by_their_speed(
    ranks: Callable[..., None], speed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Classifier().train()
    fast = replace(FREE_LINK, bytes_per_s=1e12)  # updates, which do not depend on rows, take next to nothing
    speed(fast, replace(fast, flops_per_s=1e8))
    ranks(2, **{"mesh.auto_parallel": True})
    classifier = Classifier(wh.function)
    found: list[Any] = []
    looked_at = search._list_looked_at

    def rows_only(*args: Any) -> list[tuple[ParallelStrategy, float]]:
        found.extend(choice for choice, _ in looked_at(*args) if choice.shares)
        return [(divide_over_all("equal", 2), 0.0), *((choice, 0.0) for choice in found)]

    monkeypatch.setattr(search, "_list_looked_at", rows_only)
    worst = difference(expected, classifier.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    assert found[0].shares == (11, 5)
    assert context.require_current().planning.auto.strategy.shares == found[0].shares


def test_rows_so_few_that_unequal_ranks_have_as_many(ranks: Callable[..., None], speed: Callable[..., None]) -> None:
    fast = replace(FREE_LINK, bytes_per_s=1e12)
    speed(fast, replace(fast, flops_per_s=0.7 * fast.flops_per_s))
    ranks(2, **{"mesh.auto_parallel": True})
    classifier = Classifier(wh.function)
    classifier.step.plan(*(part[:4] for part in classifier.batch(0)))
    assert not context.require_current().planning.auto.strategy.shares


def test_all_ranks_end_together_whatever_they_do_once() -> None:
    assert balance_rows(16, [0.0, 0.0], [1.0, 2.0]) == (11, 5)
    assert balance_rows(90, [10.0, 20.0], [1.0, 2.0]) == (63, 27)  # 73 and 74 s
    assert balance_rows(10, [1.0, 100.0], [1.0, 1.0]) == (10, 0)
    assert balance_rows(7, [0.0], [1.0]) == (7,)


def test_ranks_of_one_kind_have_one_speed() -> None:
    assert average_kinds([100.0, 58.0, 110.0, 62.0]) == [105.0, 60.0, 105.0, 60.0]
    assert average_kinds([100.0, 50.0]) == [100.0, 50.0]


class Deep:
    """A chain of layers with an optimizer's state, and an evaluation that no stage has."""

    def __init__(self, function: Any = tf.function, depth: int = 4):
        tf.keras.utils.set_random_seed(7)
        self.layers = [tf.keras.layers.Dense(24, activation="tanh") for _ in range(depth)] + [tf.keras.layers.Dense(3)]
        for layer, size in zip(self.layers, (6, *[24] * depth)):
            layer.build((None, size))
        self.weights = [w for layer in self.layers for w in layer.trainable_variables]
        self.optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        self.optimizer.build(self.weights)

        def predict(x: tf.Tensor) -> tf.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(predict(x) - y))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.weights), self.weights))
            return loss

        self.step = function(step)
        self.evaluate = function(lambda x, y: tf.reduce_mean(tf.square(predict(x) - y)))

    def batch(self, number: int, rows: int = 16) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(number)
        return generator.normal(size=(rows, 6)), generator.normal(size=(rows, 3))

    def train(self, rows: int = 16) -> dict[str, np.ndarray]:
        found = {f"loss/{i}": np.asarray(self.step(*self.batch(i, rows))) for i in range(3)}
        found["evaluated"] = np.asarray(self.evaluate(*self.batch(9)))
        return found | {f"weight/{i}": np.asarray(w) for i, w in enumerate(self.weights)}


# What travels costs by its bytes, and work next to nothing: a pipeline sends activations, not gradients of weights.
THIN_LINK = Rates(1e10, 1e10, 0.0, 0.0, 1e5, "for the test")


@pytest.mark.parametrize("count", one_of(2, [2, 4]))
def test_a_pipeline_is_found_without_a_scope(
    ranks: Callable[..., None], speed: Callable[..., None], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Deep().train()
    speed(THIN_LINK)
    choices = search.choices
    monkeypatch.setattr(search, "choices", lambda *a: [c for c in choices(*a) if not c.replicated and not c.split])
    ranks(count, **{"mesh.auto_parallel": True})
    deep = Deep(wh.function)
    worst = difference(expected, deep.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    chosen = context.require_current().planning.auto
    assert chosen is not None and len(chosen.strategy.stages) == count, chosen
    assert len(deep.step.plan(*deep.batch(0)).stage_groups) == count


def test_stages_of_a_pipeline_follow_the_ranks_speed() -> None:
    assert pipelines.cut([1.0] * 8, [1.0, 0.59]) == [5]
    assert pipelines.cut([1.0, 1.0, 4.0], [1.0, 1.0, 1.0]) == [1, 2]
    assert pipelines.cut([1.0], [1.0, 1.0]) is None
    assert pipelines.groups_of([1.0, 0.5, 1.0, 0.5], 2) == ((0, 2), (1, 3))
    assert pipelines.groups_of([0.5, 1.0], 2) == ((1,), (0,))


def test_an_optimizers_state_is_divided_where_its_update_takes_long(
    ranks: Callable[..., None], speed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Classifier(adam=True).train()
    speed(Rates(1e15, 1e6, 0.0, 0.0, 1e15, "for the test"))
    ranks(2, **{"mesh.auto_parallel": True})
    classifier = Classifier(wh.function, adam=True)
    choices = search.choices
    monkeypatch.setattr(search, "choices", lambda *a: [c for c in choices(*a) if not c.split])
    worst = difference(expected, classifier.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    chosen = context.require_current().planning.auto
    assert chosen is not None and chosen.strategy.zero == 1


def test_ways_are_played_by_a_profile(
    ranks: Callable[..., None], speed: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speed(SLOW_LINK)  # these rates would send nothing
    expected = Classifier().train()
    path = tmp_path / "profile.json"
    write(msgspec.structs.replace(TABLE, host="bench", call_s=0.0, node_s=1e-9), path)
    ranks(2, **{"mesh.auto_parallel": True, "mesh.profile": str(path)})
    classifier = Classifier(wh.function)
    worst = difference(expected, classifier.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    said = capsys.readouterr().err
    assert "(bench as `whale profile` measured it)" in said
    wh.shutdown()
    ranks(2, **{"mesh.auto_parallel": True, "mesh.profile": str(tmp_path / "none.json")})
    with pytest.raises(ClusterError, match="the profile cannot be read"):
        Classifier(wh.function).train()
