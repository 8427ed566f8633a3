"""Giant layers in the program: tables of embeddings before its layers, experts after the fifth, classes at its end.

They enter their scopes themselves, as ``wh.layers`` do; the marks are "experts", "none dropped", "table", "growing",
"hot", "classes" and "sampled classes".
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from whale.frontends.layers.vocabulary import find_tensor
from whale.runtime.context import find_running

OF_GIANT = frozenset({"experts", "none dropped", "table", "growing", "hot", "classes", "sampled classes"})
BEHIND = 4  # the layer that experts follow
EXPERTS, WORDS, EACH, CLASSES, BLOCKS, RATE = 4, 50, 3, 16, 8, 0.5
HOT = (2, 3, 5, 7, 11)
IN_A_BLOCK = 40  # more than a batch has rows, so that some classes are left out


class Giant(tf.Module):
    """The giant layers that the marks ask for, of a program of this width."""

    def __init__(self, marks: frozenset[str], dtype: str, width: int, draw: np.random.Generator) -> None:
        self.marks, self.dtype, self.width = marks, dtype, width
        self.weights: list[tf.Variable] = []  # trained as the other layers' are
        self.tables: list[tf.Variable] = []  # have an optimizer of their own, where there is one
        self.state: list[tf.Variable] = []
        self.experts = self.bag = self.lazy = None

        def variable(name: str, *shape: int) -> tf.Variable:
            return tf.Variable(draw.normal(size=shape) * 0.4, dtype=dtype, name=name)

        if marks & {"experts", "none dropped"}:
            whole = "none dropped" in marks
            self.experts = wh.layers.MoE(
                EXPERTS, 8, top_k=2, capacity_factor=EXPERTS / 2 if whole else 1.0, shared=4,
                balance="group", balance_weight=0.0 if whole else 0.05, dtype=dtype,
            )  # fmt: skip
            self.experts.build((None, 1, width))
            for v in self.experts.trainable_variables:
                v.assign(draw.normal(size=v.shape) * 0.4)
                self.weights.append(find_tensor(v))
        if "table" in marks:
            self.tables.append(variable("table", WORDS, width))
        if "growing" in marks:
            self.bag = wh.layers.Embedding(64, width, combiner="mean", dynamic=True, dtype=dtype)
            self.bag.build()
            self.bag.embeddings.assign(draw.normal(size=self.bag.embeddings.shape) * 0.4)
            self.tables.append(find_tensor(self.bag.embeddings))
            self.state = [find_tensor(v) for v in self.bag.non_trainable_variables]
        if "hot" in marks:
            self.bag = wh.layers.Embedding(WORDS, width, combiner="mean", hot=HOT, dtype=dtype)
            self.bag.build()
            for v in self.bag.trainable_variables:
                v.assign(draw.normal(size=v.shape) * 0.4)
            self.tables.append(find_tensor(self.bag.embeddings))
            self.weights.append(find_tensor(self.bag.hot_rows))
        if "classes" in marks:
            self.weights.append(variable("classes", width, CLASSES))
        if "sampled classes" in marks:
            self.weights.append(variable("classes", BLOCKS, IN_A_BLOCK, width))

        if self.tables and "session" not in marks:
            before = tf.keras.backend.floatx()
            tf.keras.backend.set_floatx(self.dtype)  # of its variables
            self.lazy = wh.optimizers.lazy(tf.keras.optimizers.Adam(0.05, epsilon=1e-3))
            self.lazy.build(self.tables)
            tf.keras.backend.set_floatx(before)
            self.state = [*self.state, *(v.value for v in self.lazy.variables if v.shape)]

    def before(self, x: tf.Tensor) -> tf.Tensor:
        """The first layer's input: rows of ids that follow from the batch are added."""
        if not self.tables:
            return x
        with _scope(wh.replica):
            flat = tf.reshape(x, [-1, x.shape[-1]])[:, :EACH]
            ids = tf.cast(tf.abs(flat) * 30, tf.int32) % WORDS
        if self.bag is not None:
            rows = self.bag(tf.cast(ids, tf.int64) * (1000 if "growing" in self.marks else 1), training=True)
        else:
            with _scope(wh.split, dim=0):
                rows = tf.reduce_sum(tf.gather(self.tables[0], ids), 1)
        with _scope(wh.replica):
            return x + tf.reshape(rows, tf.shape(x))

    def after(self, i: int, h: tf.Tensor) -> tf.Tensor:
        """What the experts make of the result of layer ``i``, if they follow it."""
        if self.experts is None or i != BEHIND:
            return h
        with _scope(wh.replica):
            groups = h
            if h.shape.rank == 2:  # of a row each, or of all of them
                groups = h[None] if "none dropped" in self.marks else h[:, None]
        y = self.experts(groups, training=True)
        with _scope(wh.replica):
            return h + tf.reshape(y, tf.shape(h))

    def loss(self, h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """The loss of the last layer's result, and what the experts add."""
        if self.marks & {"classes", "sampled classes"}:
            with _scope(wh.replica):
                count = CLASSES if "classes" in self.marks else BLOCKS * IN_A_BLOCK
                wanted = y if y.shape.rank == 2 else tf.reduce_mean(y, 1)
                labels = tf.cast(tf.abs(wanted[:, 0]) * 100, tf.int32) % count
                h = h if h.shape.rank == 2 else tf.reduce_mean(h, 1)
            with _scope(wh.split):
                if "classes" in self.marks:
                    found = wh.losses.arcface(h, self.weights[-1], labels, scale=4.0)
                else:
                    # Without a margin, whose slope is steep where rows and classes are near: 16 bits would show it.
                    options = {"sample": BLOCKS * (IN_A_BLOCK - 6), "margin": 0.0, "scale": 1.0}
                    found = wh.losses.partial_fc(h, self.weights[-1], labels, seed=[7, 11], **options)
                loss = tf.reduce_mean(found)
        else:
            loss = tf.reduce_mean((h - y) ** 2)
        if self.experts is not None:
            loss += tf.add_n(self.experts.losses)
        return loss

    def descend(self, slopes: Sequence[Any]) -> None:
        """A step of the tables: the lazy optimizer's, or what a session does."""
        if self.lazy is not None:
            self.lazy.apply(slopes, self.tables)
            return
        for table, slope in zip(self.tables, slopes):
            table.scatter_sub(tf.IndexedSlices(RATE * slope.values, slope.indices))

    def trained_by(self, slopes: Sequence[Any]) -> tf.Operation:
        """A step of the tables in a graph of TensorFlow 1."""
        if not self.tables:
            return tf.no_op()
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(RATE)
        return optimizer.apply_gradients(zip(slopes, self.tables))


def _scope(kind: Any, **more: Any) -> Any:
    return kind(**more) if find_running() is not None else contextlib.nullcontext()
