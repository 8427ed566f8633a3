"""Training steps without TensorFlow: PyTorch's DistributedDataParallel, or Keras 3 on JAX.

They run in an environment of their own (`make bench` makes it), which needs NumPy, torch, jax and keras, and no Whale.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from benchmarks.step_time.models import LEARNING_RATE, Workload


def torch_step(name: str, workload: Workload, rank: int, ranks: int, compiled: bool) -> Callable[[], float]:
    """On several ranks gradients are averaged by gloo, in buckets behind the backward pass.

    Compiled: forward and backward by `torch.compile`, which needs a C++ compiler on the machine.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.step_time.torch_models import MODELS

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(1)
    model = MODELS[name]()
    if compiled:
        model = torch.compile(model)
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


def jax_step(workload: Workload) -> Callable[[], float]:
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
