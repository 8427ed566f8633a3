"""What a trace costs: the same steps with and without one, in turn, on the two processes of one run.

    whale run -np 2 --trace /tmp/trace.json benchmarks/trace.py [--rounds 30] [--steps 40]

The steps do nothing but all-reduce small tensors, one by one: the most events in the least time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import whale as wh
from whale.runtime.context import require_current


def step_of(tensors: int) -> Callable[[Any], Any]:
    """A step with as many all-reduces."""
    variables = [tf.Variable(tf.ones([4, 4])) for _ in range(tensors)]

    @wh.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.square(tf.matmul(x, v))) for v in variables])
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(1e-3 * gradient)

    return step  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    wh.init({"communication.bucket_bytes": 0})
    context = require_current("the trace benchmark")
    (comm,), trace = context.comms, context.trace
    assert trace is not None, "start it under `whale run --trace`"
    x = tf.ones([8, 4])
    for tensors in (1, 20):
        ways = {True: step_of(tensors), False: step_of(tensors)}
        ways[True](x)
        context.trace = None  # steps that are compiled now are not traced
        ways[False](x)
        context.trace = trace
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(options.rounds):
            for traced, step in ways.items():
                if not traced:
                    comm.trace_stop()
                for _ in range(options.steps):
                    start_s = time.perf_counter()
                    step(x)
                    seconds[traced].append(time.perf_counter() - start_s)
                if not traced:
                    comm.trace_start(trace.descriptor)
        if wh.rank() == 0:
            of = {traced: statistics.median(found) * 1e6 for traced, found in seconds.items()}
            more = of[True] - of[False]
            print(
                f"{tensors:3d} all-reduces: a step takes {of[False]:.0f} us, {more:+.0f} us ({more / of[False]:+.1%})"
            )
    wh.shutdown()


if __name__ == "__main__":
    main()
