"""Computes the GPU memory that is not available to tensors: TensorFlow's reserve for CUDA libraries, NCCL's buffers.

tensorflow_bytes   reserved by TensorFlow's allocator
nccl_bytes         allocated by NCCL for connections between ranks
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_MIB = 1 << 20
# By the major number of the compute capability up to which it holds, in MiB.
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
_CONNECTIONS = 3  # that a channel receives through: its ring's, and from a tree's parent and child


def tensorflow_bytes(memory_bytes: float, capability: int) -> int:
    """Returns the bytes of a GPU that TensorFlow's allocator reserves for CUDA's context, libraries and compiled
    kernels.

    As TensorFlow's own `MinSystemMemory` has it (tensorflow/core/common_runtime/gpu/gpu_device.cc), whether
    its memory grows or not.

    Args:
        capability: the major number of the GPU's compute capability.
    """
    if memory_bytes < _SMALL_BYTES:
        return _LEFT_BY_SMALL_MIB * _MIB
    return next((mib for upto, mib in _LEFT_MIB if capability <= upto), _LEFT_BY_NEWER_MIB) * _MIB


def nccl_bytes(groups: int, peers: int, environment: Mapping[str, str]) -> int:
    """Returns what NCCL takes of a rank's GPU, by its defaults or the environment; some more with NVLink SHARP.

    A connection has the buffers of all three protocols at the receiving end and some flags at the other one, both
    rounded up: 10 MiB and 2 MiB, as NVIDIA/nccl issue 1685 lists them (sizes: `computeBuffSizes` in src/init.cc,
    src/include/comm.h and device.h). Each group has a communicator with 24 channels where GPUs are connected by NVLink
    (issue 1785; fewer elsewhere, and NCCL_MAX_NCHANNELS at most); each peer that something is sent to 32 channels
    (issue 1685: 8 GPUs take 3.3 GB for an all-to-all).

    Args:
        groups: of ranks that reduce, gather or broadcast.
        peers: other ranks with which this one sends, receives, or has an all-to-all.
        environment: for NCCL's variables; what is no whole number counts as unset, as NCCL has it.
    """

    def number(name: str, default: int) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else default

    received = sum(number(name, size) for name, size in _BUFFERS_BYTES.items())
    connection_bytes = math.ceil(received / _GRAIN_BYTES) * _GRAIN_BYTES + _GRAIN_BYTES
    channels = min(_CHANNELS, number("NCCL_MAX_NCHANNELS", _CHANNELS))
    of_a_peer = min(_PEER_CHANNELS, number("NCCL_MAX_P2P_NCHANNELS", _PEER_CHANNELS))
    return (groups * channels * _CONNECTIONS + peers * of_a_peer) * connection_bytes
