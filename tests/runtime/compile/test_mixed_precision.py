"""precision.compute_dtype: products in bfloat16, the rest in float32; and Keras's loss scaling over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import ConfigError
from whale.ir.layout import Partial
from whale.ir.program import Program
from whale.kernels import substitute

Start = Callable[..., None]


def batch() -> tuple[tf.Tensor, tf.Tensor]:
    generator = np.random.default_rng(0)
    shapes = (16, 12), (16, 4)
    x, y = (tf.constant(generator.standard_normal(shape), tf.float32) for shape in shapes)
    return x, y


class Model:
    """Two dense layers under Adam, in float32."""

    def __init__(self, function: Any, optimizer: Any = None) -> None:
        tf.keras.utils.set_random_seed(3)
        self.layers = [tf.keras.layers.Dense(24, "relu"), tf.keras.layers.Dense(4)]
        self.layers[0].build((None, 12))
        self.layers[1].build((None, 24))
        self.weights = [w for layer in self.layers for w in layer.trainable_variables]
        self.optimizer = optimizer or tf.keras.optimizers.Adam(0.01, epsilon=1e-3)
        self.optimizer.build(self.weights)
        self.step = function(self._step)

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(self.layers[1](self.layers[0](x)), tf.float32) - y))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.weights), self.weights))
        return loss

    def values(self) -> list[np.ndarray]:
        return [tf.convert_to_tensor(w).numpy() for w in self.weights]


@pytest.mark.parametrize(("count", "micro_batches"), [(1, 1), (2, 1), (2, 4)])
def test_products_are_in_bfloat16_and_sums_are_not(
    ranks: Start, monkeypatch: pytest.MonkeyPatch, count: int, micro_batches: int
) -> None:
    programs: list[Program] = []
    compile_marked = substitute.compile_marked
    monkeypatch.setattr(substitute, "compile_marked", lambda p, gpu: programs.append(p) or compile_marked(p, gpu))
    plain = Model(tf.function)
    losses = [float(plain.step(*batch())) for _ in range(5)]
    ranks(count, **{"precision.compute_dtype": "bfloat16", "pipeline.micro_batches": micro_batches})
    model = Model(wh.function)
    found = [float(model.step(*batch())) for _ in range(5)]
    assert found != losses
    np.testing.assert_allclose(found, losses, rtol=2e-2)
    for value, other in zip(model.values(), plain.values()):
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, other, atol=0.02)
    nodes = [n for graph in (programs[-1], *programs[-1].functions.values()) for n in graph.nodes]
    products = [n for n in nodes if n.op == "MatMul"]
    # Each gradient of a weight is wide at once; that of the first layer's input is not wanted at all.
    assert len(products) == 5 and all(n.attrs["T"] == "bfloat16" for n in products)
    assert {n.attrs["T"] for n in nodes if n.op in ("Relu", "ReluGrad")} == {"bfloat16"}
    assert {n.outputs[0].dtype for n in nodes if n.op == "WhaleAllReduce"} <= {"float32"}
    sums = [n for n in nodes if n.name.endswith("/and_before")]
    assert len(sums) == (5 if micro_batches > 1 else 0) and all(n.attrs["T"] == "float32" for n in sums)
    plan = model.step.plan(*batch())
    assert count == 1 or any(isinstance(r.source, Partial) for r in plan.reshards)


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Start) -> None:
    """Only a row of the second rank overflows in float16; weights stay, on every rank, and the loss scale is halved."""
    ranks(2)
    keras_3 = hasattr(tf.keras.optimizers, "LossScaleOptimizer")
    scaled = tf.keras.optimizers.LossScaleOptimizer if keras_3 else tf.keras.mixed_precision.LossScaleOptimizer
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = Model(wh.function, scaled(tf.keras.optimizers.SGD(0.1), initial_scale=1024.0))
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    before = model.values()
    x, y = batch()
    model.step(tf.concat([x[:15], 7e4 * x[15:]], 0), y)
    for value, other in zip(model.values(), before):
        np.testing.assert_array_equal(value, other)
    assert float(model.optimizer.dynamic_scale if keras_3 else model.optimizer.loss_scale) == 512.0
    model.step(x, y)
    assert all(np.isfinite(v).all() and not np.array_equal(v, o) for v, o in zip(model.values(), before))


def test_levels() -> None:
    with pytest.raises(ConfigError, match="'optimizer'"):
        wh.Config({"memory.offload": "v1"})
    with pytest.raises(ConfigError, match="'bfloat16'"):
        wh.Config({"precision.compute_dtype": "float64"})
