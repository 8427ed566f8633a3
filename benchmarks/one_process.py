"""Step time of `wh.function` on one rank beside plain `tf.function`, in one process, interleaved.

    python -m benchmarks.one_process [--pairs 40] [--models mlp mobilenet resnet50 gpt vit dlrm lstm] [--zoo]

Two copies of the same model are stepped alternately, so that what else the machine does meets both. Prints the
median step time of each and their ratio; with `--zoo` also those of the tests' programs in float32, most of which are
so small that the call is what is measured.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.step_time.models import WORKLOADS, Features, Workload
from benchmarks.steps import train_step
from tests.zoo import graphs
from tests.zoo.case import Case, Setting, build, flavour
from tests.zoo.catalogue import CASES


def mlp(keras: Any) -> Any:
    """Steps of well under a millisecond of arithmetic: what is measured is the call."""
    layers = keras.layers
    return keras.Sequential([layers.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(10)])


def mobilenet(keras: Any) -> Any:
    """MobileNetV2 of full width on images of 32x32."""
    return keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=10, classifier_activation=None)


def _batch(*shape: int) -> Callable[[np.random.Generator], tuple[Features, np.ndarray]]:
    def batch(generator: np.random.Generator) -> tuple[Features, np.ndarray]:
        return (generator.normal(size=shape).astype(np.float32),), np.arange(shape[0], dtype=np.int32) % 10

    return batch


MODELS = {
    "mlp": Workload(32, mlp, _batch(32, 32), "Adam"),
    "mobilenet": Workload(8, mobilenet, _batch(8, 32, 32, 3), "Adam"),
    **{name: WORKLOADS[name] for name in ("resnet50", "gpt", "vit", "dlrm", "lstm")},
}


def model_step(workload: Workload, function: Callable[[Callable[..., Any]], Any]) -> Callable[[], Any]:
    """A training step with Adam, whatever the workload's optimizer, already traced; returns its loss."""
    tf.keras.utils.set_random_seed(1)
    wrapped = function(train_step(workload.make(tf.keras)))
    features, labels = workload.inputs(np.random.default_rng(0))
    given = tuple(tf.constant(one) for one in features)
    inputs = given if len(given) > 1 else given[0], tf.constant(labels, tf.int32)
    wrapped(*inputs)
    return lambda: float(wrapped(*inputs))


def zoo_step(case: Case, function: Callable[[Callable[..., Any]], Any]) -> Callable[[], Any]:
    """The training step of one of the tests' programs, already traced."""
    optimizer = "adam" if "adam" in case.optimizers else case.optimizers[0]
    program = build(case, Setting("float32", optimizer, function, gradients=False))
    (batch,) = program.batches(1)
    program.run_step(batch)
    return lambda: program.run_step(batch)


def ratio(name: str, make: Callable[[Callable[..., Any]], Callable[[], Any]], pairs: int) -> float:
    """Prints a line; the step's time over that of `tf.function`."""
    steps = {"tf.function": make(tf.function), "wh.function": make(wh.function)}
    times_s: dict[str, list[float]] = {way: [] for way in steps}
    for index in range(5 + pairs):
        for way, step in steps.items():
            start_s = time.perf_counter()
            step()
            if index >= 5:
                times_s[way].append(time.perf_counter() - start_s)
    medians_s = {way: statistics.median(values) for way, values in times_s.items()}
    found = medians_s["wh.function"] / medians_s["tf.function"]
    shown = ", ".join(f"{way} {1e3 * value:.2f} ms" for way, value in medians_s.items())
    print(f"{name:24s} medians of {pairs}: {shown}, ratio {found:.3f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40, help="interleaved measurements of each program")
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=tuple(MODELS), metavar="MODEL")
    parser.add_argument("--zoo", action="store_true", help="the programs of tests/zoo as well")
    options = parser.parse_args()
    wh.init()
    for name in options.models:
        ratio(name, functools.partial(model_step, MODELS[name]), options.pairs)
    if options.zoo:
        # Sessions are TensorFlow's own where one rank is alone.
        without_sessions = [case for case in CASES if case not in graphs.CASES]
        cases = [case for case in without_sessions if flavour() in case.flavours and "float32" in case.dtypes]
        found = {case.name: ratio(case.name, functools.partial(zoo_step, case), options.pairs) for case in cases}
        worst = max(found, key=found.__getitem__)
        median = statistics.median(found.values())
        print(f"{len(found)} programs: median ratio {median:.3f}, highest {found[worst]:.3f} ({worst})")
    wh.shutdown()


if __name__ == "__main__":
    main()
