"""Ranks whose share of the processor is limited: even parts of the work beside those that the planner gives them.

    python benchmarks/unequal.py                       two ranks, 1 : 0.59, data parallel
    python benchmarks/unequal.py --ranks 4             two fast ones and two slow ones
    python benchmarks/unequal.py --what pipeline
    python benchmarks/unequal.py --what pipeline --ranks 4 --stages 2            two replicas of two stages
    python benchmarks/unequal.py --what pipeline --ranks 4 --depth 16            four stages

Each rank keeps to a core, and joins a control group with a quota of processor time (Linux, as root). Quotas are
corrected until the speeds that the ranks measure while all of them work differ as asked. Then one program is trained
with even parts, and with what `auto_parallel` chooses from the speeds that it measures itself, in turns. A rank that
works for less than its quota has waited for others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PERIOD_US = 20_000
CPU = Path("/sys/fs/cgroup/cpu")  # version 1
UNIFIED = Path("/sys/fs/cgroup")
NAME = "whale_unequal_{}"
WIDTH, DEPTH, ROWS = 512, 8, 4608
MOST_CORES = 0.92  # of each core; the rest is for launcher and kernel
ROUNDS = 6  # of measuring speeds
TURNS = 8


class Quota:
    """A control group of one rank."""

    def __init__(self, rank: int) -> None:
        self.first = (CPU / "cpu.cfs_quota_us").exists() or CPU.is_dir()
        self.folder = (CPU if self.first else UNIFIED) / NAME.format(rank)
        self.cores = 0.0

    def make(self) -> None:
        """Makes the group.

        Raises:
            OSError: control groups cannot be written.
        """
        if not self.first:
            (UNIFIED / "cgroup.subtree_control").write_text("+cpu")
        self.folder.mkdir(exist_ok=True)

    def join(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def set(self, cores: float) -> None:
        quota_us = max(1000, round(cores * PERIOD_US))
        self.cores = quota_us / PERIOD_US
        if self.first:
            (self.folder / "cpu.cfs_quota_us").write_text("-1")
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self.folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")

    def remove(self) -> None:
        self.folder.rmdir()


@contextmanager
def groups(ranks: int) -> Iterator[None]:
    """Control groups for so many ranks, removed at the end."""
    made = [Quota(rank) for rank in range(ranks)]
    for one in made:
        one.make()
    try:
        yield
    finally:
        for one in made:
            for _ in range(50):
                try:
                    one.remove()
                    break
                except OSError:  # its last process is about to end
                    time.sleep(0.1)


def main() -> None:
    """Starts the ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slow", type=float, default=0.59, help="speed of every second rank")
    parser.add_argument("--what", choices=("data", "pipeline"), default="data")
    parser.add_argument("--stages", type=int, default=0, help="of the pipeline; as many as ranks unless given")
    parser.add_argument("--depth", type=int, default=DEPTH, help="number of layers")
    parser.add_argument("--seconds", type=float, default=8.0, help="of measuring each way")
    parser.add_argument("--cores", type=float, default=MOST_CORES, help="of each core, for the ranks on it")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.stages = options.stages or options.ranks
    if options.rank:
        work(options)
        return
    with groups(options.ranks):
        given = [a for a in sys.argv[1:] if a != "--rank"]
        line = [sys.executable, "-m", "whale", "run", "-np", str(options.ranks), "--threads", "1", __file__]
        sys.exit(subprocess.run([*line, *given, "--rank"], check=False).returncode)


def work(options: argparse.Namespace) -> None:
    """What a rank does."""
    rank = int(os.environ["WHALE_RANK"])
    quota = Quota(rank)
    quota.join()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank * len(cores) // options.ranks]})  # ranks side by side are a fast and a slow one
    import msgspec
    import tensorflow as tf

    import whale as wh
    from whale.planner.programs import Choice
    from whale.runtime import context

    stages = {"pipeline.num_stages": options.stages} if options.what == "pipeline" else {}
    wh.init(wh.Config({"auto_parallel": True, **stages}))
    run = context.current()
    target = [options.slow if r % 2 else 1.0 for r in range(options.ranks)]
    most = options.cores * len(cores) / max(len(cores), sum(target))
    speeds = calibrate(run, quota, target, most)
    steps = {"planned": built(None, run, options.depth)}
    chosen = run.auto
    assert chosen is not None
    even = Choice("data parallel, equal rows")
    if options.what == "pipeline":
        cuts = tuple(options.depth * stage // options.stages for stage in range(1, options.stages))
        even = msgspec.structs.replace(chosen, name="stages of equal length", cuts=cuts)
    steps["even"] = built(even, run, options.depth)
    alone, batch = program(options.depth, tf.function)
    losses = [float(alone(*batch)) for _ in range(4)][1:]  # `built` took one step
    error = max(abs(step() / loss - 1) for step in steps.values() for loss in losses)
    times, used_s = in_turns(run, steps, options.seconds)
    mine = [quota.cores, used_s["even"], used_s["planned"]]
    said = [json.loads(one) for one in run.comms[0].allgather_bytes("unequal/used", json.dumps(mine).encode())]
    if rank == 0:
        took_s = [statistics.mean(times[name]) for name in ("even", "planned")]
        even_s, planned_s = (statistics.median(times[name]) for name in ("even", "planned"))
        ideal = sum(target) / len(target) / min(target)
        for r, (given, *worked) in enumerate(said):
            parts = ", ".join(
                f"{name} {1e3 * s:.0f} ms a step, {s / t / given:.0%} of its quota"
                for name, s, t in zip(("even", "planned"), worked, took_s)
            )
            print(f"rank {r}: speed {speeds[r] / speeds[0]:.3f}, {given:.3f} cores; worked: {parts}", flush=True)
        text = f"even {1e3 * even_s:.1f} ms, planned {1e3 * planned_s:.1f} ms: {even_s / planned_s:.3f}x"
        if options.what == "data":
            text += f" of {ideal:.3f}x that are possible: {even_s / planned_s / ideal:.1%}"
        print(
            f"{options.what}, {options.ranks} ranks: {text}; losses differ from one device by {error:.0e}", flush=True
        )
        print(
            f"chosen: {chosen.name}, predicted {1e3 * chosen.predicted_s:.1f} ms, "
            f"measured {1e3 * planned_s:.1f} ms ({chosen.predicted_s / planned_s - 1:+.1%})",
            flush=True,
        )
    wh.shutdown()


def calibrate(run: Any, quota: Quota, target: list[float], most: float) -> list[float]:
    """Sets this rank's quota until all ranks' speeds are as asked; the speeds, in products per second.

    Args:
        most: cores for a rank of speed 1.
    """
    import tensorflow as tf

    mine = most * target[run.rank]
    x = tf.random.normal([512, 512])
    product = tf.function(lambda: tf.linalg.matmul(x, x))
    for attempt in range(3):
        quota.set(mine)
        rounds = []
        for number in range(ROUNDS):
            run.comms[0].broadcast_bytes(f"unequal/{attempt}/{number}", b"" if run.rank == 0 else None)
            product()
            count, start_s = 0, time.perf_counter()
            while time.perf_counter() < start_s + 0.6:
                float(product()[0, 0])
                count += 1
            own = count / (time.perf_counter() - start_s)
            said = run.comms[0].allgather_bytes(f"unequal/speed/{attempt}/{number}", json.dumps(own).encode())
            rounds.append([float(json.loads(one)) for one in said])
        # The median: a core is slower at some times, and to follow that would make quotas differ from what was asked.
        speeds = [statistics.median(one[r] for one in rounds) for r in range(run.size)]
        per_target = [s / t for s, t in zip(speeds, target)]
        if max(per_target) < 1.03 * min(per_target):
            break
        mine = min(1.03 * most * target[run.rank], mine * statistics.mean(per_target) / per_target[run.rank])
    return speeds


def built(way: Any, run: Any, depth: int) -> Callable[[], float]:
    """A step of a fresh copy of the program, spread in this way; None: as auto_parallel finds."""
    run.auto = way
    import whale as wh

    step, batch = program(depth, wh.function)

    def call() -> float:
        return float(step(*batch))

    call()
    return call


def in_turns(
    run: Any, steps: dict[str, Callable[[], float]], seconds: float
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """(seconds of steps of each way, seconds of processor time that one takes this rank).

    The ways take turns, so that what changes on the machine meets all.

    Args:
        seconds: of measuring each way.
    """
    once_s = {name: min(timed(step) for _ in range(2)) for name, step in steps.items()}
    counts = {name: max(2, round(seconds / TURNS / s)) for name, s in once_s.items()}
    said = run.comms[0].broadcast_bytes("unequal/counts", json.dumps(counts).encode() if run.rank == 0 else None)
    counts = json.loads(said)  # as many on every rank
    times: dict[str, list[float]] = {name: [] for name in steps}
    worked: dict[str, float] = dict.fromkeys(steps, 0.0)
    for _ in range(TURNS):
        for name, step in steps.items():
            step()  # the first one after another way's is colder
            start_s = time.process_time()
            times[name] += [timed(step) for _ in range(counts[name])]
            worked[name] += time.process_time() - start_s
    return times, {name: worked[name] / len(times[name]) for name in steps}


def timed(step: Callable[[], float]) -> float:
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def program(depth: int, function: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, Any]]:
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

    x, y = (tf.constant(generator.normal(size=(ROWS, WIDTH)), tf.float32) for _ in range(2))
    return step, (x, y)


if __name__ == "__main__":
    main()
