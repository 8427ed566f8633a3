"""Memory of GPUs that no tensor gets."""

from __future__ import annotations

import pytest

from cost_model.kernels.gpu_memory import nccl_bytes, tensorflow_bytes

MIB = 1 << 20


def test_what_tensorflow_leaves_of_a_gpu() -> None:
    assert tensorflow_bytes(1 << 30, 8) == 225 * MIB
    left = [tensorflow_bytes(80 << 30, capability) // MIB for capability in (6, 7, 8, 9, 12)]
    assert left == [500, 1050, 1536, 1800, 1800]


def test_a_connection_of_nccl_takes_what_was_seen() -> None:
    """NVIDIA/nccl issue 1685: allocations of 10485760 and 2097152 bytes; an all-to-all of 8 GPUs, 4.34 - 1.06 GB."""
    assert nccl_bytes(0, 1, {"NCCL_MAX_P2P_NCHANNELS": "1"}) == 10485760 + 2097152
    assert nccl_bytes(0, 7, {}) == pytest.approx(4.34e9 - 1.06e9, rel=0.2)


def test_what_nccl_takes_follows_groups_channels_and_buffers() -> None:
    one = nccl_bytes(1, 0, {})
    assert one == 24 * 3 * 12 * MIB and nccl_bytes(3, 0, {}) == 3 * one and nccl_bytes(0, 0, {}) == 0
    assert nccl_bytes(1, 0, {"NCCL_MAX_NCHANNELS": "4"}) == one // 6
    assert nccl_bytes(1, 0, {"NCCL_MAX_NCHANNELS": "64"}) == nccl_bytes(1, 0, {"NCCL_BUFFSIZE": "many"}) == one
    assert nccl_bytes(1, 0, {"NCCL_BUFFSIZE": str(16 * MIB)}) == 24 * 3 * 24 * MIB
