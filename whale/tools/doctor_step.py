"""The program that `whale doctor` runs as a trial: ``whale run -np 2 -m whale.tools.doctor_step [results.json]``.

Every rank takes one training step alone, then the same step with the other ranks, in float64; the results are compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from whale.runtime.context import require_current
from whale.runtime.function import function as spread
from whale.runtime.start import init, shutdown


def main() -> None:
    """Takes both steps; rank 0 writes the largest relative difference between them and the bytes that ranks
    exchanged.
    """
    alone = _train(tf.function)
    init()
    together = _train(spread)
    scale = max(float(np.max(np.abs(value))) for value in alone)
    difference = max(float(np.max(np.abs(one - other))) for one, other in zip(alone, together)) / scale
    counters = [counter for comm in require_current().comms for counter in comm.counters()]
    results = {
        "ranks": require_current().size,
        "difference": difference,
        "moved_bytes": sum(counter.wire_bytes for counter in counters if counter.kind == "AllReduce"),
    }
    if require_current().rank == 0:
        text = json.dumps(results)
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(text)
        else:
            print(text)
    shutdown()


def _train(function: Callable[[Any], Any]) -> list[np.ndarray]:
    """Takes one step of gradient descent of two layers on eight rows; returns the loss and both weights.

    Args:
        function: decorator that compiles the step: `tf.function` or `wh.function`.
    """
    draw = np.random.default_rng(0).standard_normal
    hidden, output = tf.Variable(draw((4, 6))), tf.Variable(draw((6, 1)))

    @function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ hidden) @ output - y))
        for variable, gradient in zip((hidden, output), tape.gradient(loss, (hidden, output))):
            variable.assign_sub(0.1 * gradient)
        return loss

    loss = step(tf.constant(draw((8, 4))), tf.constant(draw((8, 1))))
    return [loss.numpy(), hidden.numpy(), output.numpy()]


if __name__ == "__main__":
    main()
