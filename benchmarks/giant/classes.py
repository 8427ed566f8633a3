"""A classifier of very many classes with Adam: what a rank holds at most, and whether anything is whole anywhere.

    whale run -np 4 benchmarks/giant/classes.py --classes 1000000

ArcFace over features of 512 elements. Weights and the optimizer's state have a quarter on each of 4 ranks; beside these
a rank holds its part of the logits and their slopes, and of the gradient.
"""

from __future__ import annotations

import argparse
import time

import tensorflow as tf

import whale as wh

WIDTH, ROWS, INPUTS = 512, 64, 128
MOST_BYTES = 600 << 20  # beside the rank's part of weights, their gradient, and state

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--classes", type=int, default=100_000)
parser.add_argument("--steps", type=int, default=2)
options = parser.parse_args()


def resident() -> tuple[int, int]:
    """(now, at most) resident bytes of this process."""
    rows = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(rows["VmRSS"].split()[0]) << 10, int(rows["VmHWM"].split()[0]) << 10


tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
wh.init()
tf.random.uniform((8, 8)) @ tf.ones((8, 8))  # TensorFlow's own memory is there
base = resident()[0]
classes, ranks = options.classes, wh.size()
with wh.replica():
    features = tf.Variable(tf.random.stateless_normal([INPUTS, WIDTH], [1, 2], stddev=0.1))
adam = tf.keras.optimizers.Adam(1e-3)
with wh.split():
    weights = tf.Variable(lambda: tf.random.stateless_normal([WIDTH, classes], [3, 4], stddev=0.1))


@wh.function
def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """One step of Adam of the classes, and of SGD of the features."""
    with tf.GradientTape() as tape:
        with wh.replica():
            h = tf.tanh(x @ features)
        with wh.split():
            loss = tf.reduce_mean(wh.losses.arcface(h, weights, y))
    into, out = tape.gradient(loss, [features, weights])
    with wh.split():
        adam.apply_gradients([(out, weights)])
    features.assign_sub(0.1 * into)
    return loss


x = tf.random.stateless_normal([ROWS, INPUTS], [5, 6])
y = tf.random.stateless_uniform([ROWS], [7, 8], 0, classes, tf.int32)
losses, start = [], 0.0
for _ in range(options.steps):
    start = time.process_time()
    losses.append(float(train(x, y)))
seconds = time.process_time() - start
part = 4 * WIDTH * classes * 4 / ranks
most = resident()[1] - base
(program,) = train._step((x, y), {}).compiled.ranks
whole = [n.name for n in program.nodes for t in n.outputs if classes in (t.shape or ())]
print(
    f"{classes:,} classes x {WIDTH}: {most / 2**20:,.0f} MiB at most, "
    f"{part / 2**20:,.0f} of it weights, gradient and state; "
    f"{seconds:.1f} s of processor time a step; losses {losses[0]:.4f} to {losses[-1]:.4f}; "
    f"{'within bounds' if most <= part + MOST_BYTES else 'more than its part and 600 MiB'}",
    flush=True,
)
if wh.rank() == 0:
    moved = train.plan(x, y).logical_bytes
    print(f"tensors with all classes: {', '.join(whole) or 'none'}; {moved:,} bytes move")
