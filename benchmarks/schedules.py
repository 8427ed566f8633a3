"""Step times of pipelines beside the formulas of their schedules, and how many micro-batches are alive.

    python benchmarks/schedules.py                             four stages that sleep, in one process
    whale run -np 4 benchmarks/schedules.py --only zb-h1       the same by processes, one schedule
    python benchmarks/schedules.py --products                  two stages of matrix products, in two processes

Formulas: m (F + B) and a bubble of (p - 1)(F + B) for GPipe and 1F1B, that over v for interleaved 1F1B with v chunks on
each device, (p - 1)(F + B - 2 W) for ZB-H1, where B has W in it. Ends with status 1 when a step is more than 5 % away
from its formula (10 % with products, whose F, B and W are measured alone, on all ranks at the same time), when not as
many micro-batches are alive as the schedule says, when ZB-H1 is not faster than 1F1B, or when two towers side by side
take more than 1.1 times the slower one and the join. Other load on the machine shows.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).parents[1]))

import tensorflow as tf

import whale as wh
from whale.ir.pipeline_schedule import compute_bubble_s, count_live_micro_batches, make_schedule
from whale.sharding_rules import registry
from whale.started import process_place

_LOG = Path(tempfile.mkdtemp()) / "slept"
os.environ["BENCHMARK_SLEEP_LOG"] = str(_LOG)
_STEPS = 3
_FORWARD_S, _BACKWARD_S, _WEIGHTS_S = 0.06, 0.06, 0.06  # of all stages of a device; backward is that of inputs
_DEPTH, _ROWS, _WIDTH = 4, 512, 1024  # products of a device, rows of a micro-batch, width of the square weights
_SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1))


def sleeper() -> Callable[..., tf.Tensor]:
    """``sleep(tensor, seconds, what)``; Whale treats it like Identity."""
    source = Path(__file__).with_name("sleeper.cc")
    library = Path(tempfile.gettempdir()) / f"whale_benchmark_sleeper_{tf.__version__}_{source.stat().st_mtime_ns}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            flags = tf.sysconfig.get_compile_flags() + tf.sysconfig.get_link_flags()
            command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", str(source), *flags, "-o", f"{library}.new"]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            os.replace(f"{library}.new", library)
    op = tf.load_op_library(str(library)).benchmark_sleep
    like = registry.find_rule("Identity")
    assert like is not None
    registry.load_rules()["BenchmarkSleep"] = replace(like, op="BenchmarkSleep")  # type: ignore[index]
    return lambda tensor, seconds, what="": op(input=tensor, seconds=seconds, backward_s=0.0, what=what)


def sleeping_layer(
    sleep: Any, device: int, forward_s: float, backward_s: float, weights_s: float
) -> Callable[..., tf.Tensor]:
    """A product that takes so long, forward, for the gradient of its input, and for that of its weight."""

    @tf.custom_gradient
    def layer(h: tf.Tensor, w: tf.Tensor) -> Any:
        def gradients(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            slow = sleep(dy, backward_s, f"B {device}")
            late = sleep(slow, weights_s, f"W {device}")
            return tf.matmul(slow, w, transpose_b=True), tf.matmul(h, late, transpose_a=True)

        return sleep(h @ w, forward_s, f"F {device}"), gradients

    return layer


def start(ranks: int, **config: Any) -> None:
    """Starts Whale, in this process if no launcher has started several."""
    if process_place().size == 1:
        config |= {"communication.in_process_ranks": ranks}
    wh.init(config)


def products(h: tf.Tensor, *weights: tf.Variable) -> tf.Tensor:
    for w in weights:
        h = tf.matmul(h, w)
    return h


def pipeline(
    layers: Sequence[Callable[..., tf.Tensor]],
    ranks: int,
    rows: int,
    width: int,
    name: str,
    micro_batches: int,
    depth: int = 1,
) -> Callable[[], float]:
    """Returns what runs one step, with ``depth`` weights in each layer. The gradient of the first stage's input is
    wanted too.
    """
    start(ranks, **{"pipeline.micro_batches": micro_batches, "pipeline.schedule": name})
    weights = [[tf.Variable(tf.eye(width)) for _ in range(depth)] for _ in layers]
    scale = tf.Variable(tf.ones((width,)))
    x = tf.ones((micro_batches * rows, width)) * 0.01

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for i, layer in enumerate(layers):
                with wh.stage():
                    h = layer(h * scale if i == 0 else h, *weights[i])
                    if i == len(layers) - 1:
                        loss = tf.nn.l2_loss(h)
        variables = [scale, *chain(*weights)]
        for variable, slope in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(1e-3 * slope)
        return loss

    return lambda: float(step(x))


def seconds_of(step: Callable[[], float], steps: int = _STEPS) -> list[float]:
    """Of some steps."""
    step()
    found = []
    for _ in range(steps):
        start_s = time.perf_counter()
        step()
        found.append(time.perf_counter() - start_s)
    return found


def alive() -> dict[int, int]:
    """Device -> the most micro-batches of a step whose forward pass was over, and whose backward pass was not."""
    path = Path(f"{_LOG}{os.getpid()}")
    lines = [line.split() for line in path.read_text().splitlines()]
    path.write_text("")
    found = {}
    for device in {line[1] for line in lines}:
        mine = [(float(end), {"F": 1, "W": -1}.get(what, 0)) for what, of, _, end in lines if of == device]
        found[int(device)] = max(accumulate(change for _, change in sorted(mine)))
    return found


class Table:
    """Prints rows on the first rank, and remembers whether all were as they must be."""

    def __init__(self) -> None:
        self.good = True

    def row(
        self, name: str, measured_s: float, wanted_s: float, margin: float, more: str = "", fine: bool = True
    ) -> None:
        off = measured_s / wanted_s - 1
        good = abs(off) <= margin and fine
        self.good &= good
        if process_place().rank == 0:
            mark = "" if good else "   NOT AS IT MUST BE"
            print(f"{name:34s} {measured_s * 1e3:8.1f} ms, formula {wanted_s * 1e3:8.1f} ms, {off:+6.1%}{more}{mark}")
            sys.stdout.flush()

    def compare(self, found: Mapping[tuple[str, int], float]) -> None:
        """ZB-H1 with 1F1B, by seconds of a step."""
        self.good &= found["zb-h1", 1] < found["1f1b", 1]
        if process_place().rank == 0:
            print(f"ZB-H1 is {found['1f1b', 1] / found['zb-h1', 1]:.2f} times as fast as 1F1B", flush=True)


def sleeps(table: Table, devices: int, only: str) -> None:
    """Every schedule on so many devices."""
    sleep = sleeper()
    whole_s = _BACKWARD_S + _WEIGHTS_S
    micro_batches = 2 * devices
    found = {}
    for name, chunks in _SCHEDULES:
        if only not in ("", name):
            continue
        lengths = _FORWARD_S / chunks, _BACKWARD_S / chunks, _WEIGHTS_S / chunks
        layers = [sleeping_layer(sleep, i % devices, *lengths) for i in range(devices * chunks)]
        found[name, chunks] = measured_s = statistics.median(
            seconds_of(pipeline(layers, devices, 4, 4, name, micro_batches))
        )
        wanted_s = micro_batches * (_FORWARD_S + whole_s)
        wanted_s += compute_bubble_s(name, devices, chunks, _FORWARD_S, whole_s, _WEIGHTS_S)
        rows = make_schedule(name, devices, chunks, micro_batches)
        most = alive()
        expected = {device: count_live_micro_batches(rows[device]) for device in most}
        title = f"{name}" + f", {chunks} chunks" * (chunks > 1) + f", p={devices} m={micro_batches}"
        more = f", alive {[n for _, n in sorted(most.items())]} of {[n for _, n in sorted(expected.items())]}"
        table.row(title, measured_s, wanted_s, 0.05, more, most == expected)
        wh.shutdown()
    if not only:
        table.compare(found)


def parts_s() -> list[float]:
    """F, B (of inputs) and W of one device's products for a micro-batch, in seconds, without a pipeline."""
    weights = [tf.Variable(tf.eye(_WIDTH)) for _ in range(_DEPTH)]
    rows = [tf.random.normal((_ROWS, _WIDTH)) for _ in range(_DEPTH + 1)]
    sums = [tf.zeros((_WIDTH, _WIDTH)) for _ in range(_DEPTH)]

    @tf.function
    def backward(slope: tf.Tensor) -> tf.Tensor:
        for w in weights:
            slope = tf.matmul(slope, w, transpose_b=True)
        return slope

    @tf.function
    def of_weights(slope: tf.Tensor, rows: list[tf.Tensor], sums: list[tf.Tensor]) -> list[tf.Tensor]:
        return [total + tf.matmul(h, slope, transpose_a=True) for h, total in zip(rows, sums)]

    forward = tf.function(products)
    parts = lambda: forward(rows[0], *weights), lambda: backward(rows[0]), lambda: of_weights(rows[0], rows[1:], sums)
    found: list[list[float]] = [[] for _ in parts]
    for _ in range(12):
        for part, seconds in zip(parts, found):
            start_s = time.perf_counter()
            part()
            seconds.append(time.perf_counter() - start_s)
    return [min(seconds) for seconds in found]


def stages_of_products(table: Table, name: str, chunks: int) -> None:
    """One schedule, with so many stages on each rank: the fastest of some steps beside the fastest of some parts, since
    what else runs on the machine only adds.
    """
    devices = process_place().size
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[process_place().local_rank % len(cores)]})  # and of all threads from now on
    micro_batches = 4 * devices
    step = pipeline([products] * (devices * chunks), devices, _ROWS, _WIDTH, name, micro_batches, _DEPTH // chunks)
    step()
    before = parts_s()
    measured_s = min(seconds_of(step, 8))
    forward_s, backward_s, weights_s = map(min, before, parts_s())
    wanted_s = micro_batches * (forward_s + backward_s + weights_s)
    wanted_s += compute_bubble_s(name, devices, chunks, forward_s, backward_s + weights_s, weights_s)
    title = f"{name}" + f", {chunks} chunks" * (chunks > 1) + f", p={devices} m={micro_batches}"
    more = f", F {forward_s * 1e3:.1f} B {backward_s * 1e3:.1f} W {weights_s * 1e3:.1f} ms"
    table.row(title, measured_s, wanted_s, 0.1, more)
    wh.shutdown()


def in_processes(table: Table, only: str) -> None:
    """Every schedule of matrix products, each by ranks of its own."""
    found = {}
    for name, chunks in _SCHEDULES:
        if only in ("", name):
            line = [sys.executable, "-m", "whale", "run", "-np", "2", __file__, "--products", "--only", name]
            ended = subprocess.run([*line, "--chunks", str(chunks)], stdout=subprocess.PIPE, text=True)
            print(ended.stdout, end="", flush=True)
            table.good &= ended.returncode == 0
            if (measured := re.search(r"([\d.]+) ms, formula", ended.stdout)) is not None:
                found[name, chunks] = float(measured[1])
    if len(found) == len(_SCHEDULES):
        table.compare(found)


def towers(table: Table) -> None:
    """Two towers on devices of their own, one three times as fast, and a third device that joins them."""
    sleep = sleeper()
    lengths = (0.12, 0.04, 0.03)
    start(3)
    weights = [tf.Variable(tf.eye(4)) for _ in lengths]
    layers = [sleeping_layer(sleep, i, s, s, s) for i, s in enumerate(lengths)]
    x = tf.ones((4, 4)) * 0.01

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with wh.stage():
                images = layers[0](x, weights[0])
            with wh.stage():
                texts = layers[1](x, weights[1])
            with wh.stage():
                logits = tf.matmul(layers[2](images, weights[2]), texts, transpose_b=True)
                loss = tf.reduce_mean(tf.nn.log_softmax(logits) * -tf.eye(4))
        for variable, slope in zip(weights, tape.gradient(loss, weights)):
            variable.assign_sub(1e-3 * slope)
        return loss

    measured_s = statistics.median(seconds_of(lambda: float(step(x))))
    # The gradient of the slower tower's input is nobody's, so its B is not computed: F and W, and all of the join's.
    table.row("two towers and what joins them", measured_s, 3 * lengths[0] + 3 * lengths[2], 0.1)
    wh.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="this schedule only")
    parser.add_argument("--devices", type=int, default=4, help="stages that sleep")
    parser.add_argument("--products", action="store_true", help="matrix products, by two processes")
    parser.add_argument("--chunks", type=int, default=1, help="with --products under whale run: stages of each rank")
    options = parser.parse_args()
    table = Table()
    if options.products:
        if process_place().size > 1:
            stages_of_products(table, options.only, options.chunks)
        else:
            in_processes(table, options.only)
        return int(not table.good)
    tf.config.threading.set_inter_op_parallelism_threads(16)  # a sleep holds its thread
    sleeps(table, options.devices, options.only)
    if not options.only:
        towers(table)
    return int(not table.good)


if __name__ == "__main__":
    sys.exit(main())
