"""How much of the all-reduce time is hidden behind the backward pass, on an emulated link between two processes.

    whale run -np 2 benchmarks/overlap.py [--layers 10] [--bandwidth-MBps 1000] [--latency-us 50]

The model has two gradients per layer. For every step the trace events of the op library give, per all-reduce, when
its tensor was ready and when it ended. Hidden is the part of the union of these intervals that lies before the last
gradient was ready: until then there is still arithmetic to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import whale as wh
from whale.runtime.context import require_current

Interval = tuple[float, float]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same points of time without overlaps, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def hidden_share(intervals: Sequence[Interval]) -> float:
    """Share of the union of (ready, end) intervals that lies before the last one is ready."""
    last_ready = max(ready for ready, _ in intervals)
    merged = union(intervals)
    whole = sum(end - start for start, end in merged)
    return sum(max(0.0, min(end, last_ready) - start) for start, end in merged) / whole


def train(layers: int, width: int, rows: int, steps: int) -> tuple[Any, list[float], list[list[Interval]]]:
    """Trains; returns the plan, and per step its seconds and the intervals of its all-reduces in microseconds."""
    tf.keras.utils.set_random_seed(1)
    made = tf.keras.layers
    model = tf.keras.Sequential([made.Input((width,)), *(made.Dense(width, activation="relu") for _ in range(layers))])
    optimizer = tf.keras.optimizers.SGD(1e-3)
    optimizer.build(model.trainable_variables)

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    x = tf.constant(np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32))
    for _ in range(3):
        float(step(x))
    (comm,) = require_current("the overlap benchmark").comms
    seconds, found = [], []
    for _ in range(steps):
        with tempfile.TemporaryFile() as trace:
            comm.trace_start(trace.fileno())
            start_s = time.perf_counter()
            float(step(x))
            seconds.append(time.perf_counter() - start_s)
            comm.trace_stop()
            trace.seek(0)
            # An event starts when the op's kernel was entered: its tensor is ready.
            events = json.loads(f"[{trace.read().decode().rstrip().rstrip(',')}]")
        found.append([(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "AllReduce"])
    return step.plan(x), seconds, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=10, help="two gradients each")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--group-bytes", type=int, default=1 << 20, help="tensors up to this size travel together")
    parser.add_argument("--bandwidth-MBps", type=float, default=1000.0)
    parser.add_argument("--latency-us", type=float, default=50.0)
    options = parser.parse_args()
    link = f"latency_us={options.latency_us:g},bandwidth_MBps={options.bandwidth_MBps:g}"
    wh.init(wh.Config({"debug.emulate_network": link, "communication.bucket_bytes": options.group_bytes}))
    plan, seconds, steps = train(options.layers, options.width, options.rows, options.steps)
    if wh.rank() == 0:
        shares = [hidden_share(intervals) for intervals in steps]
        busy_ms = [sum(end - start for start, end in union(intervals)) / 1e3 for intervals in steps]
        print(f"{2 * options.layers} gradients, {plan.logical_bytes / 1e6:.1f} MB per step over {link}")
        step_ms = 1e3 * statistics.median(seconds)
        print(f"  step {step_ms:.1f} ms, all-reduces under way {statistics.median(busy_ms):.1f} ms")
        print(f"  all-reduces per step {len(steps[-1])}, hidden before the last gradient is ready"
              f" {statistics.median(shares):.0%} (median of {len(shares)})")  # fmt: skip
    wh.shutdown()


if __name__ == "__main__":
    main()
