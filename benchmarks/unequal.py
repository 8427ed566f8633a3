"""Ranks whose share of the processor is limited: even parts of the work beside those that the planner gives them.

    python benchmarks/unequal.py                       two ranks, 1 : 0.59, data parallel
    python benchmarks/unequal.py --ranks 4             two fast ones and two slow ones
    python benchmarks/unequal.py --what pipeline

Each rank joins a control group with a quota of processor time (Linux, as root). Quotas are corrected until the speeds
that the ranks measure while all of them work differ as asked. Then one program is trained with even parts, and with
what `auto_parallel` chooses from the speeds that it measures itself.
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
MOST_CORES = 0.92  # of all that the machine has; the rest is for launcher, exchanges and kernel


class Quota:
    """A control group of one rank."""

    def __init__(self, rank: int) -> None:
        self.first = (CPU / "cpu.cfs_quota_us").exists() or CPU.is_dir()
        self.folder = (CPU if self.first else UNIFIED) / NAME.format(rank)

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
    parser.add_argument("--seconds", type=float, default=8.0, help="of measuring each way")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
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
    import msgspec

    import whale as wh
    from whale.planner.programs import Choice
    from whale.runtime import context

    stages = {"pipeline.num_stages": options.ranks} if options.what == "pipeline" else {}
    wh.init(wh.Config({"auto_parallel": True, **stages}))
    run = context.current()
    target = [options.slow if r % 2 else 1.0 for r in range(options.ranks)]
    speeds = calibrate(run, quota, target)
    chosen = measure(run, 0.0, None)[1]
    even = Choice("data parallel, equal rows")
    if options.what == "pipeline":
        cuts = tuple(DEPTH * stage // options.ranks for stage in range(1, options.ranks))
        even = msgspec.structs.replace(chosen, name="stages of equal length", cuts=cuts)
    times: dict[str, list[float]] = {"even": [], "planned": []}
    for _ in range(3):  # in turns, so that what changes on the machine meets both
        for name, way in (("even", even), ("planned", chosen)):
            times[name] += measure(run, options.seconds / 3, way)[0]
    if rank == 0:
        even_s, planned_s = (statistics.median(times[name]) for name in ("even", "planned"))
        ideal = sum(target) / len(target) / min(target)
        print(f"speeds {' : '.join(f'{s / speeds[0]:.3f}' for s in speeds)}", flush=True)
        text = f"even {1e3 * even_s:.1f} ms, planned {1e3 * planned_s:.1f} ms: {even_s / planned_s:.3f}x"
        if options.what == "data":
            text += f" of {ideal:.3f}x that are possible: {even_s / planned_s / ideal:.1%}"
        print(f"{options.what}, {options.ranks} ranks: {text}", flush=True)
        print(
            f"chosen: {chosen.name}, predicted {1e3 * chosen.predicted_s:.1f} ms, "
            f"measured {1e3 * planned_s:.1f} ms ({chosen.predicted_s / planned_s - 1:+.1%})",
            flush=True,
        )
    wh.shutdown()


def calibrate(run: Any, quota: Quota, target: list[float]) -> list[float]:
    """Sets this rank's quota until all ranks' speeds are as asked; the speeds, in products per second."""
    import tensorflow as tf

    cores = MOST_CORES * min(1.0, (os.cpu_count() or 1) / sum(target))
    mine = cores * target[run.rank]
    x = tf.random.normal([512, 512])
    product = tf.function(lambda: tf.linalg.matmul(x, x))
    for attempt in range(8):
        quota.set(mine)
        run.comms[0].broadcast_bytes(f"unequal/{attempt}", b"" if run.rank == 0 else None)
        product()
        count, start_s = 0, time.perf_counter()
        while time.perf_counter() < start_s + 1.0:
            float(product()[0, 0])
            count += 1
        own = count / (time.perf_counter() - start_s)
        said = run.comms[0].allgather_bytes(f"unequal/speed/{attempt}", json.dumps(own).encode())
        speeds = [float(json.loads(one)) for one in said]
        per_target = [s / t for s, t in zip(speeds, target)]
        if max(per_target) < 1.01 * min(per_target):
            break
        mine = min(1.0, mine * min(per_target) / per_target[run.rank])
    return speeds


def measure(run: Any, least_s: float, way: Any) -> tuple[list[float], Any]:
    """(seconds of steps of a fresh copy of the program, as many on every rank; how it was spread).

    Args:
        way: to spread it; None: as auto_parallel finds.
    """
    run.auto = way
    step, batch = program()
    for _ in range(2):
        start_s = time.perf_counter()
        float(step(*batch))
        once_s = time.perf_counter() - start_s
    count = max(3, int(least_s / once_s)) if least_s else 0
    count = int(run.comms[0].broadcast_bytes(f"unequal/{run.programs}", b"%d" % count if run.rank == 0 else None))
    times = []
    for _ in range(count):
        start_s = time.perf_counter()
        float(step(*batch))
        times.append(time.perf_counter() - start_s)
    return times, run.auto


def program() -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A chain of equal layers, most of whose time is products."""
    import numpy as np
    import tensorflow as tf

    import whale as wh

    generator = np.random.default_rng(1)
    weights = [
        tf.Variable(tf.constant(generator.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, tf.float32), name=f"w{i}")
        for i in range(DEPTH)
    ]

    @wh.function
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
