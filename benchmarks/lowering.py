"""Seconds from a traced step to a callable one: ResNet50 (Keras 3) with Adam at 64x64, in one process.

    python -m benchmarks.lowering [--ranks 2] [--repeats 3]
    python -m benchmarks.lowering --rank-0-of 4 64 1024 [--repeats 5]
    python -m benchmarks.lowering --mesh 4,8,32 4,8,8 2,4,4 [--layers 24]

The ranks live in this process, so `partition` and `import` are those of all of them. Tracing is TensorFlow's own time;
what is printed is the fastest of the repeats for each phase after it.

With --rank-0-of, what the first of that many ranks does by itself: planning, lowering its part, and writing it as
TensorFlow's messages. Ends with status 1 when the times differ by more than 10 %, or one is above 3 s.

With --mesh, processor seconds in which the last of stage,data,tensor ranks lowers its part of a GPT whose plan it has,
beside those of the last of as many data parallel ranks for the same GPT. Ends with status 1 when the first mesh takes
more than 1.5 x that, or the meshes differ by more than 10 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import inf, prod
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["WHALE_MESH_PLAN_CACHE"] = ""  # what is measured is to be done

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.steps import train_step
from tests.pipelines.gpt_on_ranks import Gpt, Sizes
from whale.capture.encode import encode_function_def
from whale.capture.function import capture_function
from whale.ir.collector import suspend_garbage_collection
from whale.ir.mesh import Axis, format_axes
from whale.ir.program import Program
from whale.partition.lower import lower_ranks, make_any_plan
from whale.partition.spmd import partition_for_rank
from whale.passes.pass_manager import make_plan, normalise
from whale.passes.plan_builder import expand
from whale.passes.settings import PlanSettings
from whale_ops import load_ops

_MOST_S, _MOST_APART, _MOST_TIMES = 3.0, 0.1, 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank-0-of", type=int, nargs="+", metavar="RANKS")
    parser.add_argument("--mesh", nargs="+", metavar="STAGE,DATA,TENSOR")
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    if options.mesh:
        sizes = [tuple(map(int, mesh.split(","))) for mesh in options.mesh]
        return last_rank_of_meshes(sizes, options.layers, options.repeats)
    step = train_step(resnet50())
    if options.rank_0_of:
        return first_rank(step, options.rank_0_of, options.repeats)
    x, y = np.zeros((8, 64, 64, 3), np.float32), np.zeros(8, np.int32)
    fastest_s: dict[str, float] = {}
    for _ in range(options.repeats):
        wh.init(wh.Config({"communication.in_process_ranks": options.ranks}))
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
    load_ops()  # registers them
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
    with suspend_garbage_collection():
        lowered = partition_for_rank(expand(normalised, plan.expanded, settings), plan, 0, "benchmark", "benchmark")
        lap("partition")
        encode_function_def(lowered, "benchmark")
        lap("encode")
    return {**seconds, "together": last_s - start_s}


def last_rank_of_meshes(meshes: Sequence[tuple[int, ...]], layers: int, repeats: int) -> int:
    """Prints what the last rank of each mesh needs beside one axis of as many ranks; the status to end with."""
    wh.init({})
    tensor = max(mesh[2] for mesh in meshes)
    rows = 2 * max(map(prod, meshes))
    sizes = Sizes(rows=rows, width=4 * tensor, heads=tensor, words=8 * tensor, layers=layers)
    spread: dict[str, Callable[[], object]] = {}
    for mesh in meshes:
        axes = tuple(Axis(name, size) for name, size in zip(("stage", "data", "tensor"), mesh))
        program = captured_gpt(sizes, mesh[0], wh.stage, wh.split)
        spread[format_axes(axes)] = lowering_of(program, PlanSettings(prod(mesh), mesh=axes))
    alone = f"data={prod(meshes[0])}"
    spread[alone] = lowering_of(captured_gpt(sizes, 1, nullcontext, nullcontext), PlanSettings(prod(meshes[0])))
    fastest_s = fastest_of_each(spread, repeats)
    for name, seconds in fastest_s.items():
        print(f"  {name:30s} {seconds:7.3f} s")
    alone_s = fastest_s.pop(alone)
    first_s, *_ = fastest_s.values()
    apart = max(fastest_s.values()) / min(fastest_s.values()) - 1
    times = first_s / alone_s
    print(f"  {times:.2f} x one axis (at most {_MOST_TIMES}); meshes {apart:.1%} apart (at most {_MOST_APART:.0%})")
    return int(times > _MOST_TIMES or apart > _MOST_APART)


def captured_gpt(sizes: Sizes, stages: int, stage: Any, split: Any) -> Program:
    """A step of a GPT in some stages."""
    model = Gpt(sizes)

    def step(tokens: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.loss(tokens, following, stages, stage, split)
        for variable, slope in zip(model.variables, tape.gradient(loss, model.variables)):
            variable.assign_sub(0.1 * tf.convert_to_tensor(slope))
        return loss

    tokens = tf.zeros((sizes.rows, sizes.length), tf.int32)
    return capture_function(step, (tokens, tokens)).program


def lowering_of(program: Program, settings: PlanSettings) -> Callable[[], object]:
    """What lowers the last rank's part, the plan being given."""
    normalised = normalise(program, settings)
    plan = make_any_plan(normalised, settings)
    return lambda: lower_ranks(normalised, plan, settings, [settings.size - 1])


def fastest_of_each(spread: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Processor seconds of each, the least of the repeats, which are taken in turns: other processes slow all alike."""
    fastest_s = dict.fromkeys(spread, inf)
    for _ in range(repeats):
        for name, lower in spread.items():
            start_s = time.process_time()
            lower()
            fastest_s[name] = min(fastest_s[name], time.process_time() - start_s)
    return fastest_s


if __name__ == "__main__":
    sys.exit(main())
