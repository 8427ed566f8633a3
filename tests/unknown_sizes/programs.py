"""Draws training programs whose rows are masked, counted, repeated and regrouped, so that only the run knows how many
there are.

A program is a chain of blocks, each of which takes and returns a tensor of [rows, WIDTH]. How many rows it cuts off,
repeats or appends depends on how many different ids a batch has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

WIDTH, IDS, CLASSES = 4, 9, 7
Batch = Mapping[str, Any]
Weights = Sequence[tf.Variable]
Block = Callable[[tf.Tensor, Weights, tf.Tensor, tf.Tensor], tf.Tensor]
"""Takes rows, all weights, a small number that the batch decides (1 to 3), and its ids [batch, 2]; returns rows."""


class Draw:
    """Draws numbers, and the first values of weights, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.generator = random.Random(seed), np.random.default_rng(seed)
        self.values: list[np.ndarray] = []

    def weight(self, *shape: int) -> int:
        """Draws the first value of one more weight, and returns its number."""
        self.values.append(0.5 * self.generator.standard_normal(shape))
        return len(self.values) - 1

    def choose(self, *choices: Any) -> Any:
        return self.random.choice(choices)


def count(h: tf.Tensor) -> tf.Tensor:
    """Returns the number of rows."""
    return tf.shape(h)[0]


def _sized(rows: tf.Tensor, columns: int = WIDTH) -> tf.Tensor:
    return tf.stack([rows, columns])


def dense(draw: Draw) -> Block:
    i, j, activate = draw.weight(WIDTH, WIDTH), draw.weight(WIDTH), draw.choose(tf.tanh, tf.nn.relu, tf.sigmoid)
    return lambda h, w, n, ids: activate(h @ w[i] + w[j])


def widen(draw: Draw) -> Block:
    hidden = draw.choose(3, 6, 8)
    i, j, activate = draw.weight(WIDTH, hidden), draw.weight(hidden, WIDTH), draw.choose(tf.tanh, tf.nn.softmax)
    return lambda h, w, n, ids: activate(h @ w[i]) @ w[j]


def mask(draw: Draw) -> Block:
    every = draw.choose(2, 3)
    return lambda h, w, n, ids: tf.boolean_mask(
        h, tf.not_equal(tf.math.floormod(tf.range(count(h)) + n, every), 0) | (count(h) < 2)
    )


def cut(draw: Draw) -> Block:
    def some(h: tf.Tensor, n: tf.Tensor) -> tf.Tensor:
        return tf.minimum(n, count(h))

    return draw.choose(
        lambda h, w, n, ids: h[: some(h, n)],
        lambda h, w, n, ids: tf.slice(h, [0, 0], _sized(some(h, n), -1)),
        lambda h, w, n, ids: tf.slice(h, _sized(count(h) - some(h, n), 0), _sized(some(h, n))),
        lambda h, w, n, ids: h[-some(h, n) :],
        lambda h, w, n, ids: h[::2],
        lambda h, w, n, ids: tf.strided_slice(h, [0, 0], _sized(some(h, n)), [1, 1]),
    )


def columns(draw: Draw) -> Block:
    def halves(h: tf.Tensor, w: Weights, n: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        a, b = tf.split(h, 2, axis=1)
        return tf.concat([a * b, a + b], 1)

    return draw.choose(
        halves,
        lambda h, w, n, ids: tf.concat([h[:, 2:], h[:, :2]], 1),
        lambda h, w, n, ids: tf.stack(tf.unstack(h, WIDTH, axis=1)[::-1], axis=1),
        lambda h, w, n, ids: tf.reverse(h, [1]),
        lambda h, w, n, ids: tf.roll(h, 1, 1) - tf.roll(h, n, 0),
        lambda h, w, n, ids: tf.gather(h, [3, 1, 1, 0], axis=1),
    )


def repeat(draw: Draw) -> Block:
    return draw.choose(
        lambda h, w, n, ids: tf.repeat(h, tf.range(count(h)) % 2 + 1, axis=0),
        lambda h, w, n, ids: tf.tile(h, _sized(tf.minimum(n, 2), 1)),
        lambda h, w, n, ids: tf.gather(h, tf.math.floormod(tf.range(count(h) + n), count(h))),
    )


def pad(draw: Draw) -> Block:
    return draw.choose(
        lambda h, w, n, ids: tf.pad(h, tf.convert_to_tensor([[0, n], [0, 0]])),
        lambda h, w, n, ids: tf.concat([h, tf.zeros(_sized(n), h.dtype)], 0),
        lambda h, w, n, ids: tf.concat([h, tf.ones_like(h[:1])], 0),
    )


def reshape(draw: Draw) -> Block:
    def scaled(h: tf.Tensor, w: Weights, n: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        return tf.transpose(tf.transpose(h) * tf.range(1.0, 1.0 + tf.cast(count(h), h.dtype), dtype=h.dtype)) / 4

    return draw.choose(
        scaled,
        lambda h, w, n, ids: tf.reshape(tf.cumsum(tf.reshape(h, [-1, 2]), 0), [-1, WIDTH]),
        lambda h, w, n, ids: tf.reshape(
            tf.transpose(tf.reshape(h, tf.stack([count(h), 2, 2])), [0, 2, 1]), _sized(count(h))
        ),
        lambda h, w, n, ids: tf.reshape(tf.reshape(tf.transpose(h), [-1]), tf.shape(h)),
    )


def mix(draw: Draw) -> Block:
    i = draw.weight(WIDTH, WIDTH)
    return draw.choose(
        lambda h, w, n, ids: h @ (tf.matmul(h, h, transpose_a=True) / tf.cast(count(h), h.dtype)) * 0.2,
        lambda h, w, n, ids: tf.nn.softmax(h @ w[i] @ tf.transpose(h)) @ h,
        lambda h, w, n, ids: tf.einsum("nd,md,me->ne", h, h @ w[i], h) * 0.05,
        lambda h, w, n, ids: h - tf.reduce_mean(h, 0, keepdims=True),
        lambda h, w, n, ids: h / (1.0 + tf.norm(h, axis=1, keepdims=True)) + tf.reduce_max(h, 0),
        lambda h, w, n, ids: tf.nn.softmax(h, axis=0) + tf.nn.log_softmax(h @ w[i]),
    )


def segments(draw: Draw) -> Block:
    def pairs(h: tf.Tensor) -> tf.Tensor:
        return tf.range(count(h)) // 2

    def groups(h: tf.Tensor) -> tf.Tensor:
        return tf.reduce_max(pairs(h)) + 1

    return draw.choose(
        lambda h, w, n, ids: tf.math.segment_mean(h, pairs(h)),
        lambda h, w, n, ids: tf.math.unsorted_segment_sum(h, pairs(h) % 3, tf.minimum(groups(h), 3)),
        lambda h, w, n, ids: tf.math.unsorted_segment_max(h, pairs(h), groups(h)),
        lambda h, w, n, ids: tf.scatter_nd(pairs(h)[:, None], h, _sized(groups(h))),
        lambda h, w, n, ids: tf.tensor_scatter_nd_add(h, [[0], [0]], tf.concat([h[:1], h[-1:]], 0)),
        lambda h, w, n, ids: tf.gather_nd(h, (count(h) - 1 - tf.range(count(h)))[:, None]),
    )


def look_up(draw: Draw) -> Block:
    i = draw.weight(IDS, WIDTH)

    def rows_of(w: Weights, ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(w[i], tf.unique(tf.reshape(ids, [-1]))[0])

    return draw.choose(
        lambda h, w, n, ids: tf.concat([h, rows_of(w, ids)], 0),
        lambda h, w, n, ids: h + tf.gather(w[i], tf.math.floormod(tf.range(count(h)), IDS)),
        lambda h, w, n, ids: tf.concat([tf.gather(rows_of(w, ids), tf.unique(tf.reshape(ids, [-1]))[1]), h], 0),
        lambda h, w, n, ids: h @ tf.matmul(rows_of(w, ids), rows_of(w, ids), transpose_a=True) * 0.1,
    )


def convolve(draw: Draw) -> Block:
    i, stride, padding = (
        draw.weight(draw.choose(1, 2, 3), WIDTH, WIDTH),
        draw.choose(1, 2),
        draw.choose("SAME", "VALID"),
    )

    def longer(h: tf.Tensor) -> tf.Tensor:
        return tf.concat([h, h[:1], h[:1]], 0)[None]

    return draw.choose(
        lambda h, w, n, ids: tf.nn.conv1d(longer(h), w[i], stride, padding)[0],
        lambda h, w, n, ids: tf.nn.max_pool1d(longer(h), 2, 1, "SAME")[0] + tf.nn.conv1d(longer(h), w[i], 1, "SAME")[0],
    )


def order(draw: Draw) -> Block:
    return draw.choose(
        lambda h, w, n, ids: tf.sort(h, axis=0),
        lambda h, w, n, ids: tf.gather(h, tf.argsort(h[:, 0])),
        lambda h, w, n, ids: tf.transpose(tf.math.top_k(tf.transpose(h), k=tf.minimum(count(h), 3)).values),
        lambda h, w, n, ids: tf.cumsum(h, axis=0, reverse=True) * 0.3,
    )


def loop(draw: Draw) -> Block:
    i = draw.weight(WIDTH, WIDTH)
    return draw.choose(
        lambda h, w, n, ids: tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w[i], row)), h),
        lambda h, w, n, ids: tf.scan(lambda state, row: 0.5 * state + tf.tanh(row), h),
        lambda h, w, n, ids: tf.while_loop(lambda k, g: k < n, lambda k, g: (k + 1, tf.tanh(g @ w[i])), (0, h))[1],
        lambda h, w, n, ids: tf.cond(count(h) > 4, lambda: h @ w[i], lambda: tf.sin(h)),
    )


def spread(draw: Draw) -> Block:
    return draw.choose(
        lambda h, w, n, ids: tf.broadcast_to(tf.reduce_mean(h, 0), tf.shape(h)) + h,
        lambda h, w, n, ids: tf.linalg.band_part(tf.ones(tf.stack([count(h), count(h)]), h.dtype), -1, 0) @ h * 0.1,
        lambda h, w, n, ids: h * tf.one_hot(n % WIDTH, WIDTH, dtype=h.dtype) + tf.fill(tf.shape(h), 0.1 + 0 * h[0, 0]),
        lambda h, w, n, ids: tf.where(h > 0, h, 0.1 * h) * tf.cast(count(h), h.dtype) / 8,
    )


BLOCKS: Sequence[Callable[[Draw], Block]] = (
    *(dense, dense, widen, mask, mask, cut, cut, columns, repeat, pad, reshape, mix),
    *(segments, look_up, convolve, order, loop, spread),
)
LOSSES: Mapping[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "cross entropy": lambda z: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.math.floormod(tf.range(count(z)), CLASSES), z)
    ),
    "squares": lambda z: tf.reduce_sum(z**2) / 40,
    "means": lambda z: tf.reduce_mean(tf.tanh(z)) + tf.reduce_mean(z**2) / 4,
    "log of sums": lambda z: tf.reduce_mean(tf.reduce_logsumexp(z, -1)),
}


@dataclass(frozen=True)
class Drawn:
    """A program: ``train(function, scope)`` trains a step made by ``function``, some blocks of which are in a
    ``scope``; it returns the losses and numbers of rows of all steps, and the weights at last.
    """

    blocks: tuple[str, ...]
    sizes: tuple[int, ...]
    loss: str
    train: Callable[[Callable[..., Any], Callable[[], AbstractContextManager[Any]]], list[np.ndarray]]


def draw_program(number: int) -> Drawn:
    """Draws the program of that number; of its batches one may have a single row."""
    draw = Draw(number)
    makers = [draw.choose(*BLOCKS) for _ in range(draw.random.randint(2, 6))]
    blocks = [(make(draw), draw.random.random() < 0.6) for make in makers]
    table, head = draw.weight(IDS, WIDTH), draw.weight(WIDTH, CLASSES)
    sizes = (6, draw.choose(6, 7, 1, 5), draw.choose(6, 7, 1, 5))
    batches = [(draw.generator.standard_normal((s, WIDTH)), draw.generator.integers(0, IDS, (s, 2))) for s in sizes]
    masked, loss = draw.random.random() < 0.7, draw.choose(*LOSSES)

    def train(function: Callable[..., Any], scope: Callable[[], AbstractContextManager[Any]]) -> list[np.ndarray]:
        weights = [tf.Variable(value) for value in draw.values]

        @function
        def step(x: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            n = tf.minimum(tf.size(tf.unique(tf.reshape(ids, [-1]))[0]), 3)
            with tf.GradientTape() as tape:
                h = x + tf.reduce_sum(tf.gather(weights[table], ids), 1)
                if masked:
                    h = tf.boolean_mask(h, tf.reduce_any(ids >= 0, 1))
                for block, scoped in blocks:
                    with scope() if scoped else nullcontext():
                        h = block(h, weights, n, ids)
                with scope():
                    value = LOSSES[loss](h @ weights[head])
            for weight, slope in zip(weights, tape.gradient(value, weights)):
                if slope is not None:
                    weight.assign_sub(0.05 * tf.clip_by_value(tf.convert_to_tensor(slope), -1, 1))
            return value, count(h)

        found = [part.numpy() for batch in (*batches, batches[0]) for part in step(*map(tf.constant, batch))]
        return [*found, *(tf.convert_to_tensor(weight).numpy() for weight in weights)]

    return Drawn(tuple(make.__name__ for make in makers), sizes, loss, train)
