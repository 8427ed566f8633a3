"""wh.replica and wh.split on groups of ranks, side by side: the result is that of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.oracle.metric import difference, limit
from tests.runtime.layouts.test_split import Classifier, double  # noqa: F401  (a fixture)
from whale.errors import PlanError
from whale.ir.layout import Shard
from whale.ir.plan import Plan
from whale.runtime.start import check_replicas

Start = Callable[..., None]
Values = dict[str, np.ndarray]


def on(kind: Any, ranks: list[int]) -> Callable[[], Any]:
    return lambda: kind(devices=ranks)


def holders(plan: Plan, op: str) -> frozenset[int]:
    """Ranks that have some of a node's result."""
    (out,) = plan.strategies[""][op].outputs
    assert isinstance(out, Shard), out
    return out.holders


@pytest.fixture(scope="module")
def one_device() -> dict[bool, Values]:
    return {}


@pytest.mark.parametrize("adam", [False, True], ids=["momentum", "adam"])
@pytest.mark.parametrize(
    ("features", "classes"),
    one_of(2, [([0], [1]), ([0, 1], [2, 3]), ([0, 1, 2], [1, 3]), ([3], [0, 1, 2, 3])], several=True),
    ids=["1+1", "2+2", "overlapping", "subset"],
)
def test_features_beside_a_classifier(
    ranks: Start, one_device: dict[bool, Values], features: list[int], classes: list[int], adam: bool
) -> None:
    if adam not in one_device:
        one_device[adam] = Classifier(adam=adam).train()
    ranks(max(features + classes) + 1)
    spread = Classifier(wh.function, on(wh.replica, features), on(wh.split, classes), adam)
    found = spread.train()
    check_replicas()
    worst = difference(one_device[adam], found, 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    plan = spread.step.plan(*spread.batch(0))
    held = {name: p for name, p in plan.variables.items() if isinstance(p, Shard)}
    assert len(held) == (6 if adam else 4)
    assert {p.holders for p in held.values()} == {frozenset(classes)}
    assert plan.split_flops_fraction == 1.0
    products = [name for name in plan.strategies[""] if name.endswith("/MatMul") and "gradient" not in name]
    assert [holders(plan, name) for name in products] == [frozenset(features), frozenset(classes)]


def test_devices_that_are_all_ranks_are_no_group(ranks: Start) -> None:
    ranks(3)
    both = [Classifier(wh.function, *scopes) for scopes in [(wh.replica, wh.split), (
        lambda: wh.replica(devices=wh.cluster().slices[0]), on(wh.split, [2, 0, 1]))]]  # fmt: skip
    one, other = (c.step.plan(*c.batch(0)) for c in both)
    assert [t.scope for t in one.task_graphs] == [t.scope for t in other.task_graphs]
    assert [str(s) for s in one.strategies[""].values()] == [str(s) for s in other.strategies[""].values()]


class Towers:
    """Two towers of convolutions or rows, normalised, on groups of ranks, joined where all ranks have rows."""

    def __init__(self, function: Any, scope: Callable[[list[int] | None], Any], split: Callable[[list[int]], Any]):
        values = np.random.default_rng(3)
        shapes = [(3, 3, 2, 4), (6, 4), (4, 7), (9, 4), (7, 5)]
        self.weights = [
            tf.Variable(0.3 * values.standard_normal(shape), name=f"w{i}") for i, shape in enumerate(shapes)
        ]
        self.scope, self.split, self.step = scope, split, function(self._step)

    def _step(self, images: tf.Tensor, rows: tf.Tensor, words: tf.Tensor) -> tuple[tf.Tensor, ...]:
        filters, small, wide, table, last = self.weights
        with tf.GradientTape() as tape:
            with self.scope([0, 1]):
                left = tf.nn.conv2d(images, filters, 1, "SAME")
                left = left - tf.reduce_mean(left, [0, 1, 2])  # of the whole batch, some ranks having none of it
                left = tf.reduce_mean(tf.nn.relu(left) / (1 + tf.math.reduce_std(left, [0, 1, 2])), [1, 2])
            with self.scope([1, 2, 3]):
                right = tf.tanh(rows @ small)
                flat = tf.reshape(tf.gather(table, words), [-1, 4])  # five rows for each of the batch
                right += tf.reduce_sum(tf.reshape(tf.tanh(flat), [-1, 5, 4]), 1)
            with self.split([0, 3]):
                wider = tf.nn.relu((left + right) @ wide)
            with self.split([1, 2]):
                logits = wider @ last
            with self.scope(None):
                loss = tf.reduce_mean(tf.nn.log_softmax(logits) ** 2) + tf.reduce_mean(left * right)
        slopes = tape.gradient(loss, self.weights)
        for weight, slope in zip(self.weights, slopes):
            weight.assign_sub(0.3 * tf.convert_to_tensor(slope))
        return loss, logits, left

    def train(self) -> Values:
        found = {}
        for i in range(3):
            values = np.random.default_rng(10 + i)
            batch = (
                values.standard_normal((6, 5, 5, 2)),
                values.standard_normal((6, 6)),
                values.integers(9, size=(6, 5)),
            )
            found.update({f"{i}/{k}": np.asarray(value) for k, value in enumerate(self.step(*map(tf.constant, batch)))})
        return found | {weight.name: weight.numpy() for weight in self.weights}


def test_several_groups_of_each_kind(ranks: Start) -> None:
    expected = Towers(tf.function, lambda _: contextlib.nullcontext(), lambda _: contextlib.nullcontext()).train()
    ranks(4, **{"batch.norm_statistics": "batch"})
    spread = Towers(wh.function, wh.replica, wh.split)
    found = spread.train()
    check_replicas()
    worst = difference(expected, found, 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    plan = spread.step.plan(
        tf.zeros((6, 5, 5, 2), tf.float64), tf.zeros((6, 6), tf.float64), tf.zeros((6, 5), tf.int64)
    )
    assert holders(plan, "Conv2D") == {0, 1}
    assert [holders(plan, name) for name in ("matmul", "Reshape", "matmul_1", "matmul_2", "mul")] == [
        {1, 2, 3}, {1, 2, 3}, {0, 3}, {1, 2}, {0, 1, 2, 3}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("features", "classes", "config"),
    [
        ([0, 1, 2], [1, 3], {"pipeline.micro_batches": 2}),
        (
            [0, 1],
            [1, 3],
            {"mesh": wh.Mesh(data=2, tensor=2)},
        ),  # tensor 1 of both, so each has half of the rows, and all classes
    ],
    ids=["micro-batches", "mesh"],
)
def test_groups_with_other_axes(
    ranks: Start, one_device: dict[bool, Values], features: list[int], classes: list[int], config: dict[str, Any]
) -> None:
    if False not in one_device:
        one_device[False] = Classifier().train()
    ranks(4, **config)
    found = Classifier(wh.function, on(wh.replica, features), on(wh.split, classes)).train()
    check_replicas()
    worst = difference(one_device[False], found, 0.1)
    assert worst.error <= limit("float64", 0.0), worst


def test_a_session(ranks: Start) -> None:
    v1 = tf.compat.v1

    def run(session: Any, features: Any, classes: Any) -> Values:
        graph = tf.Graph()
        with graph.as_default():
            v1.set_random_seed(1)
            x = v1.placeholder(tf.float64, (8, 6))
            y = v1.placeholder(tf.int64, (8,))
            with features():
                u = v1.get_variable("u", (6, 5), tf.float64, v1.initializers.random_normal(seed=3))
                h = tf.tanh(x @ u)
            with classes():
                w = v1.get_variable("w", (5, 12), tf.float64, v1.initializers.random_normal(seed=4))
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=h @ w))
            train = v1.train.AdamOptimizer(0.01, epsilon=1e-3).minimize(loss)
            start = v1.global_variables_initializer()
        found = {}
        with session(graph=graph) as s:
            s.run(start)
            for i in range(3):
                values = np.random.default_rng(i)
                feed = {x: values.standard_normal((8, 6)), y: values.integers(12, size=8)}
                found[f"loss/{i}"] = s.run([loss, train], feed)[0]
            return found | dict(zip("uw", s.run([u, w])))

    expected = run(v1.Session, contextlib.nullcontext, contextlib.nullcontext)
    ranks(3)
    worst = difference(expected, run(wh.Session, on(wh.replica, [0, 1]), on(wh.split, [1, 2])), 0.1)
    assert worst.error <= limit("float64", 0.0), worst


def test_what_cannot_be_had_says_what_can(ranks: Start) -> None:
    ranks(2, **{"pipeline.micro_batches": 2})
    for kind, devices in ((wh.split, [0, 2]), (wh.replica, [1, 1]), (wh.stage, [])):
        with pytest.raises(
            PlanError, match=rf"wh\.{kind.__name__} names ranks (.|\n)*expected: +different ranks below 2"
        ):
            with kind(devices=devices):
                pass
    wh.shutdown()
    ranks(4, mesh=wh.Mesh(data=2, tensor=2))
    crooked = Classifier(wh.function, wh.replica, on(wh.split, [0, 1, 2]))
    with pytest.raises(
        PlanError, match=r"not form a block of the mesh(.|\n)*devices=\[0, 1, 2\], mesh data=2,tensor=2"
    ):
        crooked.step(*crooked.batch(0))
    wh.shutdown()
    ranks(3)

    @contextlib.contextmanager
    def elsewhere() -> Any:
        with wh.stage(), wh.split(devices=[0]):
            yield

    outside = Classifier(wh.function, wh.stage, elsewhere)
    with pytest.raises(
        PlanError, match=r"no rank of its stage\n  op: stage_\d/split_\d\(ranks=0\)(.|\n)*stage on \[1\]"
    ):
        outside.step(*outside.batch(0))
    wh.shutdown()
    ranks(2)
    narrow = Classifier(wh.function, wh.replica, lambda: wh.split(devices=[1], dim=3))
    with pytest.raises(PlanError, match=r"dim=3 of \[16, 2000\](.|\n)*one of dimensions \[1\]"):
        narrow.step(*narrow.batch(0))


def test_a_step_without_scopes_takes_what_lies_on_some_ranks(ranks: Start) -> None:
    expected = Classifier()
    wanted = [float(expected.step(*expected.batch(0))), float(expected.evaluate(*expected.batch(0)))]
    ranks(3)
    spread = Classifier(wh.function, wh.replica, on(wh.split, [1, 2]))
    found = [float(spread.step(*spread.batch(0)))]

    @wh.function
    def evaluate(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        right = tf.equal(tf.argmax(spread.last(spread.hidden(x)), axis=-1, output_type=tf.int32), y)
        return tf.reduce_mean(tf.cast(right, tf.float64))

    found.append(float(evaluate(*spread.batch(0))))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
