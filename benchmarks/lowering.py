"""Seconds from a traced step to a callable one: ResNet50 (Keras 3) with Adam at 64x64, in one process.

    python benchmarks/lowering.py [--ranks 2] [--repeats 3]

The ranks live in this process, so `localise` and `import` are those of all of them. Tracing is TensorFlow's own time;
what is printed is the fastest of the repeats for each phase after it.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import whale as wh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model = tf.keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None
    )
    optimizer = tf.keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)
    x, y = np.zeros((8, 64, 64, 3), np.float32), np.zeros(8, np.int32)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    fastest_s: dict[str, float] = {}
    for _ in range(options.repeats):
        wh.init(wh.Config({"communication.transport": "in-process", "cluster.ranks": options.ranks}))
        function = wh.function(step)
        start_s = time.perf_counter()
        seconds = function.compile_seconds(x, y)
        whole_s = time.perf_counter() - start_s
        start_s = time.perf_counter()
        function(x, y)
        seconds["lowering, all of the above"] = sum(seconds.values())
        seconds |= {"first call": time.perf_counter() - start_s, "whole, with tracing": whole_s}
        fastest_s = {name: min(value, fastest_s.get(name, value)) for name, value in seconds.items()}
        plan = function.plan(x, y)
        wh.shutdown()
    print(f"ResNet50, {options.ranks} ranks, {plan.total_flops / 1e9:.2f} GFLOP in products per step")
    for name, value in fastest_s.items():
        print(f"  {name:26s} {value:7.3f} s")


if __name__ == "__main__":
    main()
