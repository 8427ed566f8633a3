"""An optimizer that is built in a split scope, before the step, lies and moves as one that the first step builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import whale as wh
from whale.ir.plan import Plan


def _plan(build: bool, stages: bool) -> Plan:
    stage = wh.stage if stages else wh.replica
    layers = [keras.layers.Dense(n, kernel_initializer="zeros") for n in (64, 64, 4)]
    with stage(), wh.split():
        for layer in layers[:2]:
            layer.build((None, 64))
    with stage():
        layers[2].build((None, 64))
    optimizer = keras.optimizers.Adam()
    weights = [weight for layer in layers for weight in layer.trainable_variables]
    if build:
        with wh.split():
            optimizer.build(weights)

    @wh.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            with stage(), wh.split():
                hidden = layers[1](tf.nn.relu(layers[0](x)))
            with stage():
                loss = tf.reduce_mean((layers[2](hidden) - y) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    given = tf.zeros([8, 64]), tf.zeros([8, 4])
    if not build:
        step(*given)
    return step.plan(*given)


@pytest.mark.skipif(not keras.__version__.startswith("3."), reason="Keras 2's optimizers are built with the model")
@pytest.mark.parametrize("stages", [True, False])
def test_state_built_in_a_split_scope_lies_as_the_weights(ranks: Callable[..., None], stages: bool) -> None:
    ranks(4 if stages else 2, **({"pipeline.micro_batches": 2} if stages else {}))
    early = _plan(build=True, stages=stages)
    wh.shutdown()
    ranks(4 if stages else 2, **({"pipeline.micro_batches": 2} if stages else {}))
    late = _plan(build=False, stages=stages)
    assert early.logical_bytes == late.logical_bytes
    assert len(early.variables) == len(late.variables)
