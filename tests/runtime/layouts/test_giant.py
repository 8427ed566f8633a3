"""Experts and classifiers of many classes over ranks of one process: what moves is what has to, as on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant import classifier, experts, stages
from benchmarks.giant.measure import SPREAD, Line, difference, measure, ranks
from tests.draws import one_of
from whale.errors import PlanError

LIMIT = 1e-10
LINES = {line.name.split(", 200")[0]: line for line in (*experts.lines(), *stages.lines(), *classifier.lines())}
# Of 200,000 classes nothing that moves has a dimension: the small size moves as many bytes.
SPARED = [
    "ArcFace, one-hot margin",
    "CosFace, tensor_scatter_nd_update margin",
    "x @ (W * 2)",
    "x @ (W + A @ B)",
    "x @ W + (x @ A) @ B",
    "weight norm",
    "experts, scatter, routed under replica",
    "experts, gather, routed under replica",
    "3 experts on 4 ranks",
    "8 experts, over the whole batch, tokens choose",
    "3 experts, over the whole batch, slots gather",
    "3 experts, over the whole batch, experts choose",
    "wh.layers.MoE, top-2 and a shared expert",
    "wh.layers.MoE, experts choose",
    "wh.layers.MoE, 3 experts choose among all tokens",
    "wh.layers.MoE, top-2, dropless",
    "wh.layers.MoE, top-2 with micro-batches",
    "experts, einsum, micro-batches",
    "experts, gather, micro-batches",
    "embedding split inside a stage",
    "experts in stages of 2 ranks, 2 micro-batches",
    "wh.losses.curricularface",
    "wh.losses.arcface, 2 micro-batches",
    "wh.losses.partial_fc",
    "wh.losses.top_k_accuracy",
]


def planned_bytes(line: Line, make: Any) -> int:
    with ranks(line):
        model = make(SPREAD, tf.float32)
        return int(wh.function(model.step).plan(*model.batch(0)).logical_bytes)


@pytest.mark.parametrize("name", one_of(12, SPARED))
def test_what_moves_is_what_has_to(name: str) -> None:
    line = LINES[name]
    assert planned_bytes(line, line.small or line.make) <= 1.05 * line.wanted
    assert difference(line) <= LIMIT


@pytest.mark.parametrize(
    "name", one_of(2, ["wh.layers.MoE, top-2, dropless", "3 experts, over the whole batch, none dropped"])
)
def test_what_moves_in_slots_of_the_runs_number(name: str) -> None:
    """The plan knows no bytes of such slots; the run's are counted. Of three experts one rank has none."""
    found = measure(LINES[name])
    assert 0 < found.moved <= 1.05 * found.wanted and found.difference <= LIMIT


def test_fewer_groups_than_ranks_are_dispatched_all_the_same() -> None:
    """Blocks that cannot be shared out: the scatter's rows are."""
    line = Line("two groups", partial(experts.Experts, form="scatter", groups=2), 0)
    assert difference(line) <= LIMIT


@pytest.mark.parametrize("form", one_of(2, ["scatter", "gather"]))
def test_unequal_rows_and_micro_batches(form: str) -> None:
    for config in ({"batch.shares": [2, 1, 1]}, {"pipeline.micro_batches": 2}):
        count = 3 if "batch.shares" in config else 2
        line = Line(form, partial(experts.Experts, form=form, experts=6), 0, count, config)
        assert difference(line) <= LIMIT


def test_a_layer_of_fewer_experts_than_ranks_in_micro_batches() -> None:
    """A rank without experts has their biases' sums in each micro-batch all the same."""
    made = partial(experts.Layer, experts=3, hidden=8, width=16, each=8, groups_of_rows=8, balance="group", shared=8)
    assert difference(Line("layer", made, 0, config={"pipeline.micro_batches": 2})) <= LIMIT


def test_a_group_of_all_rows_and_unequal_ones() -> None:
    """Slots are cut behind a dimension of one group; rows are as many as shares say."""
    made = partial(experts.Layer, experts=4, hidden=8, width=16, each=24, groups_of_rows=0, choose="experts")
    assert difference(Line("layer", made, 0, 3, {"batch.shares": [3, 2, 1]})) <= LIMIT


def test_groups_of_data_and_experts() -> None:
    """Axis by axis: what one axis has cut, the other cuts again."""
    for form in ("scatter", "gather"):
        line = Line(form, partial(experts.Experts, form=form), 0, 4, {"mesh": wh.Mesh(data=2, tensor=2)})
        assert difference(line) <= LIMIT


def _by_expert(x: tf.Tensor, chosen: tf.Tensor, count: int, form: str) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Parts of the rows, as large as the run finds, and where the parts' rows, one after the other, come from."""
    order = tf.argsort(chosen, stable=True)
    if form == "partition":
        return tf.dynamic_partition(x, chosen, count), order
    rows = tf.gather(x, order)
    if form == "sizes":
        return tf.split(rows, tf.math.bincount(chosen, minlength=count, maxlength=count), num=count), order
    ragged = tf.RaggedTensor.from_value_rowids(rows, tf.gather(chosen, order), nrows=count)
    return [ragged[i] for i in range(count)], order


@pytest.mark.parametrize("form", ["partition", "sizes", "ragged"])
def test_tokens_taken_apart_by_expert_are_refused(form: str) -> None:
    """Where each expert has a product of its own, no layout says which rank computes it."""
    experts_of = [tf.Variable(tf.ones((8, 8))) for _ in range(3)]

    def step(x: tf.Tensor) -> tf.Tensor:
        with wh.replica():
            parts, order = _by_expert(x, tf.argmax(x[:, :3], -1, output_type=tf.int32), 3, form)
        with wh.split():
            made = [part @ w for part, w in zip(parts, experts_of)]
        with wh.replica():
            return tf.reduce_sum(tf.scatter_nd(order[:, None], tf.concat(made, 0), [12, 8]) ** 2)

    two = Line("two ranks", experts.Experts, 0, 2)
    with ranks(two), pytest.raises(PlanError, match="splits by expert") as refused:
        wh.function(step)(tf.random.stateless_normal((12, 8), [1, 2]))
    assert "wh.layers.MoE(experts, hidden, capacity_factor=None)" in str(refused.value)
