"""Tables that lie whole, each on one rank: chosen by cost or named, on balanced ranks, as on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant.embeddings import Bags, Whole
from benchmarks.giant.measure import SPREAD, Line, difference, moved_by_a_step, ranks
from tests.draws import one_of
from tests.frontends.layers.test_embedding import LAZY, lazy
from whale.ir.layout import Shard
from whale.passes.autoshard.tables import spread
from whale.runtime.context import require_current

LIMIT = 1e-10
SMALL = partial(Whole, tables=5, words=64, width=8, batch=64, each=16)


def placed(make: Any, count: int, config: Mapping[str, Any] = {}) -> tuple[Counter[int], Any, list[str]]:
    """How many tables each rank has whole, the plan, and the keys of what a step sends."""
    with ranks(Line("tables", make, 0, count, config)):
        model = make(SPREAD, tf.float32)
        step = wh.function(model.step)
        plan = step.plan(*model.batch(0))
        step(*model.batch(0))
        keys = [c.key for comm in require_current("the test").comms for c in comm.counters() if c.kind == "Send"]
    last = plan.inner or plan
    whole = [p for p in last.variables.values() if isinstance(p, Shard) and len(p.holders) == 1]
    return Counter(next(iter(p.holders)) for p in whole), plan, keys


@pytest.mark.core
def test_tables_of_bags_lie_whole_and_travel_together() -> None:
    found, plan, keys = placed(partial(SMALL, tables=8), 4)
    assert sorted(found.values()) == [2] * 4
    assert not plan.routed or not any(plan.routed.values())
    parts = [r for r in plan.reshards if isinstance(r.source, Shard) and isinstance(r.target, Shard) and r.bytes]
    groups = {r.group for r in parts}
    assert -1 not in groups and len(parts) >= 3 * 8 > 8 > len(groups)
    # A message from each rank to each other one, of each group: ids, who is there, rows, gradients.
    assert len({*keys}) <= 12 * len(groups)


@pytest.mark.parametrize(
    "count, config, form, each",
    one_of(
        3,
        [
            (2, {}, {"weighted": True}, 1),
            pytest.param(3, {"batch.shares": [2, 1, 1]}, {"optimizer": partial(lazy, "Adagrad")}, 2, marks=LAZY),
            pytest.param(2, {"memory.zero": 1, "memory.zero_min_bytes": 0}, {"optimizer": lazy}, 3, marks=LAZY),
        ],
        several=True,
    ),
)
def test_as_on_one_device(count: int, config: Mapping[str, Any], form: Mapping[str, Any], each: int) -> None:
    """A table and its moments, ``each`` variables, are on one rank."""
    make = partial(SMALL, **form)
    assert sum(placed(make, count, config)[0].values()) == 5 * each
    assert difference(Line("tables", make, 0, count, config)) <= LIMIT


@pytest.mark.parametrize(
    "count, config",
    one_of(2, [(2, {"pipeline.micro_batches": 2}), (4, {"mesh": wh.Mesh(data=2, tensor=2)})], several=True),
)
def test_micro_batches_and_meshes_divide_tables(count: int, config: Mapping[str, Any]) -> None:
    assert not placed(SMALL, count, config)[0]
    assert difference(Line("tables", SMALL, 0, count, config)) <= LIMIT


def test_bytes_are_those_of_ids_and_bags() -> None:
    make = partial(SMALL, tables=8)
    with ranks(Line("tables", make, 0)):
        model = make(SPREAD, tf.float32)
        step = wh.function(model.step)
        plan = step.plan(*model.batch(0))
        assert moved_by_a_step(step, model) == model.wanted(1) == plan.logical_bytes


def test_a_scope_of_one_rank_says_where_a_table_is() -> None:
    class Placed:
        def __init__(self, scopes: Any, dtype: Any) -> None:
            draw = np.random.default_rng(0)
            self.scopes = scopes
            self.variables = [tf.Variable(draw.normal(size=(30, 4)), dtype=dtype) for _ in range(2)]

        def batch(self, number: int) -> tuple[Any, ...]:
            return (tf.constant(np.random.default_rng(number).integers(30, size=(8, 3)), tf.int32),)

        def step(self, ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                found = []
                for rank, table in enumerate(self.variables):
                    with self.scopes.split(devices=[1 - rank]):
                        found.append(tf.reduce_sum(tf.gather(table, ids), 1))
                with self.scopes.replica():
                    loss = tf.reduce_mean(tf.tanh(found[0] * found[1]))
            for v, slope in zip(self.variables, tape.gradient(loss, self.variables)):
                v.scatter_sub(tf.IndexedSlices(0.5 * slope.values, slope.indices))
            return loss

    found, plan, _ = placed(Placed, 2)
    assert found == {0: 1, 1: 1} and not any(plan.routed.values())
    assert [next(iter(p.holders)) for p in plan.variables.values()] == [1, 0]
    assert difference(Line("tables", Placed, 0, 2)) <= LIMIT


def test_a_checkpoint_is_read_where_tables_lie_otherwise_and_what_is_exported_serves(tmp_path: Any) -> None:
    def saved(model: Any) -> Any:
        tables = {f"table_{i}": v for i, v in enumerate(model.variables)}
        return wh.CheckpointManager(tf.train.Checkpoint(**tables), str(tmp_path / "kept"), 1)

    def predict(ids: tf.Tensor) -> tf.Tensor:
        return tf.concat([layer(ids) for layer in model.layers], -1)

    with ranks(Line("tables", SMALL, 0, 4)):
        model = SMALL(SPREAD, tf.float64)
        wh.function(model.step)(*model.batch(0))
        saved(model).save()
        expected = [v.numpy() for v in model.variables]
        (ids, *_) = model.batch(2)
        wh.export(wh.function(predict), tmp_path / "served", tf.TensorSpec(ids.shape, ids.dtype))
        wanted = predict(ids)
    (found,) = tf.saved_model.load(str(tmp_path / "served")).signatures["serving_default"](ids).values()
    np.testing.assert_allclose(found, wanted, atol=1e-14)
    by_rows = partial(Bags, tables=5, words=64, width=8, batch=64, each=16)
    makes: list[tuple[Callable[..., Bags], int]] = [(SMALL, 3), (by_rows, 2)]
    for make, count in makes:
        with ranks(Line("tables", make, 0, count)):
            other = make(SPREAD, tf.float64)
            wh.function(other.step)(*other.batch(1))
            saved(other).restore_or_initialize()
            for v, value in zip(other.variables, expected):
                np.testing.assert_array_equal(v.numpy(), value)


def test_no_rank_has_much_more_than_others() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        ranks_, count = int(draw.integers(2, 9)), int(draw.integers(9, 40))
        loads = {f"t{i}": tuple(int(n) for n in draw.pareto(1.5, 2) * 1000 + 1) for i in range(count)}
        found = spread(loads, ranks_)
        assert found.keys() == loads.keys()
        totals = [sum(load[kind] for load in loads.values()) for kind in range(2)]
        largest = max(load[kind] / totals[kind] for load in loads.values() for kind in range(2))
        for kind in range(2):
            sums = [sum(load[kind] for name, load in loads.items() if found[name] == rank) for rank in range(ranks_)]
            assert max(sums) / totals[kind] <= 2 / ranks_ + largest
