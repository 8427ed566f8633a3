"""``wh.split(context=1)``: the sequence is divided on every layer, and all equals one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from benchmarks.context import Model, heads_bytes, ring_bytes
from tests.draws import one_of
from whale.errors import PlanError
from whale.ir.layout import B, Partial, Shard
from whale.ir.mesh import iterate_levels
from whale.ir.plan import Plan
from whale.passes.analysis.attention import attentions
from whale.passes.normalize.attention_as_one import in_rings
from whale.runtime.context import require_current

SCOPE = partial(wh.split, context=1)
LIMIT = 1e-10
P_MAX = Partial("max")


@pytest.fixture
def double() -> Iterator[None]:
    tf.keras.backend.set_floatx("float64")
    tf.keras.mixed_precision.set_global_policy("float64")
    yield
    tf.keras.backend.set_floatx("float32")
    tf.keras.mixed_precision.set_global_policy("float32")


def train(model: Any) -> list[np.ndarray]:
    losses = [np.asarray(model.step(*model.batch(i))) for i in range(2)]
    return losses + [v.numpy() for v in model.variables]


def worst(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.max(np.abs(a - b))) for a, b in zip(found, expected, strict=True))


def moved(plan: Plan, tensor_bytes: int) -> list[int]:
    """Bytes of changes of layout that are no sums: of the axis that divides sequences."""
    (one,) = (p for p in iterate_levels(plan) if p.axis == "context")
    return [r.bytes for r in one.reshards if not isinstance(r.source, Partial) and r.bytes >= tensor_bytes // 4]


def whole_activations(plan: Plan, tensor_bytes: int) -> list[str]:
    return [str(r.ref) for r in plan.reshards if r.target == B and r.bytes >= (plan.size - 1) * tensor_bytes
            and not isinstance(r.source, Partial)]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "shape", "form"),
    [(2, (2, 16, 2, 4), "matmul"), (4, (1, 16, 4, 8), "einsum"), (4, (2, 15, 6, 4), "dense")],
    ids=str,
)
def test_parts_of_the_sequence_are_given_for_heads(
    ranks: Callable[..., None], count: int, shape: tuple[int, int, int, int], form: str
) -> None:
    expected = train(Model(tf.function, contextlib.nullcontext, shape, form=form))
    ranks(count)
    model = Model(wh.function, SCOPE, shape, form=form)
    assert worst(train(model), expected) <= LIMIT
    plan = model.step.plan(*model.batch(0))
    large = moved(plan, model.bytes)
    assert len(large) == 8 and not whole_activations(plan, model.bytes)
    assert all(isinstance(r.source, Shard | Partial) for r in plan.reshards if r.bytes)
    if all(size % count == 0 for size in (shape[1], shape[2])):
        assert sum(large) == heads_bytes(count, model.bytes)


@pytest.mark.parametrize(
    ("count", "mesh", "shape", "form"),
    one_of(
        2,
        [
            (4, "", (2, 15, 2, 4), "dense"),
            (8, "", (1, 16, 2, 4), "einsum"),
            (8, "context=4,data=2", (2, 16, 3, 4), "where"),
        ],
        several=True,
    ),
    ids=str,
)
def test_keys_and_values_go_round(
    ranks: Callable[..., None], count: int, mesh: str, shape: tuple[int, int, int, int], form: str
) -> None:
    """Where ranks are more than heads; what the counters see is what the plan says."""
    expected = train(Model(tf.function, contextlib.nullcontext, shape, form=form))
    ranks(count, mesh=wh.Mesh.parse(mesh))
    model = Model(wh.function, SCOPE, shape, form=form)
    assert worst(train(model), expected) <= LIMIT
    plan = model.step.plan(*model.batch(0))
    (one,) = (p for p in iterate_levels(plan) if p.axis == "context")
    large = [r.bytes for r in one.reshards if r.source == r.target]
    assert sum(large) == ring_bytes(one.size, model.bytes) and len(large) == 2
    counters = [c for comm in require_current("test").comms for c in comm.counters() if "/attention" in c.key]
    assert sum(c.logical_bytes for c in counters) == 2 * sum(large), "two steps"


def test_a_limit_of_memory_makes_keys_go_round(ranks: Callable[..., None]) -> None:
    ranks(4)
    shape = (1, 32, 4, 4)
    model = Model(wh.function, SCOPE, shape)
    assert not any(r.source == r.target for r in model.step.plan(*model.batch(0)).reshards)
    wh.shutdown()
    shape = (1, 256, 4, 4)
    ranks(4, **{"memory.limit_bytes": 8 * 256 * 256})  # as much as the shares of a head take
    model = Model(wh.function, SCOPE, shape)
    plan = model.step.plan(*model.batch(0))
    assert any(r.source == r.target for r in plan.reshards)


def test_the_peak_of_a_rank_falls_as_the_ranks_become_more(ranks: Callable[..., None]) -> None:
    """One sequence on one device, and eight times as long a one on eight ranks."""
    peaks = {}
    for count, length in ((1, 512), (8, 512), (8, 4096)):
        ranks(count)
        model = Model(wh.function, SCOPE if count > 1 else contextlib.nullcontext, (1, length, 1, 4), form="where")
        plan = wh.plan(model.step, *model.batch(0))
        peaks[count, length] = max(map(sum, zip(*plan.memory.values())))
        wh.shutdown()
    assert 8 * peaks[8, 512] <= 1.1 * peaks[1, 512]
    assert peaks[8, 4096] <= 1.1 * peaks[1, 512]


class _Descent:
    """Gradient descent of a mean square error.

    Args:
      predict: from a tensor of the shape to one that is compared with another such.
    """

    def __init__(
        self, function: Any, scope: Any, predict: Callable[[tf.Tensor], tf.Tensor], variables: list[Any],
        shape: tuple[int, ...],
    ):  # fmt: skip
        self.variables, self.shape = variables, shape

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape, scope():
                loss = tf.reduce_mean((predict(x) - y) ** 2)
            for v, slope in zip(variables, tape.gradient(loss, variables)):
                v.assign_sub(0.1 * slope)
            return loss

        self.step = function(step)

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(number)
        return draw.normal(size=self.shape), draw.normal(size=self.shape)


def _keras(function: Any, scope: Any, heads: int) -> _Descent:
    """A layer of a transformer, of Keras' own."""
    tf.keras.utils.set_random_seed(1)
    layers, width = tf.keras.layers, 4 * heads
    attention = layers.MultiHeadAttention(heads, 4)
    parts = [layers.LayerNormalization(), layers.Dense(2 * width, activation="gelu"), layers.Dense(width)]

    def predict(x: tf.Tensor) -> tf.Tensor:
        q = parts[0](x)
        z = x + attention(q, q, use_causal_mask=True)
        return z + parts[2](parts[1](z))

    shape = (2, 14, width)
    predict(tf.zeros(shape, tf.float64))
    variables = [v for layer in (attention, *parts) for v in layer.trainable_variables]
    return _Descent(function, scope, predict, variables, shape)


@pytest.mark.parametrize("heads", one_of(2, [4, 2]))
def test_attention_of_keras(ranks: Callable[..., None], double: None, heads: int) -> None:
    expected = train(_keras(tf.function, contextlib.nullcontext, heads))
    ranks(4)
    model = _keras(wh.function, SCOPE, heads)
    assert worst(train(model), expected) <= LIMIT
    plan = model.step.plan(*model.batch(0))
    assert any(r.source == r.target for r in plan.reshards) == (heads == 2)
    assert not whole_activations(plan, 8 * int(np.prod(model.shape)))


def test_a_softmax_over_keys_that_are_split(ranks: Callable[..., None]) -> None:
    """The plain form: keys and values that are weights lie split, and maxima and sums go over the ranks."""

    def memory(function: Any, scope: Any) -> _Descent:
        draw = np.random.default_rng(2)
        keys, values = (tf.Variable(draw.normal(size=(2000, 6)), name=n) for n in ("keys", "values"))

        def predict(x: tf.Tensor) -> tf.Tensor:
            return tf.matmul(tf.nn.softmax(tf.matmul(x, keys, transpose_b=True)), values)

        return _Descent(function, scope, predict, [keys, values], (3, 6))

    expected = train(memory(tf.function, contextlib.nullcontext))
    ranks(4)
    model = memory(wh.function, wh.split)
    assert worst(train(model), expected) <= LIMIT
    plan = model.step.plan(*model.batch(0))
    assert P_MAX in [r.source for r in plan.reshards] and len(plan.variables) == 2


def test_mistakes_name_what_to_do(ranks: Callable[..., None]) -> None:
    ranks(2)
    with pytest.raises(PlanError, match=r"context=2(.|\n)*0 for \[sequence, batch, features\]"), wh.split(context=2):
        pass
    with pytest.raises(PlanError, match="cannot divide anything else"), wh.split(context=1, dim=-1):
        pass
    weight = tf.Variable(np.ones((4, 6)))

    @wh.function
    def flat(x: tf.Tensor) -> tf.Tensor:
        with wh.split(context=1):
            return tf.nn.relu(tf.matmul(x, weight))

    with pytest.raises(PlanError, match=r"cannot be divided along their sequence(.|\n)*MatMul \[4, 6\]"):
        flat(np.ones((4, 4)))


def test_what_else_reads_the_shares_is_no_attention(ranks: Callable[..., None]) -> None:
    """Shares that are returned, and a gradient for a bias of the scores, stay as they are written."""
    from whale.capture.function import capture_function

    def found(body: Callable[..., Any]) -> int:
        t = tf.TensorSpec((1, 2, 8, 4), tf.float64)
        return len(attentions(capture_function(body, (t, t, t), {}).program))

    def shares(q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        return tf.nn.softmax(tf.matmul(q, k, transpose_b=True))

    def returned(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> Any:
        found = shares(q, k)
        return tf.matmul(found, v), found

    assert found(lambda q, k, v: tf.matmul(shares(q, k), v)) == 1
    assert found(returned) == 0
    assert found(lambda q, k, v: tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True), 2), v)) == 0


def test_what_waits_for_a_result_waits_for_the_one_operation(ranks: Callable[..., None]) -> None:
    from whale.capture.function import capture_function

    def body(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> Any:
        mixed = tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v)
        with tf.control_dependencies([mixed]):
            return mixed, tf.negative(q)

    t = tf.TensorSpec((1, 2, 8, 4), tf.float64)
    program = capture_function(body, (t, t, t), {}).program
    (name,) = (one.name for one in attentions(program))
    waits = [n.controls for n in in_rings(program, [name]).nodes if n.op == "Neg"]
    assert waits == [(f"{name}/attention",)]
