"""The digits with TF1: a graph, placeholders, an Adam optimizer and a session.

whale run -np 2 examples/digits_tf1.py    on two processes
python examples/digits_tf1.py --plain     on one device, without whale: the same program
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

BATCH, TEST_ROWS = 96, 360


def dense(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    """A dense layer of two variables."""
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", [x.shape[-1], units], x.dtype, v1.glorot_uniform_initializer())
        bias = v1.get_variable("bias", [units], x.dtype, v1.zeros_initializer())
    return tf.matmul(x, kernel) + bias


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plain", action="store_true", help="one device; whale is not imported")
    options = parser.parse_args()
    rank, make_session = 0, v1.Session
    if not options.plain:
        import whale as wh

        wh.init()
        rank, make_session = wh.rank(), wh.Session

    with np.load(Path(__file__).with_name("digits.npz")) as digits:  # digits.py says whose they are
        images, labels = (digits["images"].reshape(-1, 64) / 16).astype(np.float32), digits["labels"].astype(np.int32)
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(5)
        x, y = v1.placeholder(tf.float32, [None, 64], "x"), v1.placeholder(tf.int32, [None], "y")
        logits = dense(tf.nn.relu(dense(x, 64, "hidden")), 10, "logits")
        loss = v1.losses.sparse_softmax_cross_entropy(y, logits)
        step = v1.train.get_or_create_global_step()
        train = v1.train.AdamOptimizer(3e-3).minimize(loss, global_step=step)
        right = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), y), tf.int32))
        initialise = v1.global_variables_initializer()

    generator = np.random.default_rng(0)
    with make_session(graph=graph) as session:
        session.run(initialise)
        for index in range(options.steps):
            rows = generator.integers(TEST_ROWS, len(images), BATCH)
            value, _ = session.run([loss, train], {x: images[rows], y: labels[rows]})
            if rank == 0 and index % 80 == 0:
                print(f"step {index:3d}  loss {value:.4f}", flush=True)
        counted, steps = session.run([right, step], {x: images[:TEST_ROWS], y: labels[:TEST_ROWS]})
    if rank == 0:
        print(f"test accuracy {counted / TEST_ROWS:.1%} after {steps} steps", flush=True)


if __name__ == "__main__":
    main()
