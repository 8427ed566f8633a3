"""Reads the bytes that TensorFlow's allocators have given out in this process: live ones, and their peak since a reset.

On the processor these are the figures of TensorFlow's own allocator, which serves tensors, variables and scratch memory
of kernels in pieces of `COUNTED_FROM_BYTES` and more; smaller ones come from malloc and are counted by nobody. It keeps
figures as long as its optimised kernels (oneDNN) are on: by default on processors with AVX-512 VNNI or newer
instructions, elsewhere with TF_ENABLE_ONEDNN_OPTS=1. On a GPU they are those of
tf.config.experimental.get_memory_info, where every allocation counts.

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
    """The bytes that the allocator of a device has given out.

    Attributes:
        live_bytes: at this moment.
        peak_bytes: the most at any moment since `reset_peak`, or since the start.
    """

    live_bytes: int
    peak_bytes: int


@functools.cache
def load_library() -> ctypes.CDLL:
    """Returns the op library, for its plain functions."""
    import tensorflow as tf

    import whale_ops
    from whale_ops import _native, build

    whale_ops.load_ops()
    found = ctypes.CDLL(str(_native.find_library(build.make_ops_name(tf.__version__))))
    found.whale_host_memory.argtypes = found.whale_offloaded.argtypes = [ctypes.POINTER(ctypes.c_int64)]
    found.whale_host_memory_reset.restype = found.whale_offloaded.restype = None
    return found


def share_tensors() -> str:
    """Puts TensorFlow's large tensors from now on in memory that ranks of this machine can map.

    All-reduces between ranks of one machine are fastest with it: they read and write tensors where they lie.
    Call it before the communicator is made, and before TensorFlow makes its first tensor.

    Returns:
        What is in the way, in words; empty if nothing is.
    """
    code = load_library().whale_share_tensors()
    if code < 0:
        return "TensorFlow has made tensors already"
    return os.strerror(code) if code > 0 else ""


def read_memory(gpu: str = "") -> DeviceMemory:
    """Returns what this process holds on the processor, or on a GPU by its name ("GPU:0").

    Raises:
        CommError: TensorFlow's allocator keeps no figures.
    """
    if gpu:
        import tensorflow as tf

        info = tf.config.experimental.get_memory_info(gpu)
        return DeviceMemory(info["current"], info["peak"])
    values = (ctypes.c_int64 * 4)()
    if not load_library().whale_host_memory(values):
        raise CommError(
            "TensorFlow's allocator keeps no figures",
            given="an allocator without statistics",
            expected="that of TensorFlow's optimised kernels, which it leaves off on older processors",
            action="set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported",
        )
    return DeviceMemory(values[0], values[1])


def reset_peak(gpu: str = "") -> None:
    """Resets the peak to the live bytes."""
    if gpu:
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(gpu)
    else:
        load_library().whale_host_memory_reset()


def trim() -> None:
    """Gives freed memory back to the system that the C library keeps, where it can (glibc).

    Capturing, planning and TensorFlow's optimiser leave 90 MB of it behind for 170 dense layers under Adam.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
