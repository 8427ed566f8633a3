"""The kernels "elementwise": arithmetic on elements in few operations trains networks as TensorFlow's many do."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.kernels.one_rank import without
from whale.ir.program import Program
from whale.kernels.elementwise import ELEMENTWISE

Start = Callable[..., None]
STEPS = 3


@pytest.fixture(autouse=True)
def _as_written() -> Iterator[None]:
    """TensorFlow's optimizer rewrites arithmetic: it leaves alone what is compared with."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


class Network:
    """Convolutions with batch normalisation, a residual, layer normalisation, and a wide activation."""

    def __init__(self, keras: Any, dtype: str, scope: Callable[[], Any], stage: Callable[[], Any]) -> None:
        keras.utils.set_random_seed(0)
        layers = keras.layers
        self.first = [
            layers.Conv2D(16, 3, padding="same", dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.ReLU(dtype=dtype),
            layers.Conv2D(16, 3, padding="same", dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.ReLU(6.0, dtype=dtype),
        ]
        self.last = [
            layers.Dense(24, activation="gelu", dtype=dtype),
            layers.LayerNormalization(dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

        @wh.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with scope():
                    with stage():
                        hidden = x
                        for i, layer in enumerate(self.first):
                            options = {"training": True} if i % 3 == 1 else {}
                            hidden = layer(hidden, **options) + (hidden if i == 3 else 0.0)
                        hidden = tf.reduce_mean(hidden, [1, 2])
                    with stage():
                        for layer in self.last:
                            hidden = layer(hidden)
                        loss = tf.reduce_mean(tf.square(hidden - y))
            weights = [w for layer in (*self.first, *self.last) for w in layer.trainable_variables]
            optimizer.apply_gradients(list(zip(tape.gradient(loss, weights), weights)))
            return loss

        self.step, self.dtype = step, dtype

    def batch(self, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        draw = np.random.default_rng(number)
        return tf.constant(draw.normal(size=(8, 6, 6, 3)), self.dtype), tf.constant(
            draw.normal(size=(8, 3)), self.dtype
        )

    def program(self) -> Program:
        """What the first rank runs."""
        return self.step._step(self.batch(0), {}).compiled.ranks[0]


def operations(program: Program) -> Counter[str]:
    return Counter(node.op for graph in (program, *program.functions.values()) for node in graph.nodes)


@pytest.mark.core
@pytest.mark.parametrize("dtype", one_of(2, ["float64", "float32"]))
@pytest.mark.parametrize(
    ("count", "config", "staged"),
    [
        (1, {}, False),
        pytest.param(2, {}, False, marks=pytest.mark.long),
        (2, {"memory.zero": 3, "memory.zero_min_bytes": 0}, False),
        pytest.param(
            1, {"pipeline.micro_batches": 2, "batch.norm_statistics": "micro-batch"}, False, marks=pytest.mark.long
        ),
        (2, {"pipeline.micro_batches": 2, "batch.norm_statistics": "micro-batch"}, True),
        pytest.param(1, {"memory.recompute": "auto"}, False, marks=pytest.mark.long),
    ],
    ids=["one rank", "rows", "zero 3", "micro-batches", "stages", "recomputation"],
)
def test_networks_are_trained_alike(ranks: Start, dtype: str, count: int, config: dict[str, Any], staged: bool) -> None:
    stage = (lambda: wh.stage()) if staged else contextlib.nullcontext
    scope = contextlib.nullcontext if staged else wh.replica
    found, held = [], []
    for fused in (True, False):
        ranks(count, **({} if fused else without("elementwise")), **config)
        network = Network(tf.keras, dtype, scope, stage)
        losses = [np.asarray(network.step(*network.batch(i))) for i in range(STEPS)]
        weights = [w for layer in (*network.first, *network.last) for w in layer.weights]
        held.append(losses + [tf.convert_to_tensor(w).numpy() for w in weights])
        found.append(operations(network.program()))
        wh.shutdown()
    allowed = {"float64": 1e-11, "float32": 1e-4}[dtype]  # sums are added in another order
    for one, other in zip(*held, strict=True):
        np.testing.assert_allclose(one, other, rtol=allowed, atol=allowed)
    fused_ops, plain = found
    assert plain[ELEMENTWISE] == 0 < fused_ops[ELEMENTWISE]
    arithmetic = (
        "Mul",
        "Sub",
        "AddV2",
        "Neg",
        "Square",
        "ReluGrad",
        "Relu6Grad",
        "Tile",
        "RealDiv",
        "Sum",
        "Mean",
        "BiasAddGrad",
    )
    few, many = (sum(counted[op] for op in arithmetic) for counted in (fused_ops, plain))
    # Keras 2 has kernels of its own for normalisations in float32.
    assert few + fused_ops[ELEMENTWISE] < {"float64": 0.6, "float32": 1.0}[dtype] * many
