"""Batch statistics and random streams of each rank's own rows: against the same arithmetic written out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh

ROWS, FEATURES, CHANNELS, RATE, MOMENTUM, EPSILON = 8, 6, 4, 0.1, 0.9, 1e-3
SHARES = [(4, 4), (5, 3), (0, 8), (5, 3, 0)]


def batches(dtype: str, steps: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(5)
    return [
        (draw.normal(size=(ROWS, 2, 3, FEATURES)).astype(dtype), draw.normal(size=(ROWS, 2, 3, CHANNELS)).astype(dtype))
        for _ in range(steps)
    ]


class Model:
    """A product, batch normalisation over rows and places, a squared error."""

    def __init__(self, dtype: str):
        draw = np.random.default_rng(3)
        self.weight = tf.Variable(draw.normal(size=(FEATURES, CHANNELS)).astype(dtype), name="weight")
        self.gamma = tf.Variable(draw.normal(size=CHANNELS).astype(dtype), name="gamma")
        self.beta = tf.Variable(draw.normal(size=CHANNELS).astype(dtype), name="beta")
        self.mean = tf.Variable(np.zeros(CHANNELS, dtype), name="mean", trainable=False)
        self.variance = tf.Variable(np.ones(CHANNELS, dtype), name="variance", trainable=False)

    @property
    def variables(self) -> list[tf.Variable]:
        return [self.weight, self.gamma, self.beta, self.mean, self.variance]

    def update(self, tape: tf.GradientTape, loss: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> None:
        for old, new in ((self.mean, mean), (self.variance, variance)):
            old.assign(old * MOMENTUM + new * (1 - MOMENTUM))
        for v, g in zip(self.variables[:3], tape.gradient(loss, self.variables[:3])):
            v.assign_sub(RATE * g)


Normalise = Callable[[Model, tf.Tensor], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]


def simple(model: Model, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return tf.nn.batch_normalization(x, mean, variance, model.beta, model.gamma, EPSILON), mean, variance


def by_hand(model: Model, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    mean = tf.reduce_mean(x, [0, 1, 2], keepdims=True)
    variance = tf.reduce_mean(tf.square(x - mean), [0, 1, 2], keepdims=True)
    y = (x - mean) / tf.sqrt(variance + EPSILON) * model.gamma + model.beta
    return y, tf.reshape(mean, [-1]), tf.reshape(variance, [-1])


def fused(model: Model, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    return tf.compat.v1.nn.fused_batch_norm(x, model.gamma, model.beta, epsilon=EPSILON)


def train(model: Model, normalise: Normalise, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        out, mean, variance = normalise(model, tf.tensordot(x, model.weight, 1))
        loss = tf.reduce_mean(tf.math.squared_difference(out, y))
    model.update(tape, loss, mean, variance)
    return loss


def expected(dtype: str, normalise: Normalise, shares: Sequence[int]) -> tuple[list[float], list[np.ndarray]]:
    """The same steps on one device, the batch cut in parts that are normalised apart."""
    model, losses = Model(dtype), []
    rows = [n for n in shares if n]
    for x, y in batches(dtype):
        with tf.GradientTape() as tape:
            parts = [normalise(model, tf.tensordot(part, model.weight, 1)) for part in tf.split(x, rows)]
            out = tf.concat([p[0] for p in parts], 0)
            loss = tf.reduce_mean(tf.math.squared_difference(out, y))
        mean, variance = (sum(p[i] * tf.cast(n / ROWS, dtype) for p, n in zip(parts, rows)) for i in (1, 2))
        model.update(tape, loss, mean, variance)
        losses.append(float(loss))
    return losses, [v.numpy() for v in model.variables]


@pytest.mark.core
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize(
    ("normalise", "dtype", "limit"),
    [(simple, "float64", 1e-12), (by_hand, "float64", 1e-12), (fused, "float32", 1e-4)],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_each_rank_normalises_its_own_rows(
    ranks: Any, normalise: Normalise, dtype: str, limit: float, shares: tuple[int, ...]
) -> None:
    losses, values = expected(dtype, normalise, shares)
    ranks(len(shares), **{"batch.shares": list(shares)})
    model = Model(dtype)
    step = wh.function(lambda x, y: train(model, normalise, x, y))
    got = [float(step(*map(tf.constant, batch))) for batch in batches(dtype)]
    np.testing.assert_allclose(got, losses, rtol=limit)
    for v, value in zip(model.variables, values):
        np.testing.assert_allclose(v.numpy(), value, rtol=limit, atol=limit, err_msg=v.name)
    wh.check_replicas()
    plan = step.plan(*map(tf.constant, batches(dtype)[0]))
    assert "statistics of each rank's own rows in 1 norm" in plan.exceptions[0]
    # Nothing is sent but gradients, running averages and the loss.
    sent = FEATURES * CHANNELS + 4 * CHANNELS + 1
    assert plan.logical_bytes == 2 * (len(shares) - 1) * sent * np.dtype(dtype).itemsize


@tf.custom_gradient
def centered(x: tf.Tensor) -> Any:
    """Rows without their moments, with a gradient that is written by hand: implicit broadcasting, no Tile."""
    mean = tf.reduce_mean(x, [0, 1, 2])
    variance = tf.reduce_mean(tf.math.squared_difference(x, mean), [0, 1, 2])
    r = tf.math.rsqrt(variance + EPSILON)
    y = (x - mean) * r

    def gradient(dy: tf.Tensor) -> tf.Tensor:
        return r * (dy - tf.reduce_mean(dy, [0, 1, 2]) - y * tf.reduce_mean(dy * y, [0, 1, 2]))

    return y, gradient


def by_custom_gradient(model: Model, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    mean, variance = tf.nn.moments(tf.stop_gradient(x), [0, 1, 2])
    return centered(x) * model.gamma + model.beta, mean, variance


def test_moments_whose_gradient_has_another_form_stay_whole(ranks: Any) -> None:
    losses, values = expected("float64", by_custom_gradient, (ROWS,))
    ranks(2, **{"batch.shares": [5, 3]})
    model = Model("float64")
    step = wh.function(lambda x, y: train(model, by_custom_gradient, x, y))
    got = [float(step(*map(tf.constant, batch))) for batch in batches("float64")]
    np.testing.assert_allclose(got, losses, rtol=1e-12)
    np.testing.assert_allclose(model.weight.numpy(), values[0], rtol=1e-12)


def test_the_whole_batch_when_asked(ranks: Any) -> None:
    losses, values = expected("float64", simple, (ROWS,))
    ranks(2, **{"batch.shares": [5, 3], "batch.norm_statistics": "batch"})
    model = Model("float64")
    step = wh.function(lambda x, y: train(model, simple, x, y))
    got = [float(step(*map(tf.constant, batch))) for batch in batches("float64")]
    np.testing.assert_allclose(got, losses, rtol=1e-12)
    for v, value in zip(model.variables, values):
        np.testing.assert_allclose(v.numpy(), value, rtol=1e-12, atol=1e-12, err_msg=v.name)


def stateless(x: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_uniform(tf.shape(x), [7, 11], dtype=x.dtype)


def seeded(x: tf.Tensor) -> tf.Tensor:
    return tf.random.uniform(tf.shape(x), seed=11, dtype=x.dtype)


def unseeded(x: tf.Tensor) -> tf.Tensor:
    return tf.random.normal(tf.shape(x), dtype=x.dtype)


def from_generator(x: tf.Tensor) -> tf.Tensor:
    return GENERATOR[0].uniform(tf.shape(x), dtype=x.dtype)


GENERATOR: list[tf.random.Generator] = []


def drawn(draw: Callable[[tf.Tensor], tf.Tensor], start: Any, shares: Sequence[int], mode: str) -> np.ndarray:
    """Two steps of noise added to zeros: [2, rows, 5]."""
    tf.random.set_seed(4)
    GENERATOR[:] = [tf.random.Generator.from_seed(6)]
    start(len(shares), **{"batch.shares": list(shares), "batch.random": mode})
    step = wh.function(lambda x: draw(x) + tf.reduce_sum(x))
    result = np.stack([step(tf.zeros([ROWS, 5])).numpy() for _ in range(2)])
    plan = step.plan(tf.zeros([ROWS, 5]))
    assert bool(plan.exceptions) == (mode == "local"), plan.exceptions
    wh.shutdown()
    return result


def of_other_ops(x: tf.Tensor) -> tf.Tensor:
    """Each of these ops has a rule of its own; a seed that did not reach one would make its ranks alike."""
    shape, seed = tf.shape(x), [3, 5]
    drawn_by = (
        tf.random.stateless_normal(shape, seed),
        tf.random.stateless_truncated_normal(shape, seed),
        tf.cast(tf.random.stateless_uniform(shape, seed, 0, 1 << 20, tf.int32), x.dtype),
        tf.cast(tf.random.stateless_uniform(shape, seed, None, None, tf.int32), x.dtype),
        tf.random.normal(shape, seed=2),
        tf.random.truncated_normal(shape, seed=2),
        tf.cast(tf.random.uniform(shape, 0, 1 << 20, tf.int32, seed=2), x.dtype),
    )
    return tf.concat(drawn_by, 1)


@pytest.mark.parametrize("draw", [stateless, seeded, from_generator, of_other_ops], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shares", [(4, 4), (5, 3, 0)], ids=str)
def test_ranks_draw_from_streams_of_their_own(ranks: Any, draw: Any, shares: tuple[int, ...]) -> None:
    first, again = drawn(draw, ranks, shares, "local"), drawn(draw, ranks, shares, "local")
    np.testing.assert_array_equal(first, again)  # of one seed and one plan
    ends = np.cumsum(shares)
    mine, other = first[:, : ends[0]], first[:, ends[0] : ends[1]]
    count = other.shape[1]
    assert not np.any(mine[:, :count] == other)
    one = drawn(draw, ranks, (ROWS,), "global")
    whole = drawn(draw, ranks, shares, "global")
    np.testing.assert_array_equal(whole, one)
    assert np.any(first != one)


@pytest.mark.parametrize("draw", [stateless, seeded, from_generator, of_other_ops], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (3, 2, 3, 2)], ids=str)
def test_micro_batches_draw_from_streams_of_their_own(ranks: Any, draw: Any, sizes: tuple[int, ...]) -> None:
    """No two parts of the batch are alike: neither two of one rank, nor one's second and the next one's first."""
    tf.random.set_seed(4)
    GENERATOR[:] = [tf.random.Generator.from_seed(6)]
    ranks(2, **{"batch.random": "local", "pipeline.micro_batches": 2})
    weight = tf.Variable(1.0)

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            noise = draw(x) + 0.0 * x[:, :1]
            loss = tf.reduce_mean(weight * noise)
        weight.assign_sub(0.0 * tape.gradient(loss, weight))
        return noise

    x = tf.zeros([sum(sizes), 5])
    parts = np.split(step(x).numpy(), np.cumsum(sizes)[:-1])
    assert step.plan(x).micro_batches == 2
    for one, other in itertools.combinations(parts, 2):
        count = min(len(one), len(other))
        assert not np.any(one[:count] == other[:count])


def test_without_a_seed_rows_differ_too(ranks: Any) -> None:
    values = drawn(unseeded, ranks, (4, 4), "local")
    assert len(np.unique(values)) == values.size


def dropped_and_normalised(rate: float | None) -> list[np.ndarray]:
    """Weights after two steps of normalised rows, dropout unless ``rate`` is None, and a classifier in parts."""
    draw = np.random.default_rng(7)
    scale, shift = (tf.Variable(np.full(FEATURES, value)) for value in (1.5, 0.2))
    weight = tf.Variable(draw.normal(size=(FEATURES, 9)))

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with wh.replica():
                mean, variance = tf.nn.moments(x, [0])
                h = tf.nn.batch_normalization(x, mean, variance, shift, scale, EPSILON)
                h = h if rate is None else tf.nn.experimental.stateless_dropout(h, rate, [1, 2])
            with wh.split():
                loss = tf.reduce_mean(tf.square(tf.nn.log_softmax(h @ weight)))
        for v, g in zip((scale, shift, weight), tape.gradient(loss, (scale, shift, weight))):
            v.assign_sub(RATE * g)
        return loss

    for _ in range(2):
        step(draw.normal(size=(ROWS, FEATURES)))
    return [v.numpy() for v in (scale, shift, weight)]


def test_gradients_of_dropout_reach_a_rank_s_own_statistics(ranks: Callable[..., None]) -> None:
    ranks(3)
    nothing_dropped, without = dropped_and_normalised(1e-12), dropped_and_normalised(None)
    for a, b in zip(nothing_dropped, without):
        np.testing.assert_allclose(a, b, rtol=1e-9)
