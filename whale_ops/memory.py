"""Reads how many bytes TensorFlow's allocators have given out in this process: now, and the peak since a reset.

On the processor the figures are those of TensorFlow's own allocator, which serves tensors, variables and scratch memory
of kernels in pieces of `COUNTED_FROM_BYTES` and more; smaller ones come from malloc and are not counted. The allocator
keeps figures if TensorFlow's optimised kernels (oneDNN) are on: by default on processors with AVX-512 VNNI or newer
instructions, elsewhere with TF_ENABLE_ONEDNN_OPTS=1. On a GPU the figures are those of
tf.config.experimental.get_memory_info, which counts every allocation.

Decision: 0004.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass

from whale.errors import CommError

COUNTED_FROM_BYTES = 256 << 10  # mkl_cpu_allocator.h: kSmallAllocationsThreshold
GRAIN_BYTES = 256  # sizes are rounded up to a multiple of it (bfc_allocator.h: kMinAllocationSize)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Holds the bytes that a device's allocator has given out.

    Attributes:
        live_bytes: bytes given out now.
        peak_bytes: the largest such number since `reset_peak`, or since the start.
    """

    live_bytes: int
    peak_bytes: int


@functools.cache
def load_library() -> ctypes.CDLL:
    """Returns the op library as a ctypes library, for its plain C functions."""
    import tensorflow as tf

    import whale_ops
    from whale_ops import _native, build

    whale_ops.load_ops()
    found = ctypes.CDLL(str(_native.find_library(build.make_ops_name(tf.__version__))))
    found.whale_host_memory.argtypes = found.whale_offloaded.argtypes = [ctypes.POINTER(ctypes.c_int64)]
    found.whale_host_memory_reset.restype = found.whale_offloaded.restype = None
    return found


def share_tensors() -> str:
    """Makes TensorFlow allocate large tensors in memory that other ranks of this machine can map, from now on.

    All-reduces between ranks of one machine are fastest with it: they read and write each other's tensors in place.
    Call it before the communicator is created, and before TensorFlow creates its first tensor.

    Returns:
        "" if it worked, else the reason why not.
    """
    code = load_library().whale_share_tensors()
    if code < 0:
        return "TensorFlow has created tensors already"
    return os.strerror(code) if code > 0 else ""


def read_memory(gpu: str = "") -> DeviceMemory:
    """Returns the bytes that TensorFlow has allocated on the processor, or on a GPU.

    Args:
        gpu: TensorFlow's name of a GPU, e.g. "GPU:0"; "": the processor.

    Raises:
        CommError: TensorFlow's allocator keeps no statistics.
    """
    if gpu:
        import tensorflow as tf

        info = tf.config.experimental.get_memory_info(gpu)
        return DeviceMemory(info["current"], info["peak"])
    values = (ctypes.c_int64 * 4)()
    if not load_library().whale_host_memory(values):
        raise CommError(
            "TensorFlow's CPU allocator keeps no statistics, so used memory cannot be read",
            given="TensorFlow without its optimised kernels (oneDNN), as by default on older processors",
            expected="oneDNN turned on, whose allocator keeps statistics",
            action="set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported",
        )
    return DeviceMemory(values[0], values[1])


def reset_peak(gpu: str = "") -> None:
    """Resets the peak to the bytes allocated now, on the processor or a GPU (see `read_memory`)."""
    if gpu:
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(gpu)
    else:
        load_library().whale_host_memory_reset()


def trim() -> None:
    """Returns freed memory that the C library keeps to the system, if the C library can do that (glibc).

    Capturing, planning and TensorFlow's optimiser leave 90 MB of it for 170 dense layers under Adam.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
