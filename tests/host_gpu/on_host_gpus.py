"""Runs a script as a rank of `whale run` whose GPUs are the host's (HOST_GPUS), or that has none:

    whale run -np 2 on_host_gpus.py WITHOUT SCRIPT ...

WITHOUT are ranks of the host without a GPU: none, or 1,3.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from pathlib import Path

from tests.host_gpu.build import build_host_cuda, build_plugin, list_kernels
from whale.distributed import device_exchange
from whale.started import process_place
from whale_ops import device_library


def take_host_gpus() -> None:
    """From now on TensorFlow has the GPUs that HOST_GPUS lists, and Whale's library for GPUs their driver.

    Before TensorFlow makes its devices. Kernels of Whale's own are compiled with the driver, and not for a kind of GPU.
    """
    import tensorflow as tf
    from tensorflow.python.framework import load_library

    os.environ["HOST_GPU_KERNELS"] = str(list_kernels())
    load_library.load_pluggable_device_library(str(build_plugin()))
    # Kernels for processors know convolutions with the channels last only.
    tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
    cuda = build_host_cuda()
    image = cuda.image.read_bytes()

    def load_kernels(library: Path, ordinal: int, folder: Path | None) -> None:
        device_library.load_kernels(library, ordinal, image)

    def load_nccl() -> None:
        ctypes.CDLL(str(cuda.nccl), ctypes.RTLD_GLOBAL)

    device_exchange.load_kernels = load_kernels
    device_library.load_nccl = load_nccl


def main() -> None:
    without, script, *arguments = sys.argv[1:]
    if str(process_place().local_rank) not in without.split(","):
        take_host_gpus()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
