"""The program that is spread: eight layers, of which features put loops, branches and attention into some."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from tests.combinations.giant import OF_GIANT, Giant

ROWS, WIDTH, STEPS, RATE, MOMENTUM = 32, 8, 2, 0.5, 0.5  # numbers that float32 has as well
LAYERS, TIME = 8, 3
# What changes the program itself, and not only how it is spread.
OF_PROGRAM = OF_GIANT | set("loop lstm scan branch attention heads accumulated uneven session twice".split())
Scopes = Callable[[int], Any]


class Net(tf.Module):
    """Eight layers; a loop, a branch or an attention in place of some of them."""

    def __init__(self, marks: frozenset[str], dtype: str) -> None:
        draw = np.random.default_rng(3)
        self.marks, self.dtype = marks, dtype

        def variable(name: str, *shape: int) -> tf.Variable:
            return tf.Variable(draw.normal(size=shape) * 0.4, dtype=dtype, name=name)

        self.weights = [variable(f"w{i}", WIDTH, WIDTH) for i in range(LAYERS)]
        if "lstm" in marks:
            self.gates = [variable("input_gates", WIDTH, 4 * WIDTH), variable("state_gates", WIDTH, 4 * WIDTH)]
            self.weights += self.gates
        self.giant = Giant(marks, dtype, WIDTH, draw)
        self.weights += self.giant.weights
        self.slots = [tf.Variable(tf.zeros_like(w), trainable=False, name=f"m_{w.name[:-2]}") for w in self.weights]
        if "accumulated" in marks:
            zeros = [tf.zeros_like(w) for w in self.weights]
            self.sums = [tf.Variable(z, trainable=False, name=f"s_{w.name[:-2]}") for z, w in zip(zeros, self.weights)]
            self.count = tf.Variable(0, dtype=tf.int64, trainable=False, name="count")

    def layer(self, i: int, h: tf.Tensor) -> tf.Tensor:
        w = self.weights[i]
        if "loop" in self.marks and i == 1:
            turn = lambda n, s: (n + 1, tf.tanh(s @ w))  # noqa: E731
            return tf.while_loop(lambda n, s: n < 2, turn, (0, h))[1]
        if "lstm" in self.marks and i == 2:
            return self.lstm(tf.tanh(h @ w))
        if "scan" in self.marks and i == 6:
            steps = tf.stack([h * (1.0 / (t + 1)) for t in range(TIME)])
            return tf.scan(lambda state, x: tf.tanh(state @ w + x), steps, tf.zeros_like(h))[-1]
        if "branch" in self.marks and i == 3:
            return tf.cond(tf.reduce_sum(w) > 100.0, lambda: tf.nn.relu(h @ w), lambda: tf.tanh(h @ w))
        if "heads" in self.marks and i == 5:
            q, k = (tf.transpose(tf.reshape(t, (-1, t.shape[1], 2, WIDTH // 2)), (0, 2, 1, 3)) for t in (h @ w, h))
            mixed = tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), k)
            return h + tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (-1, *h.shape[1:]))
        if "attention" in self.marks and i == 5:
            scores = tf.nn.softmax(tf.matmul(h @ w, h, transpose_b=True))
            return h + tf.matmul(scores, h)
        return tf.tanh(h @ w)

    def lstm(self, x: tf.Tensor) -> tf.Tensor:
        """Three turns of a cell whose weights are read in the loop; the four gates next to each other."""
        of_input, of_state = self.gates

        def turn(n: tf.Tensor, h: tf.Tensor, c: tf.Tensor) -> tuple[tf.Tensor, ...]:
            i, f, g, o = tf.split(x @ of_input + h @ of_state, 4, axis=-1)
            c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
            return n + 1, tf.sigmoid(o) * tf.tanh(c), c

        return tf.while_loop(lambda n, h, c: n < TIME, turn, (0, tf.zeros_like(x), tf.zeros_like(x)))[1]

    @property
    def kept(self) -> list[tf.Variable]:
        """What is compared: weights, and tables with what their optimizer has of them."""
        return [*self.weights, *self.giant.tables, *self.giant.state]

    def loss(self, x: tf.Tensor, y: tf.Tensor, scope: Scopes) -> tf.Tensor:
        h, loss = x, None
        for stage, layers in stages_of(self.marks):
            with stage():
                if layers[0] == 0:
                    h = self.giant.before(h)
                for i in layers:
                    with scope(i):
                        h = self.layer(i, h)
                    h = self.giant.after(i, h)
                    if "checkpoint" in self.marks and i % 2 and i < LAYERS - 1:
                        h = wh.checkpoint(h)
                if layers[-1] == LAYERS - 1:
                    loss = self.giant.loss(h, y)
        return loss

    def update(self, x: tf.Tensor, y: tf.Tensor, scope: Scopes) -> tf.Tensor:
        """One step of the program: an update, or two, the second of which reads the weights that the first has left."""
        loss = self.update_once(x, y, scope)
        return loss + self.update_once(x, y, scope) if "twice" in self.marks else loss

    def update_once(self, x: tf.Tensor, y: tf.Tensor, scope: Scopes) -> tf.Tensor:
        """Gradient descent with momentum; by sums over two batches, where these are accumulated."""
        with tf.GradientTape() as tape:
            loss = self.loss(x, y, scope)
        slopes, of_tables = tape.gradient(loss, (self.weights, self.giant.tables))
        self.giant.descend(of_tables)
        if "accumulated" not in self.marks:
            self.descend(slopes)
            return loss
        for total, slope in zip(self.sums, slopes):
            total.assign_add(slope)
        tf.cond(self.count.assign_add(1) % 2 == 0, self.descend_by_sums, lambda: None)
        return loss

    def descend(self, slopes: list[tf.Tensor]) -> None:
        for w, m, slope in zip(self.weights, self.slots, slopes):
            m.assign(MOMENTUM * m + slope)
            w.assign_sub(RATE * m)

    def trained_by(self, loss: tf.Tensor) -> tf.Operation:
        """What ``update`` does, in a graph of TensorFlow 1."""
        slopes = tf.gradients(loss, [*self.weights, *self.giant.tables])
        return tf.group(self.dense_by(slopes[: len(self.weights)]), self.giant.trained_by(slopes[len(self.weights) :]))

    def dense_by(self, slopes: list[tf.Tensor]) -> tf.Operation:
        if "accumulated" not in self.marks:
            optimizer = tf.compat.v1.train.MomentumOptimizer(RATE, MOMENTUM)
            return optimizer.apply_gradients(zip(slopes, self.weights))
        adds = [total.assign_add(slope, read_value=False) for total, slope in zip(self.sums, slopes)]
        with tf.control_dependencies([op.op if isinstance(op, tf.Tensor) else op for op in adds]):
            full = tf.equal(self.count.assign_add(1).read_value() % 2, 0)

        def descend() -> tf.Tensor:
            moved = []
            for w, m, total in zip(self.weights, self.slots, self.sums):
                m_next = MOMENTUM * m + 0.5 * total
                with tf.control_dependencies([m_next]):
                    moved += [m.assign(m_next).op, w.assign_sub(RATE * m_next).op, total.assign(total * 0.0).op]
            with tf.control_dependencies(moved):
                return tf.constant(True)

        return tf.cond(full, descend, lambda: tf.constant(False)).op

    def descend_by_sums(self) -> None:
        self.descend([0.5 * total for total in self.sums])
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def rows_of(marks: frozenset[str]) -> int:
    """Rows of a batch."""
    return 7 if "uneven" in marks else ROWS


def batches(marks: frozenset[str], dtype: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(x, y) of each step."""
    draw = np.random.default_rng(5)
    shape = (rows_of(marks), *((4, WIDTH) if "attention" in marks else (WIDTH,)))
    return [(draw.normal(size=shape).astype(dtype), draw.normal(size=shape).astype(dtype)) for _ in range(STEPS)]


def stages_of(marks: frozenset[str]) -> list[tuple[Callable[[], Any], list[int]]]:
    """(scope, layers) of each stage; all layers in none where there are no stages."""
    if "stages" not in marks:
        return [(contextlib.nullcontext, list(range(LAYERS)))]
    devices = [(0, 1, 2, 3), (4, 5), (6, 7)] if "unequal" in marks else []
    count = len(devices) or (4 if marks & {"chunks", "four"} else 2)
    parts = [list(map(int, part)) for part in np.array_split(np.arange(LAYERS), count)]
    return [(partial(wh.stage, devices=devices[k]) if devices else wh.stage, part) for k, part in enumerate(parts)]


def scopes_of(marks: frozenset[str]) -> Scopes:
    """The split scope of each layer, if any."""

    @contextlib.contextmanager
    def scope(i: int) -> Any:
        with contextlib.ExitStack() as stack:
            if "context" in marks:
                stack.enter_context(wh.split(context=1))
            if ("tensor" in marks and i in (0, 2, 4, 6)) or ("lstm" in marks and i == 2):
                stack.enter_context(wh.split())
            if "sequence" in marks and 4 <= i <= 6:
                stack.enter_context(wh.split(sequence=1))
            if "expert" in marks and i == 7:
                stack.enter_context(wh.split(axis="expert"))
            if "devices" in marks and i == 0 and "tensor" not in marks:
                ranks = [1] if "four" in marks else [0, 1]  # some of its stage
                stack.enter_context(wh.split(devices=ranks))
            yield

    return scope
