"""GPUs that exchange tensors themselves (`communication.backend` "nccl" or "cuda-ipc"), which ``wh.init`` opens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import whale_ops
from whale.config import Config
from whale.errors import ClusterError, CommError, ConfigError
from whale.passes.exchange.on_devices import DEVICE_BACKENDS
from whale.started import ProcessPlace
from whale_ops import build_cuda

_LEAST_BUFFER_BYTES = 1 << 20  # tensors of more bytes travel in parts


def start(config: Config, place: ProcessPlace, size: int, comms: Sequence[whale_ops.Communicator]) -> None:
    """Opens this rank's GPU where the configuration asks for it; collective. Nothing to do for one rank.

    Where the process sees several GPUs, TensorFlow gets that of the process's number on its host, and no other.

    Raises:
      ConfigError: the ranks are threads of this process, which would share one GPU and one TensorFlow.
      ClusterError: on every rank, naming those that cannot: the library is not built, there is no GPU, TensorFlow has
        started with several, or the GPUs cannot be connected.
    """
    backend = config["communication.backend"]
    if backend not in DEVICE_BACKENDS:
        return
    if config["communication.transport"] == "in-process":
        raise ConfigError(
            "GPUs exchange tensors of processes, and the in-process transport has one",
            given=f'communication.backend "{backend}" with communication.transport "in-process"',
            expected="the transport between processes",
            action='start the script with `whale run -np 2`, or set communication.backend to "whale"',
        )
    if size == 1:
        return
    (comm,) = comms
    open_device(config, comm, *take_gpu(place.local_rank))


def open_device(config: Config, comm: whale_ops.Communicator, ordinal: int, lacks: str) -> None:
    """Opens a rank's device, after all ranks have told what they lack.

    Args:
      ordinal: number of the device.
      lacks: what this rank lacks to open it; "" is nothing.
    """
    backend, buffer_bytes = config["communication.backend"], config["communication.group_bytes"]
    said = comm.allgather_bytes("whale/device", lacks.encode(), purpose="the exchange of what ranks know of their GPUs")
    if any(said):
        raise ClusterError(
            "GPUs are to exchange what lies in their memory, and a rank has none that it can use",
            **{f"rank {rank}": text.decode() for rank, text in enumerate(said) if text},
            given=f'communication.backend "{backend}" ({config.origin("communication.backend")})',
            expected="a GPU that TensorFlow sees, and the library of `python -m whale_ops.build_cuda`, on every rank",
            action='see docs/gpu.md, or set communication.backend to "whale"',
        )
    try:
        comm.open_device(library(), backend, ordinal, max(buffer_bytes, _LEAST_BUFFER_BYTES))
    except CommError as error:
        other = DEVICE_BACKENDS[backend == DEVICE_BACKENDS[0]]
        raise ClusterError(
            "the ranks' GPUs cannot be connected",
            reason=str(error),
            given=f'communication.backend "{backend}"',
            expected="nccl: a GPU for each rank; cuda-ipc: ranks of one host, which may share a GPU",
            action=f'set communication.backend to "{other}" or "whale"',
        ) from error


def library() -> Path:
    """Where `python -m whale_ops.build_cuda` puts its library."""
    return build_cuda.IN_PLACE / build_cuda.NAME


def take_gpu(local_rank: int) -> tuple[int, str]:
    """The number of this process's GPU, and what is missing; TensorFlow takes its memory only as it needs it."""
    import tensorflow as tf

    if not library().exists():
        return 0, f"{library().name} is not built: python -m whale_ops.build_cuda"
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return 0, "TensorFlow sees no GPU"
    try:
        there = whale_ops.count_devices(library())
    except CommError as error:
        return 0, str(error)
    if there != len(gpus):
        return 0, f"TensorFlow sees {len(gpus)} GPUs, the CUDA runtime {there}: set CUDA_VISIBLE_DEVICES"
    visible = tf.config.get_visible_devices("GPU")
    gpu = visible[0] if len(visible) == 1 else gpus[local_rank % len(gpus)]
    try:
        tf.config.set_visible_devices(gpu, "GPU")
    except RuntimeError:
        if len(tf.config.list_logical_devices("GPU")) != 1:
            return 0, "TensorFlow has started with several GPUs: call wh.init first, or set CUDA_VISIBLE_DEVICES"
    with contextlib.suppress(RuntimeError, ValueError):  # TensorFlow has started: its memory is as the script says
        tf.config.experimental.set_memory_growth(gpu, True)
    return gpus.index(gpu), ""
