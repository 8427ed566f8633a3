"""Seconds from a traced step to a callable one: ResNet50 (Keras 3) with Adam at 64x64, in one process.

    python -m benchmarks.lowering [--ranks 2] [--repeats 3]
    python -m benchmarks.lowering --rank-0-of 4 64 1024 [--repeats 5]

The ranks live in this process, so `localise` and `import` are those of all of them. Tracing is TensorFlow's own time;
what is printed is the fastest of the repeats for each phase after it.

With --rank-0-of, what the first of that many ranks does by itself: planning, lowering its part, and writing it as
TensorFlow's messages. Ends with status 1 when the times differ by more than 10 %, or one is above 3 s.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.steps import train_step
from whale.capture.encode import to_function_def
from whale.capture.function import capture_function
from whale.ir.collector import no_garbage_collection
from whale.ir.program import Program
from whale.lowering.local import localise
from whale.passes.lay_out import expand
from whale.passes.order import make_plan, normalise
from whale.passes.settings import PlanSettings
from whale_ops import ops

_MOST_S, _MOST_APART = 3.0, 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank-0-of", type=int, nargs="+", metavar="RANKS")
    options = parser.parse_args()
    step = train_step(resnet50())
    if options.rank_0_of:
        return first_rank(step, options.rank_0_of, options.repeats)
    x, y = np.zeros((8, 64, 64, 3), np.float32), np.zeros(8, np.int32)
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
    return 0


def resnet50() -> Any:
    return tf.keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None)


def first_rank(step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], sizes: Sequence[int], repeats: int) -> int:
    """Prints what rank 0 of each number of ranks needs; the status to end with."""
    ops()  # registers them
    rows = 2 * max(sizes)
    program = capture_function(step, (tf.zeros((rows, 64, 64, 3)), tf.zeros(rows, tf.int32))).program
    print(f"ResNet50, batch {rows}: {len(program.nodes)} nodes")
    fastest_s: dict[int, dict[str, float]] = {}
    for _ in range(repeats):
        for size in sizes:
            seconds = lower_once(program, size)
            fastest_s[size] = {k: min(v, fastest_s.get(size, seconds)[k]) for k, v in seconds.items()}
    for size, seconds in fastest_s.items():
        print(f"  rank 0 of {size:5d}: " + ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items()))
    totals_s = [seconds["together"] for seconds in fastest_s.values()]
    apart = max(totals_s) / min(totals_s) - 1
    print(f"  {apart:.1%} apart (at most {_MOST_APART:.0%}), the slowest {max(totals_s):.2f} s (at most {_MOST_S} s)")
    return int(apart > _MOST_APART or max(totals_s) > _MOST_S)


def lower_once(program: Program, size: int) -> dict[str, float]:
    """Seconds of each phase for rank 0 of ``size``."""
    settings, seconds = PlanSettings(size), {}
    start_s = last_s = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last_s
        seconds[name], last_s = time.perf_counter() - last_s, time.perf_counter()

    normalised = normalise(program, settings)
    lap("normalise")
    plan = make_plan(normalised, settings)
    lap("plan")
    with no_garbage_collection():
        lowered = localise(expand(normalised, plan.expanded, settings), plan, 0, "benchmark", "benchmark")
        lap("localise")
        to_function_def(lowered, "benchmark")
        lap("encode")
    return {**seconds, "together": last_s - start_s}


if __name__ == "__main__":
    sys.exit(main())
