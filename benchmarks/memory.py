"""What a model takes in memory when it lies split: run with `whale run -np 4 benchmarks/memory.py`.

--how split   one dense layer (default 1 GB) under wh.split, trained with plain gradient descent; live bytes are watched
              at every moment of the variables' creation
--how zero3   a stack of dense layers (--width) with Adam under memory.zero=3, --gigabytes of parameters and slots;
              a rank also holds some whole layers at a time: gathered weights, a gradient on its way

Every rank prints its figures; rank 0 prints whether the bounds hold.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time

import tensorflow as tf

import whale as wh
from whale.runtime.context import require_current
from whale_ops.memory import read_memory

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--how", choices=("split", "zero3"), default="split")
parser.add_argument("--gigabytes", type=float, default=1.0)
parser.add_argument("--width", type=int, default=2048, help="of the layers of zero3")
parser.add_argument("--steps", type=int, default=2)
options = parser.parse_args()


def resident() -> tuple[int, int]:
    """(now, at most) resident bytes of this process."""
    rows = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(rows["VmRSS"].split()[0]) << 10, int(rows["VmHWM"].split()[0]) << 10


def own() -> int:
    """Resident bytes that are this process's own: all but pages of files (TensorFlow's code), which are shared."""
    rows = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return (int(rows["RssAnon"].split()[0]) + int(rows["RssShmem"].split()[0])) << 10


tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
wh.init({"memory.zero": 3} if options.how == "zero3" else {})
tf.random.uniform((8, 8)) @ tf.ones((8, 8))  # TensorFlow's own memory is there
base, base_own = resident()[0], own()
total = int(options.gigabytes * 2**30)
live_at_most = own_at_most = proportional_at_most = 0
watching = True


def watch() -> None:
    """Live bytes of the allocator while variables are made; resident bytes to the end."""
    global live_at_most, own_at_most, proportional_at_most
    while True:
        for _ in range(50):
            if watching:
                live_at_most = max(live_at_most, read_memory().live_bytes)
            own_at_most = max(own_at_most, own())
            time.sleep(0.001)
        rows = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup") if ":" in line[:20])
        proportional_at_most = max(proportional_at_most, int(rows["Pss"].split()[0]) << 10)


before = read_memory().live_bytes
threading.Thread(target=watch, daemon=True).start()
if options.how == "split":
    inputs = 4096
    layers = [tf.keras.layers.Dense(total // 4 // inputs, use_bias=False)]
    with wh.split():
        layers[0].build((None, inputs))
    weights = layers[0].trainable_variables
    optimizer = None
    # The weight, and its gradient.
    whole = 2 * total
else:
    inputs = options.width
    count = max(2, total // (3 * 4 * inputs * inputs))
    layers = [tf.keras.layers.Dense(inputs, use_bias=False, activation="tanh") for _ in range(count)]
    for layer in layers:
        layer.build((None, inputs))
    weights = [w for layer in layers for w in layer.trainable_variables]
    optimizer = tf.keras.optimizers.Adam(1e-4)
    optimizer.build(weights)
    whole = 3 * count * 4 * inputs * inputs


def loss_of(x: tf.Tensor) -> tf.Tensor:
    for layer in layers:
        x = layer(x)
    return tf.reduce_mean(tf.square(x))


@wh.function
def step(x: tf.Tensor) -> tf.Tensor:
    if options.how == "split":
        with wh.split(), tf.GradientTape() as tape:
            loss = loss_of(x)
    else:
        with tf.GradientTape() as tape:
            loss = loss_of(x)
    slopes = tape.gradient(loss, weights)
    if optimizer is None:
        descent.apply_gradients((slope, weight.value) for weight, slope in zip(weights, slopes))
    else:
        optimizer.apply_gradients(zip(slopes, weights))
    return loss


descent = tf.compat.v1.train.GradientDescentOptimizer(1e-3)  # one op, which needs no memory of its own
x = tf.random.stateless_normal((8, inputs), (1, 2))
step.plan(x)
watching = False
gc.collect()
created = live_at_most - before
held = read_memory().live_bytes - before
losses = []
start_s = time.perf_counter()
for _ in range(options.steps):
    losses.append(float(step(x)))
step_s = (time.perf_counter() - start_s) / options.steps
report = wh.memory_report()
_, most = resident()
size = wh.size()
variables = whole // 2 if options.how == "split" else whole
mega = 1e6
print(
    f"rank {wh.rank()}: variables {report.variable_bytes / mega:.0f} MB of {variables / mega:.0f}"
    f" ({report.variable_bytes * size / variables:.4f} of a share), live while they were made at most"
    f" {created / mega:.0f} MB ({created * size / variables:.3f} of a share), then {held / mega:.0f} MB;"
    f" resident at most {most / mega:.0f} MB, {proportional_at_most / mega:.0f} with shared pages shared,"
    f" {own_at_most / mega:.0f} of its own ({base / mega:.0f} and {base_own / mega:.0f} of its own before);"
    f" a step {step_s:.2f} s, losses {losses}",
    flush=True,
)
said = require_current("").comms[0].allgather_bytes("benchmark/memory", str(proportional_at_most).encode(), 60.0)
together = [int(each) for each in said]
if wh.rank() == 0:
    print(report)
    if options.how == "split":
        limit = whole // size + 300 * 10**6
        verdict = "holds" if own_at_most <= limit else "EXCEEDED"
        print(f"peak resident of its own {own_at_most / mega:.0f} MB, bound {limit / mega:.0f} MB: {verdict}")
        print(f"with the files of TensorFlow, which all processes share, {most / mega:.0f} MB")
    else:
        print(
            f"together {sum(together) / mega:.0f} MB, {sum(together) / whole:.3f} of the model's {whole / mega:.0f} MB;"
            f" bound 1.25: {'holds' if sum(together) <= 1.25 * whole else 'EXCEEDED'}"
        )
