"""A script for Horovod under `whale.horovod` and under Horovod itself, in images per second: the same text, one import.

    python -m benchmarks.horovod_scripts -np 2 --model MobileNetV2 --batch-size 16 --steps 20

Both are started by mpirun, one after the other, `--repeats` times. Without Horovod (docs/guides/horovod.md builds
it) only Whale's figures are printed, and that they stand alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import statistics
import subprocess
import sys

from whale.launcher.mpirun import find_mpirun

SCRIPT = """
import sys, timeit
import tensorflow as tf
import {horovod} as hvd

name, batch, steps, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
hvd.init()
model = getattr(tf.keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=100)
opt = tf.keras.optimizers.SGD(0.01)
opt.build(model.trainable_variables)
data = tf.random.uniform([batch, size, size, 3])
target = tf.random.uniform([batch, 1], maxval=99, dtype=tf.int64)

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(target, model(data, training=True)))
    tape = hvd.DistributedGradientTape(tape)
    opt.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

step()
hvd.broadcast_variables(model.variables, root_rank=0)
timeit.timeit(step, number=3)
seconds = timeit.timeit(step, number=steps)
if hvd.rank() == 0:
    print("images/s", hvd.size() * batch * steps / seconds)
"""


def images_per_s(horovod: str, arguments: argparse.Namespace) -> float:
    """Of all ranks together, with the module that stands for Horovod."""
    line = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-np", str(arguments.np), sys.executable, "-c"]
    sizes = [arguments.model, arguments.batch_size, arguments.steps, arguments.image_size]
    done = subprocess.run(
        [*line, SCRIPT.format(horovod=horovod), *map(str, sizes)], capture_output=True, text=True, check=False
    )
    found = re.search(r"images/s (\S+)", done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"{horovod} failed:\n{done.stdout}{done.stderr}")
    return float(found[1])


def main() -> None:
    """Prints the figures of each run, and their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-np", type=int, default=2)
    parser.add_argument("--model", default="MobileNetV2")
    parser.add_argument("--batch-size", type=int, default=16, help="of one rank")
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    modules = ["whale.horovod.tensorflow", "horovod.tensorflow"]
    if importlib.util.find_spec("horovod") is None:
        print("Horovod is not installed (python -m whale_ops.build_horovod): Whale's figures stand alone")
        modules.pop()
    found: dict[str, list[float]] = {module: [] for module in modules}
    for _ in range(arguments.repeats):
        for module in modules:
            found[module].append(images_per_s(module, arguments))
            print(f"{module:28} {found[module][-1]:8.1f} images/s", flush=True)
    for module, values in found.items():
        print(f"{module:28} {statistics.median(values):8.1f} images/s, median of {len(values)}")


if __name__ == "__main__":
    main()
