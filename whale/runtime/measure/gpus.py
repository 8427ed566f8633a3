"""Measures a machine's GPUs: their memory, and how fast TensorFlow copies tensors between them and the host's
memory.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import tensorflow as tf

from cost_model.graph.machine_profile import Copies, Gpu
from whale_ops import gpu_driver

SIZES_BYTES = (1 << 16, 1 << 20, 1 << 24)
ROUNDS, COPIES = 5, 4


def find_gpus() -> list[Gpu]:
    """Returns the GPUs of this process."""
    driver = gpu_driver.look()
    return [Gpu(gpu.name, gpu.memory_bytes / 1e9) for gpu in driver.gpus] if driver is not None else []


def measure_copies(devices: Sequence[str]) -> list[Copies]:
    """Measures seconds of copies from each device to each other one.

    Args:
      devices: names of TensorFlow's; the host's memory is that of a processor.
    """
    found = []
    for source, target in itertools.permutations(devices, 2):
        samples = [(float(size), _measure_copy_s(source, target, size)) for size in SIZES_BYTES]
        found.append(Copies(source, target, samples))
    return found


def _measure_copy_s(source: str, target: str, size_bytes: int) -> float:
    with tf.device(source):
        tensors = [tf.random.uniform([size_bytes // 4]) for _ in range(COPIES)]
    rounds = []
    for _ in range(ROUNDS):
        tf.test.experimental.sync_devices()
        start_s = time.perf_counter()
        with tf.device(target):
            there = [tf.identity(tensor) for tensor in tensors]
        tf.test.experimental.sync_devices()
        rounds.append((time.perf_counter() - start_s) / COPIES)
        del there
    return statistics.median(rounds[1:])
