"""Processor seconds that a step of a pipeline takes to be built and optimised, and its nodes per micro-batch.

    whale run -np 2 benchmarks/pipeline_build.py [--blocks 12] [--micro-batches 4 64]

The model is that of examples/gpt.py with Adam: 12 blocks, half of them in each of two stages. For each number
of micro-batches, of rank 0: Whale's own part, whose phases are shown by the clock, and the first call beyond a later
one, in which TensorFlow's optimizer works. Tracing the Python function is TensorFlow's own time and is printed apart.
Nodes are those of the graph that TensorFlow runs, after its optimizer; edges are the tensors that travel between the
stages. Ends with status 1 when building the largest takes more than 3 s of processor time, or a micro-batch has more
than 40 nodes per edge.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["WHALE_MESH_PLAN_CACHE"] = ""  # what is measured is to be done
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

import whale as wh
from benchmarks.tracing import traced_apart
from examples.gpt import Model

_MOST_S, _MOST_NODES = 3.0, 40
_LENGTH = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--micro-batches", type=int, nargs=2, default=(4, 64))
    options = parser.parse_args()
    wh.init()
    if wh.size() < 2:
        parser.error("one rank has no stages; run it by `whale run -np 2 benchmarks/pipeline_build.py`")
    model = Model(32, options.blocks, _LENGTH)
    model(tf.zeros((1, _LENGTH), tf.int32))
    optimizer = tf.keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    x = tf.constant(np.random.default_rng(0).integers(0, 256, (64, _LENGTH)), tf.int32)
    found = []
    for count in options.micro_batches:
        seconds, nodes, edges = measure(train_step(model, optimizer, count), x)
        found.append((seconds, nodes, edges))
        if wh.rank() == 0:
            print(f"{options.blocks} blocks, {count} micro-batches: {nodes} nodes, {edges} edges")
            for name, value in seconds.items():
                print(f"  {name:26s} {value:7.3f} s", flush=True)
    few, many = options.micro_batches
    edges = found[1][2]
    each = (found[1][1] - found[0][1]) / (many - few)
    built_s = sum(value for name, value in found[1][0].items() if name != "tracing")
    if wh.rank() == 0:
        print(f"{each:.1f} nodes per micro-batch, {each / edges:.1f} per edge (at most {_MOST_NODES})")
        print(f"built and optimised in {built_s:.2f} s (at most {_MOST_S} s)")
    wh.shutdown()
    return int(built_s > _MOST_S or each > _MOST_NODES * edges)


def train_step(model: Any, optimizer: Any, micro_batches: int) -> Any:
    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape, wh.pipeline(num_micro_batch=micro_batches):
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=x, logits=model(x)))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return step


def measure(step: Any, x: tf.Tensor) -> tuple[dict[str, float], int, int]:
    """(processor seconds of each part, nodes of this rank's graph as it runs, edges of the plan)."""
    with traced_apart() as traced_s:
        whole_s = timed(lambda: step.plan(x))
        seconds = {"tracing": traced_s[0], "Whale's own part": whole_s - traced_s[0]}
    if wh.rank() == 0:
        phases = ", ".join(f"{name} {s:.2f}" for name, s in step.compile_seconds(x).items() if s >= 0.01)
        print(f"by the clock: {phases}", flush=True)
    context = tf_context.context()
    context.enable_graph_collection()
    first_s = timed(lambda: step(x))
    graphs = context.export_run_metadata().function_graphs
    context.disable_graph_collection()
    seconds["TensorFlow's optimizer"] = first_s - min(timed(lambda: step(x)) for _ in range(2))
    nodes = max(sum(len(part.node) for part in graph.partition_graphs) for graph in graphs)
    return seconds, nodes, len(step.plan(x).edges)


def timed(act: Callable[[], Any]) -> float:
    start_s = time.process_time()
    act()
    return time.process_time() - start_s


if __name__ == "__main__":
    sys.exit(main())
