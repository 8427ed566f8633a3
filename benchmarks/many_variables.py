"""Processor seconds that a step of many variables takes to be compiled, and how they grow with their number.

    whale run -np 2 benchmarks/many_variables.py [--variables 1000 3000 10000] [--optimizer Adam]

Products with vectors one after the other, under wh.replica, and an update of each by Keras' optimizer. Of rank 0, which
plans: from the traced function to the functions that TensorFlow calls, without what tracing itself takes. The exponent
is that of the slope between the least and the largest number. Ends with status 1 when 10,000 variables take more than
20 s, or the exponent is above 1.1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from math import log
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["WHALE_MESH_PLAN_CACHE"] = ""  # what is measured is to be done
sys.path.insert(0, str(Path(__file__).parents[1]))

import tensorflow as tf

import whale as wh
from benchmarks.tracing import traced_apart

_MOST_S, _OF, _MOST_EXPONENT = 20.0, 10_000, 1.1
_ROWS, _WIDTH, _FIRST = 8, 4, 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variables", type=int, nargs="+", default=(1000, 3000, 10_000))
    parser.add_argument("--optimizer", default="Adam", help="a class of tf.keras.optimizers")
    options = parser.parse_args()
    wh.init()
    compiled_s(_FIRST, options.optimizer)  # loads what is imported late
    seconds = {count: compiled_s(count, options.optimizer) for count in sorted(set(options.variables))}
    few, many = min(seconds), max(seconds)
    exponent = log(seconds[many] / seconds[few]) / log(many / few) if many > few else 1.0
    planning = wh.rank() == 0
    if planning and many > few:
        print(f"exponent {exponent:.2f} (at most {_MOST_EXPONENT})", flush=True)
    wh.shutdown()
    return int(planning and (seconds.get(_OF, 0.0) > _MOST_S or exponent > _MOST_EXPONENT))


def compiled_s(count: int, optimizer: str) -> float:
    """Processor seconds of compiling, without tracing, and says them."""
    with wh.replica():
        variables = [tf.Variable(tf.ones(_WIDTH)) for _ in range(count)]
        updates = getattr(tf.keras.optimizers, optimizer)(1e-3)
        updates.build(variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape, wh.replica():
            y = x
            for variable in variables:
                y = y * variable
            loss = tf.reduce_mean(tf.square(y))
        updates.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    function = wh.function(tf.autograph.experimental.do_not_convert(step))
    with traced_apart() as traced_s:
        start_s = time.process_time()
        phases = function.compile_seconds(tf.ones((_ROWS, _WIDTH)))
        whole_s, tracing_s = time.process_time() - start_s, traced_s[0]
    if wh.rank() == 0 and count > _FIRST:
        shown = ", ".join(f"{name} {s:.2f}" for name, s in phases.items() if s >= 0.01)
        print(
            f"{count:6d} variables: {whole_s - tracing_s:6.2f} s of processor time beside {tracing_s:.2f} s of tracing"
        )
        print(f"       by the clock: {shown}", flush=True)
    return whole_s - tracing_s


if __name__ == "__main__":
    sys.exit(main())
