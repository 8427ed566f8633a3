"""Computes the GPU memory that is not available to tensors: TensorFlow's reserve for CUDA libraries, NCCL's buffers.

tensorflow_bytes  memory that TensorFlow's allocator leaves to CUDA's libraries
nccl_bytes        memory that NCCL allocates for connections between ranks
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_MIB = 1 << 20
# (largest major number of the compute capability, MiB that TensorFlow's allocator leaves).
_LEFT_MIB = ((6, 500), (7, 1050), (8, 1536))
_LEFT_BY_NEWER_MIB, _LEFT_BY_SMALL_MIB = 1800, 225
_SMALL_BYTES = 2 << 30

# Bytes of the buffers of one connection's receiving end, by protocol: Simple, LL (8 steps of 512 threads with 8 lines
# of 16 bytes), LL128 (8 steps of 640 threads with 120 words of 8 bytes).
_BUFFERS_BYTES = {
    "NCCL_BUFFSIZE": 4 * _MIB,
    "NCCL_LL_BUFFSIZE": 8 * 512 * 8 * 16,
    "NCCL_LL128_BUFFSIZE": 8 * 640 * 120 * 8,
}
_GRAIN_BYTES = 2 * _MIB  # of CUDA's virtual memory: each end of a connection is an allocation of its own
_CHANNELS, _PEER_CHANNELS = 24, 32
_CONNECTIONS = 3  # connections that a channel receives through: in its ring, from a tree's parent and from its child


def tensorflow_bytes(memory_bytes: float, capability: int) -> int:
    """Returns the bytes of a GPU's memory that TensorFlow's allocator leaves to CUDA's context, libraries and kernels.

    The figures are those of TensorFlow's own `MinSystemMemory` (tensorflow/core/common_runtime/gpu/gpu_device.cc), with
    and without memory growth.

    Args:
        memory_bytes: memory of the GPU.
        capability: major number of the GPU's compute capability.
    """
    if memory_bytes < _SMALL_BYTES:
        return _LEFT_BY_SMALL_MIB * _MIB
    return next((mib for upto, mib in _LEFT_MIB if capability <= upto), _LEFT_BY_NEWER_MIB) * _MIB


def nccl_bytes(groups: int, peers: int, environment: Mapping[str, str]) -> int:
    """Returns the bytes that NCCL allocates on a rank's GPU, by its defaults or the environment; NVLink SHARP takes
    more.

    A connection has the buffers of all three protocols at the receiving end and some flags at the other one, both
    rounded up: 10 MiB and 2 MiB, as NVIDIA/nccl issue 1685 lists them (sizes: `computeBuffSizes` in src/init.cc,
    src/include/comm.h and device.h). Each group has a communicator with 24 channels if GPUs are connected by NVLink
    (issue 1785; fewer elsewhere, and NCCL_MAX_NCHANNELS at most); each peer that something is sent to has 32 channels
    (issue 1685: 8 GPUs take 3.3 GB for an all-to-all).

    Args:
        groups: number of the rank's groups that all-reduce, all-gather, reduce-scatter or broadcast.
        peers: number of other ranks with which this one sends, receives, or has an all-to-all.
        environment: environment variables, for NCCL's settings; as in NCCL, values that are no whole number are
            ignored.
    """

    def number(name: str, default: int) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else default

    received = sum(number(name, size) for name, size in _BUFFERS_BYTES.items())
    connection_bytes = math.ceil(received / _GRAIN_BYTES) * _GRAIN_BYTES + _GRAIN_BYTES
    channels = min(_CHANNELS, number("NCCL_MAX_NCHANNELS", _CHANNELS))
    of_a_peer = min(_PEER_CHANNELS, number("NCCL_MAX_P2P_NCHANNELS", _PEER_CHANNELS))
    return (groups * channels * _CONNECTIONS + peers * of_a_peer) * connection_bytes
