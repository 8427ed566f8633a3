"""Measures every way of spreading one script of several sizes, beside the way that auto_parallel chooses.

    python benchmarks/auto_parallel.py --alone           one process with all cores, TensorFlow alone
    whale run -np 2 benchmarks/auto_parallel.py
    whale run -np 2 benchmarks/auto_parallel.py --crossovers    what is chosen as width, depth and classes grow
    whale run -np 4 benchmarks/auto_parallel.py --describe vit:layers=2,hidden=64,heads=4,image=32,patch=8,batch=32

A classifier with hidden layers of some width, some depth and some classes is trained, or a described model. On ranks,
each way to spread it is built and warmed up, and then all take turns, the chosen one among them; figures are medians,
and the last column is the chosen way's time over that of the fastest way. Where the chosen way is one of the others, it
is measured twice, and a further line says by how much the two differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["WHALE_MESH_PLAN_CACHE"] = ""  # what an earlier run chose, on a busier machine, is not to be measured

import numpy as np
import tensorflow as tf

# (width, depth, classes, rows)
SIZES = (
    (64, 2, 10, 32),
    (512, 2, 100, 1024),
    (2048, 2, 100, 32),
    (512, 1, 20_000, 32),
    (512, 1, 100_000, 32),
    (2048, 3, 10, 2),
)
INPUTS = 32


def main() -> None:
    """Measures all sizes and prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--alone", action="store_true", help="one process, without Whale")
    parser.add_argument("--seconds", type=float, default=8.0, help="of measuring each way")
    parser.add_argument("--size", type=int, action="append", help="number of a size to measure (repeatable)")
    parser.add_argument("--crossovers", action="store_true", help="what is chosen for models of growing size")
    parser.add_argument("--describe", action="append", help="a model as `whale plan` takes it (repeatable)")
    options = parser.parse_args()
    if options.describe:
        _described(options.describe, options.seconds)
        return
    if options.crossovers:
        _crossovers(options.seconds)
        return
    chosen = [SIZES[i] for i in options.size] if options.size else SIZES
    if options.alone:
        for size in chosen:
            print(f"{size}: {1e3 * _measure(size, tf.function, options.seconds, None):.2f} ms", flush=True)
        return
    _on_ranks(chosen, options.seconds)


PIPELINES = 3  # that are measured, of the many that are looked at


def _described(texts: list[str], seconds: float) -> None:
    """Each way that the search looked at, but of pipelines those with the lowest bounds of different depth."""
    from unittest import mock

    import msgspec

    import whale as wh
    from whale.errors import WhaleError
    from whale.ir.strategy import ChosenStrategy, ParallelStrategy
    from whale.planner.graph_search import search
    from whale.runtime import context

    wh.init(wh.Config({"mesh.auto_parallel": True}))
    run = context.require_current()
    looked_at: list[tuple[ParallelStrategy, float]] = []

    def noted(*arguments: Any) -> list[tuple[ParallelStrategy, float]]:
        looked_at[:] = list_ways(*arguments)
        return looked_at

    list_ways = search._list_looked_at
    for text in texts:
        run.planning.auto = None
        steps = {"chosen": _of_description(text, wh.function)}
        start_s = time.perf_counter()
        with mock.patch.object(search, "_list_looked_at", noted):
            steps["chosen"]()
        first_s = time.perf_counter() - start_s
        found = run.planning.auto
        assert found is not None
        ways = [choice for choice, _ in looked_at if not choice.is_pipelined]
        by_depth: dict[int, ParallelStrategy] = {}
        for choice, _ in sorted(looked_at, key=lambda one: one[1]):
            if choice.is_pipelined:
                by_depth.setdefault(len(choice.stages), choice)
        ways += list(by_depth.values())[:PIPELINES]
        said = run.comms[0].broadcast_bytes(
            f"benchmark/ways/{run.programs}", msgspec.json.encode(ways) if run.rank == 0 else None
        )
        lost: dict[str, str] = {}
        for way in msgspec.json.decode(said, type=list[ParallelStrategy]):
            run.planning.auto = ChosenStrategy(way)
            try:
                steps[way.name] = _of_description(text, wh.function)
                steps[way.name]()
            except WhaleError as error:
                lost[way.name] = error.message
                del steps[way.name]
        times = _in_turns(steps, seconds, run)
        auto_s = times.pop("chosen")
        if wh.rank() == 0:
            best_s = min(auto_s, *times.values())
            took = f"{1e3 * auto_s:.2f} ms (first step after {first_s:.1f} s)"
            print(
                f"{text}, {wh.size()} ranks: chosen {found.strategy.name} {took}; chosen / best {auto_s / best_s:.3f}"
            )
            for name, took_s in sorted(times.items(), key=lambda one: one[1]):
                print(f"  {name}: {1e3 * took_s:.2f} ms")
            for name, why in lost.items():
                print(f"  {name}: cannot run: {why}")
            sys.stdout.flush()
        del steps
        gc.collect()
    wh.shutdown()


def _of_description(text: str, function: Callable[..., Any]) -> Callable[[], float]:
    """A fresh copy of a described model's training step; a call takes one step and says how many seconds it took."""
    from whale.tools import models
    from whale.tools.models import make_step
    from whale.tools.plan_model import read

    described = read(text)
    step = function(make_step(described))
    generator = np.random.default_rng(1)
    # Ids of tables, and labels.
    most = min(getattr(described, name, 1 << 20) for name in ("rows", "vocabulary", "classes"))

    def drawn(name: str, shape: tuple[int, ...], dtype: str) -> tf.Tensor:
        if dtype.startswith("int"):
            clicks = name == "labels" and hasattr(described, "tables")
            return tf.constant(generator.integers(2 if clicks else most, size=shape), dtype)
        return tf.constant(generator.normal(size=shape), dtype)

    batch = [drawn(name, *what) for name, what in models.list_inputs(described).items()]

    def timed() -> float:
        start_s = time.perf_counter()
        float(step(*batch))
        return time.perf_counter() - start_s

    return timed


def _on_ranks(sizes: Any, seconds: float) -> None:
    from msgspec.structs import replace

    import whale as wh
    from whale.ir.strategy import ChosenStrategy
    from whale.planner.graph_search.strategies import divide_over_all
    from whale.runtime import context
    from whale_ops.processor import count_threads

    wh.init(wh.Config({"mesh.auto_parallel": True}))
    run = context.require_current()
    for size in sizes:
        run.planning.auto = None
        steps = {"chosen": _program(size, wh.function)}
        steps["chosen"]()
        found = run.planning.auto
        assert found is not None
        ways = [
            divide_over_all("data parallel", wh.size()),
            divide_over_all("every rank alone", wh.size(), replicated=True),
        ]
        ways.append(divide_over_all("split of the classifier", wh.size(), wh.size(), split=("classifier/kernel",)))
        threads = wh.size() * count_threads()
        ways.append(divide_over_all(f"rank 0 alone, {threads} threads", wh.size(), lent_threads=threads))
        for way in ways:
            run.planning.auto = ChosenStrategy(way)
            steps[way.name] = _program(size, wh.function)
            steps[way.name]()
        times = _in_turns(steps, seconds, run)
        auto_s = times.pop("chosen")
        if wh.rank() == 0:
            text = ", ".join(f"{name} {1e3 * took_s:.2f} ms" for name, took_s in times.items())
            best_s = min(auto_s, *times.values())
            took = f"{found.strategy.name} {1e3 * auto_s:.2f} ms"
            print(f"{size}: chosen {took}; {text}; chosen / best {auto_s / best_s:.3f}")
            for way in ways:  # what differs between these two is not the choice
                if replace(found.strategy, name=way.name) == way:
                    print(f"  the chosen way, built and measured a second time: {times[way.name] / auto_s:.3f} of that")
            sys.stdout.flush()
        del steps
        gc.collect()
    wh.shutdown()


TURNS = 12  # of which the first two are left out: a process is slow at first


def _in_turns(steps: dict[str, Callable[[], float]], seconds: float, run: Any) -> dict[str, float]:
    """Median seconds of a step of each way; the ways take turns, in another order each time.

    Args:
        seconds: of measuring each way.
    """
    once_s = {name: min(step() for _ in range(3)) for name, step in steps.items()}
    counts = {name: max(2, min(100, round(seconds / TURNS / s))) for name, s in once_s.items()}
    said = run.comms[0].broadcast_bytes(
        f"benchmark/{run.programs}", json.dumps(counts).encode() if run.rank == 0 else None
    )
    counts = json.loads(said)  # as many on every rank
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(TURNS):
        names = names[1:] + names[:1]
        for name in names if turn % 2 else names[::-1]:
            took = [steps[name]() for _ in range(counts[name] + 1)][1:]  # the first one after another way's is colder
            if turn >= 2:
                times[name] += took
    return {name: statistics.median(each) for name, each in times.items()}


WIDTHS, DEPTHS, CLASSES = (16, 64, 256, 1024, 2048), (1, 2, 4, 8), (10, 1_000, 10_000, 50_000)


def _crossovers(seconds: float) -> None:
    """One script, parameterised: what is found for it as one number grows, and where that changes."""
    import whale as wh
    from whale.runtime import context

    wh.init(wh.Config({"mesh.auto_parallel": True}))
    run = context.require_current()
    sweeps = (
        ("width", WIDTHS, lambda n: (n, 4, 10, 512)),
        ("depth", DEPTHS, lambda n: (1024, n, 10, 512)),
        ("classes", CLASSES, lambda n: (256, 1, n, 128)),
    )
    for name, values, size_of in sweeps:
        before = ""
        for value in values:
            run.planning.auto = None
            took_s = _measure(size_of(value), wh.function, seconds, run)
            assert run.planning.auto is not None
            kind = _kind(run.planning.auto.strategy)
            if wh.rank() == 0:
                change = f"  <- from {before} to {kind}" if before not in ("", kind) else ""
                print(f"{name} {value}: {run.planning.auto.strategy.name}, {1e3 * took_s:.2f} ms{change}", flush=True)
            before = kind
    wh.shutdown()


def _kind(strategy: Any) -> str:
    if strategy.replicated:
        return "one device"
    if strategy.is_pipelined:
        return "pipeline"
    return "hybrid (rows and tensors divided)" if strategy.split else "data parallel"


def _measure(size: Any, function: Callable[..., Any], least_s: float, run: Any) -> float:
    """Median seconds of a step."""
    step = _program(size, function)
    once_s = min(step() for _ in range(3))
    count = max(5, min(300, int(least_s / once_s))) if least_s else 1
    if run is not None and run.has_other_processes:  # as many steps on every rank
        count = int(run.comms[0].broadcast_bytes("benchmark/count", b"%d" % count if run.rank == 0 else None))
    return statistics.median(step() for _ in range(count))


def _program(size: Any, function: Callable[..., Any]) -> Callable[[], float]:
    """A fresh copy of the training step; a call takes one step and says how many seconds it took."""
    width, depth, classes, rows = size
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    layers.append(tf.keras.layers.Dense(classes, name="classifier"))
    features = INPUTS
    for layer in layers:
        layer.build((None, features))
        features = layer.units
    weights = [w for layer in layers for w in layer.trainable_variables]
    optimizer = tf.keras.optimizers.SGD(0.01)
    optimizer.build(weights)

    @function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for layer in layers:
                h = layer(h)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=h))
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    generator = np.random.default_rng(1)
    x = tf.constant(generator.normal(size=(rows, INPUTS)), tf.float32)
    y = tf.constant(generator.integers(classes, size=rows), tf.int32)

    def timed() -> float:
        start_s = time.perf_counter()
        float(step(x, y))
        return time.perf_counter() - start_s

    return timed


if __name__ == "__main__":
    main()
