"""How far reading batches hides behind the step: a tf.data source that takes its time, on two processes.

    whale run -np 2 benchmarks/input.py [--batches 30] [--factors 0.5,1,2] [--latency-ms 0]

For each factor the source, which every rank reads, is throttled so that a batch takes `factor` times as long as a step;
it waits in tf.data's own threads and takes hardly any processor time from the step. Measured are the seconds per batch
of reading alone, of steps alone and of both, in turns, and `ratio` = both / max(reading, steps): 1 is full overlap,
1.05 is what is asked for. With a latency a step waits for its communication, mostly; that measures overlap where other
programs take the processors.
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
from tensorflow.python.data.experimental.ops import testing as throttle

import whale as wh

ROWS, FEATURES, BLOCK = 64, 512, 16


def make_step(layers: int) -> Any:
    """A training step of a multi-layer perceptron with a gradient per layer to reduce."""
    kernels = [tf.Variable(tf.random.stateless_normal([FEATURES, FEATURES], [i, 0]) / 23.0) for i in range(layers)]

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = x
            for kernel in kernels:
                hidden = tf.tanh(hidden @ kernel)
            loss = tf.reduce_mean(tf.square(hidden))
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels)):
            kernel.assign_sub(1e-3 * gradient)
        return loss

    return step


def slow_dataset(seconds_per_row: float) -> tf.data.Dataset:
    """Batches without end of rows that come no faster than that, a few at a time, as blocks of a file do."""

    def make(index: tf.Tensor) -> tf.Tensor:
        return tf.random.stateless_normal([FEATURES], [index, 1])

    blocks = tf.data.Dataset.range(1 << 40).batch(BLOCK).apply(throttle.sleep(round(1e6 * seconds_per_row * BLOCK)))
    endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    return blocks.unbatch().apply(endless).map(make).batch(ROWS)


def seconds_each(count: int, once: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    for _ in range(count):
        once()
    return (time.perf_counter() - start_s) / count


def measure(step: Any, dataset: Any, batches: int, prefetch: int) -> tuple[float, float, float, float]:
    """Seconds per batch of (reading, its processor time, steps on one batch, both), each with a queue that is neither
    full nor new."""
    source = iter(dataset)
    fixed = next(source)

    def read() -> Any:
        return next(source)

    seconds_each(prefetch + 1, read)
    before_s = time.process_time()
    reading_s = seconds_each(batches, read)
    processor_s = (time.process_time() - before_s) / batches
    float(step(fixed))
    stepping_s = seconds_each(batches, lambda: float(step(fixed)))
    seconds_each(prefetch + 1, lambda: float(step(read())))
    return reading_s, processor_s, stepping_s, seconds_each(batches, lambda: float(step(read())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=30, help="in each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements, of which the median is shown")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--factors", default="0.5,1,2", help="time of reading / time of a step")
    parser.add_argument("--prefetch", type=int, default=2, help="batches read ahead")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of an emulated link between the ranks")
    options = parser.parse_args()
    link = f"latency_us={1e3 * options.latency_ms:g}" if options.latency_ms else ""
    wh.init(wh.Config({"batch.prefetch": options.prefetch, "debug.emulate_network": link}))
    step = make_step(options.layers)
    whole = tf.random.stateless_normal([ROWS, FEATURES], [0, 1])
    seconds_each(5, lambda: float(step(whole)))
    alone_s = [seconds_each(options.batches, lambda: float(step(whole))) for _ in range(options.rounds)]

    def say(text: str) -> None:
        if wh.rank() == 0:
            print(text, flush=True)

    # The rows of the slowest rank decide; every rank has to make the same dataset.
    step_s = float(wh.function(lambda t: tf.reduce_max(t))(tf.constant([statistics.median(alone_s)])))
    say(f"step {1e3 * step_s:.1f} ms, {ROWS} rows over {wh.size()} ranks, at most {options.prefetch} batches ahead")
    say("  reading/step   reading ms (processor)   steps ms   both ms   ratio")
    for factor in map(float, options.factors.split(",")):
        dataset = wh.shard(slow_dataset(factor * step_s / ROWS))
        rounds = [measure(step, dataset, options.batches, options.prefetch) for _ in range(options.rounds)]
        reading_s, processor_s, stepping_s, both_s = map(statistics.median, zip(*rounds))
        ratio = both_s / max(reading_s, stepping_s)
        read = f"{1e3 * reading_s:10.1f} {f'({1e3 * processor_s:.1f})':>11}"
        say(f"  {factor:12g}   {read} {1e3 * stepping_s:10.1f} {1e3 * both_s:9.1f}   {ratio:5.3f}")
    wh.shutdown()


if __name__ == "__main__":
    main()
