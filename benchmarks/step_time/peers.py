"""One process of a benchmark that runs without TensorFlow: PyTorch's DistributedDataParallel, or Keras 3 on JAX.

It belongs to an environment of its own (`make bench` makes it), which needs NumPy, torch, jax and keras, and no Whale.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.groups import Answer, serve
from benchmarks.step_time.models import LEARNING_RATE, WORKLOADS, Workload


def torch_step(name: str, workload: Workload, rank: int, ranks: int) -> Callable[[], float]:
    """On several ranks gradients are averaged by gloo, in buckets behind the backward pass."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.step_time.torch_models import MODELS

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(1)
    model = MODELS[name]()
    if ranks > 1:
        meeting = f"file://{os.environ['BENCH_MEETING']}"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
        model = DistributedDataParallel(model)
    optimizer = getattr(torch.optim, workload.optimizer)(model.parameters(), LEARNING_RATE)
    features, labels = workload.inputs(np.random.default_rng(0))
    rows = slice(rank * (workload.batch // ranks), (rank + 1) * (workload.batch // ranks))
    x = [torch.from_numpy(one[rows].transpose(0, 3, 1, 2).copy() if one.ndim == 4 else one[rows]) for one in features]
    x = [one.contiguous(memory_format=torch.channels_last) if one.ndim == 4 else one for one in x]
    y = torch.from_numpy(labels[rows]).long().flatten()

    def step() -> float:
        optimizer.zero_grad()
        logits = model(*x)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), y)
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def jax_step(name: str, workload: Workload) -> Callable[[], float]:
    """Data parallel over as many devices of one process as XLA_FLAGS says."""
    import jax
    import keras

    devices = jax.devices("cpu")
    if len(devices) > 1:
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=keras.distribution.list_devices("cpu"))
        )
    keras.utils.set_random_seed(1)
    model = workload.make(keras)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(getattr(keras.optimizers, workload.optimizer)(LEARNING_RATE), loss)
    features, labels = workload.inputs(np.random.default_rng(0))
    x = features[0] if len(features) == 1 else list(features)
    return lambda: float(model.train_on_batch(x, labels))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("torch", "jax"))
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--cores", default="", help="cores of each rank: 0,1 for two ranks of one core; empty = all")
    options = parser.parse_args()
    rank, ranks = (
        int(os.environ.get(f"OMPI_COMM_WORLD_{name}", default)) for name, default in (("RANK", 0), ("SIZE", 1))
    )
    cores = [int(core) for core in options.cores.split(",") if core]
    if cores:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})

    def start() -> tuple[Answer, Callable[[], None]]:
        workload = WORKLOADS[options.workload]
        if options.kind == "torch":
            step = torch_step(options.workload, workload, rank, ranks)
        else:
            step = jax_step(options.workload, workload)
        step()

        def answer(steps: int) -> dict[str, Any]:
            times_s, before = [], time.process_time()
            for _ in range(steps):
                start_s = time.perf_counter()
                loss = step()
                times_s.append(time.perf_counter() - start_s)
            return {"times_s": times_s, "cpu_s": (time.process_time() - before) / steps, "loss": loss}

        return answer, lambda: None

    serve(rank, start)


if __name__ == "__main__":
    main()
