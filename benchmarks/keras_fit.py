"""Measures a step of Keras' `fit` beside plain Keras, for a model so small that calls take nearly all of its time.

    python -m benchmarks.keras_fit [--rounds 7] [--steps 2000] [--per-execution 1 100] [--data arrays]

A model of two narrow layers is trained on arrays, or on a shuffled `tf.data.Dataset` of them, by plain Keras in one
process, and by the same script after `wh.init()` on one rank and on two, with Whale's checks as they are by default.
All groups of processes stay alive; in each round each runs `fit` for so many steps in turn while the others are
stopped. `--per-execution` is Keras' `steps_per_execution`. Losses have to be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.groups import Answer, Group, serve, under_mpirun

GROUPS = (("plain Keras", "plain", 1), ("Whale, 1 rank", "whale", 1), ("Whale, 2 ranks", "whale", 2))
_ROWS, _WIDTH, _CLASSES, _WARM_UP = 64, 16, 4, 2
_STEP_TIMEOUT_S, _TOLERANCE = 600.0, 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000, help="steps of one call of fit")
    parser.add_argument("--per-execution", type=int, nargs="+", default=(1, 100))
    parser.add_argument("--data", choices=("arrays", "dataset"), default="arrays")
    parser.add_argument("--worker", choices=("plain", "whale"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.per_execution[0], options.steps, options.data)
        return
    print(f"microseconds of a step of fit, {options.rounds} rounds of {options.steps} steps: median (quartiles)")
    for per_execution in options.per_execution:
        found = measure(per_execution, options.rounds, options.steps, options.data)
        plain = statistics.median(found["plain Keras"])
        for title, each in found.items():
            low, middle, high = statistics.quantiles(each, n=4)
            print(
                f"steps_per_execution={per_execution:<4d} {title:<15} {middle:7.1f} ({low:.1f} to {high:.1f}), "
                f"{middle / plain:.2f} of plain Keras",
                flush=True,
            )


def measure(per_execution: int, rounds: int, steps: int, data: str) -> dict[str, list[float]]:
    """Returns the microseconds of a step in each round, by title of the group.

    Raises:
        SystemExit: losses differ.
    """
    found: dict[str, list[float]] = {title: [] for title, _, _ in GROUPS}
    with contextlib.ExitStack() as stack:
        groups = {}
        for title, kind, ranks in GROUPS:
            worker = [sys.executable, "-m", "benchmarks.keras_fit", "--worker", kind]
            worker += ["--per-execution", str(per_execution), "--steps", str(steps), "--data", data]
            line = under_mpirun(worker, ranks) if kind == "whale" else worker
            groups[title] = stack.enter_context(Group(title, line, ranks, {}))
        for number in range(-_WARM_UP, rounds):
            losses = {}
            for title, group in groups.items():
                answers = group.ask(_STEP_TIMEOUT_S, steps=steps)
                losses[title] = answers[0]["loss"]
                if number >= 0:
                    found[title].append(max(one["fit_s"] for one in answers) / steps * 1e6)
            if max(losses.values()) - min(losses.values()) > _TOLERANCE * (1 + min(losses.values())):
                raise SystemExit(f"losses differ in round {number}: {losses}")
    return found


def work(kind: str, per_execution: int, most_steps: int, data: str) -> None:
    """Runs one process of a group: calls `fit` for as many steps as it is asked for."""

    def start() -> tuple[Answer, Callable[[], None]]:
        import numpy as np

        end: Callable[[], None] = lambda: None  # noqa: E731
        if kind == "whale":
            import whale as wh

            wh.init()
            end = wh.shutdown
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(1)
        x = np.random.default_rng(1).normal(size=(_ROWS * most_steps, _WIDTH)).astype("float32")
        y = x[:, :_CLASSES].argmax(axis=1)
        model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(_CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-3), loss, steps_per_execution=per_execution)

        def answer(steps: int) -> dict[str, Any]:
            start_s = time.perf_counter()
            rows = _ROWS * steps
            if data == "arrays":
                history = model.fit(x[:rows], y[:rows], batch_size=_ROWS, epochs=1, verbose=0)
            else:
                slices = tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows]))
                history = model.fit(slices.shuffle(1000, seed=1).batch(_ROWS), epochs=1, verbose=0)
            return {"fit_s": time.perf_counter() - start_s, "loss": float(history.history["loss"][-1])}

        answer(per_execution)
        return answer, end

    serve(int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")), start)


if __name__ == "__main__":
    main()
