"""The kernels "convolutions": networks whose convolutions are products of matrices are trained as TensorFlow's are."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.kernels.one_rank import without

Start = Callable[..., None]
STEPS = 3


def trained(keras: Any, scope: Callable[[], Any], stage: Callable[[], Any]) -> tuple[list[np.ndarray], Counter[str]]:
    """Losses and weights of bottlenecks, one of them strided; the operations of the first rank."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    options = {"padding": "same", "dtype": "float64", "activation": "tanh"}
    first = [
        layers.Conv2D(128, 3, **options),
        layers.Conv2D(32, 1, **options),
        layers.Conv2D(128, 1, use_bias=False, **options),
        layers.Conv2D(128, 3, **options),  # of many weights
    ]
    last = [
        layers.Conv2D(64, 1, strides=2, **options),
        layers.DepthwiseConv2D(3, **options),
        layers.GlobalAveragePooling2D(dtype="float64"),
        layers.Dense(3, dtype="float64"),
    ]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    @wh.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape, scope():
            hidden = x
            for part in (first, last):
                with stage():
                    for layer in part:
                        hidden = layer(hidden)
                    if part is last:
                        loss = tf.reduce_mean(tf.square(hidden - y))
        weights = [w for layer in (*first, *last) for w in layer.trainable_variables]
        optimizer.apply_gradients(list(zip(tape.gradient(loss, weights), weights)))
        return loss

    draw = np.random.default_rng(0)
    batch = tf.constant(draw.normal(size=(8, 2, 2, 3))), tf.constant(draw.normal(size=(8, 3)))
    found = [np.asarray(step(*batch)) for _ in range(STEPS)]
    found += [tf.convert_to_tensor(w).numpy() for layer in (*first, *last) for w in layer.weights]
    program = step._step(batch, {}).compiled.ranks[0]
    return found, Counter(node.op for graph in (program, *program.functions.values()) for node in graph.nodes)


@pytest.mark.core
@pytest.mark.parametrize(
    ("count", "config", "staged"),
    one_of(
        4,
        [
            (1, {}, False),
            (2, {"batch.shares": [3, 1]}, False),
            (2, {"memory.zero": 3, "memory.zero_min_bytes": 0}, False),
            (1, {"pipeline.micro_batches": 2}, False),
            (2, {"pipeline.micro_batches": 2}, True),
            (1, {"memory.recompute": "auto"}, False),
        ],
        several=True,
    ),
    ids=["one rank", "rows", "zero 3", "micro-batches", "stages", "recomputation"],
)
def test_networks_are_trained_alike(ranks: Start, count: int, config: dict[str, Any], staged: bool) -> None:
    stage = (lambda: wh.stage()) if staged else contextlib.nullcontext
    scope = contextlib.nullcontext if staged else wh.replica
    found, counts = [], []
    for products in (True, False):
        ranks(count, **({} if products else without("convolutions")), **config)
        values, operations = trained(tf.keras, scope, stage)
        found.append(values)
        counts.append(operations)
        wh.shutdown()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)
    assert counts[0]["ExtractImagePatches"] >= 1 and counts[1]["ExtractImagePatches"] == 0
    assert counts[0]["MatMul"] >= counts[1]["MatMul"] + 4
