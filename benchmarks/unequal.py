"""Ranks whose share of the processor is limited: even parts of the work beside those that the planner gives them.

    python -m benchmarks.unequal                       two ranks, 1 : 0.59, data parallel
    python -m benchmarks.unequal --ranks 4             two fast ones and two slow ones
    python -m benchmarks.unequal --what pipeline
    python -m benchmarks.unequal --what pipeline --ranks 4 --stages 2            two replicas of two stages
    python -m benchmarks.unequal --what pipeline --ranks 4 --depth 16            four stages

Each rank keeps to a core, and joins a control group with a quota of processor time (Linux, as root). Quotas are such
that the speeds of ranks which do equal work at the same time differ as asked. Then one program is trained with even
parts, and with what `auto_parallel` chooses from the speeds that it measures itself, in turns. A rank that works for
less than its quota has waited for others. Turns in which other processes took more than 15 % of a core are repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.machine import busy_s
from benchmarks.quota import Quota, groups

WIDTH, DEPTH, ROWS = 512, 8, 4608
MOST_CORES = 0.92  # of each core; the rest is for launcher and kernel
CALIBRATION_STEPS = 8
TURNS, MOST_TURNS = 6, 18
OTHERS = 0.15  # a turn is repeated if others took more than this part of a core


class Turn(NamedTuple):
    """A turn of each way.

    Attributes:
        others: cores that all processes but the ranks took.
        times: seconds of steps of each way; worked_s: seconds of processor time of one step on this rank.
    """

    others: float
    times: dict[str, list[float]]
    worked_s: dict[str, float]


def main() -> None:
    """Starts the ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slow", type=float, default=0.59, help="speed of every second rank")
    parser.add_argument("--what", choices=("data", "pipeline"), default="data")
    parser.add_argument("--stages", type=int, default=0, help="of the pipeline; as many as ranks unless given")
    parser.add_argument("--depth", type=int, default=DEPTH, help="number of layers")
    parser.add_argument("--seconds", type=float, default=8.0, help="of measuring each way")
    parser.add_argument("--micro-batches", type=int, default=0, help="of the pipeline; found unless given")
    parser.add_argument("--period-us", type=int, default=20_000, help="in which a quota is used up and given anew")
    parser.add_argument("--cores", type=float, default=MOST_CORES, help="of each core, for the ranks on it")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.stages = options.stages or options.ranks
    if options.rank:
        work(options)
        return
    with groups(options.ranks, options.period_us):
        given = [a for a in sys.argv[1:] if a != "--rank"]
        line = [sys.executable, "-m", "whale", "run", "-np", str(options.ranks), "--threads", "1"]
        sys.exit(subprocess.run([*line, "-m", "benchmarks.unequal", *given, "--rank"], check=False).returncode)


def work(options: argparse.Namespace) -> None:
    """What a rank does."""
    rank = int(os.environ["WHALE_RANK"])
    quota = Quota(rank, options.period_us)
    quota.join()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank * len(cores) // options.ranks]})  # ranks side by side are a fast and a slow one
    import msgspec
    import tensorflow as tf

    import whale as wh
    from whale.ir.strategy import ChosenStrategy
    from whale.planner.graph_search.strategies import divide_over_all
    from whale.runtime import context

    asked = {"pipeline.stages": options.stages} if options.what == "pipeline" else {}
    if options.micro_batches:
        asked["pipeline.micro_batches"] = options.micro_batches
    wh.init(wh.Config({"mesh.auto_parallel": True, **asked}))
    run = context.require_current()
    target = [options.slow if r % 2 else 1.0 for r in range(options.ranks)]
    most = options.cores * len(cores) / max(len(cores), sum(target))
    quota.set(most * target[rank])
    even = ChosenStrategy(divide_over_all("data parallel, equal rows", options.ranks))
    steps = {"even": built(even, run, options.depth)}
    calibrate(run, quota, steps["even"], target, most)
    steps["planned"] = built(None, run, options.depth)
    chosen = run.auto
    assert chosen is not None
    if options.what == "pipeline":
        ends = [options.depth * stage // options.stages for stage in range(options.stages + 1)]
        found = chosen.strategy
        stages = tuple(msgspec.structs.replace(one, layers=(own,)) for one, own in zip(found.stages, pairwise(ends)))
        even = ChosenStrategy(msgspec.structs.replace(found, name="stages of equal length", stages=stages))
        steps["even"] = built(even, run, options.depth)
    alone, batch = program(options.depth, tf.function)
    losses = [float(alone(*batch)) for _ in range(4)]
    error = max(abs(steps["planned"]() / loss - 1) for loss in losses[1:])  # `built` took one step
    turns = in_turns(run, steps, options.seconds)
    times = {name: [s for turn in turns for s in turn.times[name]] for name in steps}
    mine = [quota.cores, *(statistics.mean(turn.worked_s[name] for turn in turns) for name in ("even", "planned"))]
    said = [json.loads(one) for one in run.comms[0].allgather_bytes("unequal/used", json.dumps(mine).encode())]
    if rank == 0:
        took_s = [statistics.mean(times[name]) for name in ("even", "planned")]
        even_s, planned_s = (statistics.median(times[name]) for name in ("even", "planned"))
        for r, (given, *worked) in enumerate(said):
            parts = ", ".join(
                f"{name} {1e3 * s:.0f} ms a step, {s / t / given:.0%} of its quota"
                for name, s, t in zip(("even", "planned"), worked, took_s)
            )
            print(f"rank {r}: {given:.3f} cores; worked: {parts}", flush=True)
        text = f"even {1e3 * even_s:.1f} ms, planned {1e3 * planned_s:.1f} ms: {even_s / planned_s:.3f}x"
        if options.what == "data":
            speeds = [given / worked for given, worked, _ in said]  # that the ranks had meanwhile, for equal work
            ideal = sum(speeds) / len(speeds) / min(speeds)
            text += f" of {ideal:.3f}x that are possible: {even_s / planned_s / ideal:.1%}; speeds "
            text += " : ".join(f"{s / speeds[0]:.3f}" for s in speeds)
        print(f"{options.what}, {options.ranks} ranks: {text}; losses differ from one device by {error:.0e}")
        print(f"other processes took up to {max(turn.others for turn in turns):.2f} of a core meanwhile", flush=True)
        print(
            f"chosen: {chosen.strategy.name}, predicted {1e3 * chosen.step_s:.1f} ms, "
            f"measured {1e3 * planned_s:.1f} ms ({chosen.step_s / planned_s - 1:+.1%})",
            flush=True,
        )
    wh.shutdown()


def calibrate(run: Any, quota: Quota, step: Callable[[], float], target: list[float], most: float) -> None:
    """Sets this rank's quota so that all ranks' speeds are as asked.

    Speed is steps of equal work per second of processor time, times the quota: what else runs on a core for a moment
    changes what a rank does in a second, and quotas that follow that are wrong a moment later.

    Args:
        most: cores for a rank of speed 1.
    """
    for _ in range(2):
        step()
    start_s = time.process_time()
    for _ in range(CALIBRATION_STEPS):
        step()
    worked_s = time.process_time() - start_s
    said = run.comms[0].allgather_bytes("unequal/worked", json.dumps(worked_s).encode())
    slowest_s = max(float(json.loads(one)) for one in said)
    quota.set(most * target[run.rank] * worked_s / slowest_s)


def built(way: Any, run: Any, depth: int) -> Callable[[], float]:
    """A step of a fresh copy of the program, spread in this way; None: as auto_parallel finds."""
    run.auto = way
    import whale as wh

    step, batch = program(depth, wh.function)

    def call() -> float:
        return float(step(*batch))

    call()
    return call


def in_turns(run: Any, steps: dict[str, Callable[[], float]], seconds: float) -> list[Turn]:
    """The ways take turns, so that what changes on the machine meets all; the turns that others disturbed least.

    Args:
        seconds: of measuring each way.
    """
    once_s = {name: min(timed(step) for _ in range(2)) for name, step in steps.items()}
    counts = {name: max(2, round(seconds / TURNS / s)) for name, s in once_s.items()}
    said = run.comms[0].broadcast_bytes("unequal/counts", json.dumps(counts).encode() if run.rank == 0 else None)
    counts = json.loads(said)  # as many on every rank
    turns: list[Turn] = []
    while len(turns) < MOST_TURNS and sum(one.others <= OTHERS for one in turns) < TURNS:
        busy, begun_s, own_s = busy_s(), time.perf_counter(), time.process_time()
        times, worked_s = {}, {}
        for name, step in steps.items():
            step()  # the first one after another way's is colder
            start_s = time.process_time()
            times[name] = [timed(step) for _ in range(counts[name])]
            worked_s[name] = (time.process_time() - start_s) / counts[name]
        key = f"unequal/turn/{len(turns)}"
        mine = [time.process_time() - own_s, busy_s() - busy, time.perf_counter() - begun_s]
        said = [json.loads(one) for one in run.comms[0].allgather_bytes(key, json.dumps(mine).encode())]
        others = (said[0][1] - sum(one[0] for one in said)) / said[0][2]  # as rank 0 saw it, on every rank
        turns.append(Turn(others, times, worked_s))
    return sorted(turns, key=lambda one: one.others)[:TURNS]


def timed(step: Callable[[], float]) -> float:
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def program(depth: int, function: Callable[..., Any], rows: int = ROWS) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A chain of equal layers, most of whose time is products."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(1)
    weights = [
        tf.Variable(tf.constant(generator.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, tf.float32), name=f"w{i}")
        for i in range(depth)
    ]

    @function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.nn.relu(tf.linalg.matmul(h, weight))
            loss = tf.reduce_mean(tf.square(h - y))
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.01 * gradient)
        return loss

    x, y = (tf.constant(generator.normal(size=(rows, WIDTH)), tf.float32) for _ in range(2))
    return step, (x, y)


if __name__ == "__main__":
    main()
