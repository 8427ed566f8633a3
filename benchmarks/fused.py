"""Step time with one kind of what Whale computes otherwise than TensorFlow (the key `kernels`) on, and off.

    python -m benchmarks.fused [--kind updates] [--batch 16] [--rounds 15] [--steps 4] [--models gpt,deep]

The other kinds are as they are by default on both sides. Two processes hold a copy of the model each and step in turn,
so that what else the machine does meets both. Prints the medians of seconds by the clock and of processor seconds of a
step, and the ratios on / off.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any

from whale.config.keys import KERNELS

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

BATCHES = {"gpt": 2, "deep": 16, "resnet50": 4}  # few rows, so that updates weigh


def deep() -> Any:
    """Many small variables: an optimizer's work is the calls of operations."""
    import tensorflow as tf

    layers = tf.keras.layers
    hidden = inputs = layers.Input((64,))
    for _ in range(60):
        hidden = layers.Dense(64, activation="relu")(layers.LayerNormalization()(hidden))
    return tf.keras.Model(inputs, layers.Dense(10)(hidden))


def make_step(name: str, optimizer_name: str, batch: int) -> Any:
    """A training step of one of the models, already compiled; returns its loss."""
    import numpy as np
    import tensorflow as tf

    import whale as wh
    from benchmarks.one_process import MODELS
    from benchmarks.steps import train_step

    tf.keras.utils.set_random_seed(1)
    generator = np.random.default_rng(0)
    if name == "deep":
        model = deep()
        features: tuple[np.ndarray, ...] = (generator.normal(size=(batch, 64)).astype(np.float32),)
        y = generator.integers(0, 10, size=batch).astype(np.int32)
    else:
        model, (features, y) = MODELS[name].make(tf.keras), MODELS[name].inputs(generator)
    optimizer = getattr(tf.keras.optimizers, optimizer_name)(1e-4)

    step = wh.function(train_step(model, optimizer))
    x = [tf.constant(one[:batch]) for one in features]  # who has fewer rows takes all
    inputs = x[0] if len(x) == 1 else x, tf.constant(y[:batch])
    return lambda: float(step(*inputs))


def serve(pipe: Any, name: str, optimizer: str, batch: int, config: dict[str, Any]) -> None:
    """Compiles a step, then takes as many steps as it is told, and answers with the seconds they took."""
    import whale as wh

    wh.init(config)
    step = make_step(name, optimizer, batch)
    step()
    pipe.send(None)
    while count := pipe.recv():
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            loss = step()
        pipe.send(((time.perf_counter() - start_s) / count, (time.process_time() - start_cpu_s) / count, loss))
    wh.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=KERNELS, default=KERNELS[0], help="what is on or off")
    parser.add_argument("--batch", type=int, help="rows of a step, up to those of the model; otherwise few")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each")
    parser.add_argument("--steps", type=int, default=4, help="steps of one measurement")
    parser.add_argument("--ranks", type=int, default=1, help="ranks in one process")
    parser.add_argument("--optimizer", default="Adam", help="name of a Keras optimizer")
    parser.add_argument("--models", default="gpt,deep,resnet50", help="deep, and the models of benchmarks.one_process")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for name in options.models.split(","):
        pipes = {}
        for fused in (True, False):
            pipes[fused], theirs = spawn.Pipe()
            kernels = [kind for kind in KERNELS if fused or kind != options.kind]
            config = {"communication.in_process_ranks": options.ranks, "kernels": kernels}
            given = theirs, name, options.optimizer, options.batch or BATCHES.get(name, 16), config
            spawn.Process(target=serve, args=given, daemon=True).start()
        for pipe in pipes.values():
            pipe.recv()
        figures: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
        for index in range(options.rounds + 1):
            for fused, pipe in pipes.items():
                pipe.send(options.steps)
                figure = pipe.recv()
                if index > 0:
                    figures[fused].append(figure)
        for pipe in pipes.values():
            pipe.send(0)
        report(name, figures)


def report(name: str, figures: dict[bool, list[tuple[float, float, float]]]) -> None:
    """One line: medians, ratios, and whether both copies had the same losses."""
    shown = []
    for what, place in (("by the clock", 0), ("of processors", 1)):
        fused, plain = (statistics.median(row[place] for row in figures[key]) for key in (True, False))
        ratio = statistics.median(a[place] / b[place] for a, b in zip(figures[True], figures[False]))
        shown.append(f"{1e3 * fused:.2f} / {1e3 * plain:.2f} ms {what}, ratio {ratio:.3f}")
    apart = max(abs(a[2] - b[2]) for a, b in zip(figures[True], figures[False]))
    print(f"{name:9s} fused / not fused: {'; '.join(shown)}; losses differ by {apart:.1e} at most", flush=True)


if __name__ == "__main__":
    main()
