"""Giant layers in checkpoints that another number of ranks reads, and exported to serve without Whale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.giant.measure import ALONE, SPREAD, Line, Scopes, ranks, weight
from whale.frontends.layers.vocabulary import find_tensor
from whale.ir.layout import Shard

LIMIT = 1e-10
ROWS, WORDS, WIDTH, CLASSES = 16, 40, 8, 24
KERAS_3 = tf.__version__ >= "2.16"


class Kept:
    """A table by rows, as its lazy optimizer's state, experts, and ArcFace over classes: all are sharded."""

    def __init__(self, scopes: Scopes, dtype: Any = tf.float64) -> None:
        self.scopes = scopes
        self.table = weight(0, WORDS, WIDTH, dtype=dtype)
        self.classes = weight(1, WIDTH, CLASSES, dtype=dtype)
        self.experts = wh.layers.MoE(4, 12, top_k=2, capacity_factor=2.0, dtype="float64")
        self.experts.build((ROWS // 2, 2, WIDTH))
        for i, v in enumerate(self.experts.trainable_variables):
            v.assign(weight(10 + i, *v.shape, dtype=dtype))
        self.dense = [self.classes, *(find_tensor(v) for v in self.experts.trainable_variables)]
        self.optimizer, state = None, []
        if KERAS_3:
            before = tf.keras.backend.floatx()
            tf.keras.backend.set_floatx("float64")
            self.optimizer = wh.optimizers.lazy(tf.keras.optimizers.Adam(0.05, epsilon=1e-3))
            self.optimizer.build([self.table])
            tf.keras.backend.set_floatx(before)
            state = [v.value for v in self.optimizer.variables]
        self.variables = [self.table, *self.dense, *state]
        self.checkpoint = tf.train.Checkpoint(**{f"v{i}": v for i, v in enumerate(self.variables)})

    def batch(self, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        draw = np.random.default_rng(number)
        return tf.constant(draw.integers(WORDS, size=ROWS), tf.int32), tf.constant(
            draw.integers(CLASSES, size=ROWS), tf.int32
        )

    def features(self, ids: tf.Tensor, training: bool) -> tf.Tensor:
        with self.scopes.split(dim=0):
            found = tf.nn.embedding_lookup(self.table, ids)
        with self.scopes.replica():
            groups = tf.reshape(tf.tanh(found), [-1, 2, WIDTH])
        y = self.experts(groups, training=training)
        with self.scopes.replica():
            return tf.reshape(y + groups, [-1, WIDTH])

    def step(self, ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            features = self.features(ids, True)
            with self.scopes.split():
                loss = tf.reduce_mean(wh.losses.arcface(features, self.classes, labels, scale=4.0))
        of_table, *others = tape.gradient(loss, [self.table, *self.dense])
        if self.optimizer is None:
            self.table.scatter_sub(tf.IndexedSlices(0.05 * of_table.values, of_table.indices))
        else:
            self.optimizer.apply([of_table], [self.table])
        for v, slope in zip(self.dense, others):
            v.assign_sub(0.05 * slope)
        return loss

    def predict(self, ids: tf.Tensor) -> tf.Tensor:
        """The logits of rows."""
        features = self.features(ids, False)
        with self.scopes.split():
            return tf.matmul(tf.math.l2_normalize(features, -1), tf.math.l2_normalize(self.classes, 0))


def trained(model: Kept, function: Callable[..., Any], first: int, steps: int) -> list[np.ndarray]:
    step = function(model.step)
    losses = [np.asarray(step(*model.batch(first + i))) for i in range(steps)]
    return losses + [v.numpy() for v in model.variables]


def test_other_ranks_go_on_and_what_is_exported_serves(tmp_path: Path) -> None:
    alone = Kept(ALONE)
    trained(alone, tf.function, 0, 2)
    expected = trained(alone, tf.function, 2, 2)
    with ranks(Line("kept", Kept, 0, 4)):
        model = Kept(SPREAD)
        trained(model, wh.function, 0, 2)
        cut = [p for p in wh.function(model.step).plan(*model.batch(0)).variables.values() if isinstance(p, Shard)]
        # The table and its two moments by rows, the classes, and the experts' two layers with their biases.
        assert [p.dim for p in cut].count(0) >= (7 if KERAS_3 else 5) and len(cut) >= (8 if KERAS_3 else 6)
        path = wh.CheckpointManager(model.checkpoint, tmp_path / "kept", 1).save()
    with ranks(Line("kept", Kept, 0, 3)):
        other = Kept(SPREAD)
        wh.CheckpointManager(other.checkpoint, tmp_path / "kept", 1).restore(path)
        found = trained(other, wh.function, 2, 2)
        for one, value in zip(expected, found, strict=True):
            assert np.max(np.abs(one - value)) <= LIMIT * max(1e-3, np.max(np.abs(one)))
        wh.export(wh.function(other.predict), tmp_path / "served", tf.TensorSpec([ROWS], tf.int32))
    served = tf.saved_model.load(str(tmp_path / "served")).signatures["serving_default"]
    ids, _ = alone.batch(7)
    (logits,) = served(ids).values()
    np.testing.assert_allclose(logits, alone.predict(ids), rtol=1e-9, atol=1e-12)
