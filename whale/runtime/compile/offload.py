"""Finds the device that computes under ``memory.offload``, and counts bytes copied between it and the host's memory.

Decision: 0075.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from whale.capture.encode import HOST_DEVICE
from whale.config import Config
from whale.errors import ConfigError


def compute_device(config: Config, devices: Iterable[Any] | None = None) -> str:
    """Returns the name of the computing device: the first accelerator, or a second logical CPU device.

    Args:
      devices: of a session; None: this process's.

    Raises:
      ConfigError: there is none: computation uses the host's memory.
    """
    others = _list_host_devices(tf.config.list_logical_devices() if devices is None else devices)
    if not others:
        raise ConfigError(
            "variables cannot be offloaded to the host's memory: the computing device is the host",
            given=f"memory.offload={config['memory.offload']!r}, and no device beside {HOST_DEVICE}",
            expected="an accelerator; to try it without one, a second logical device of the processor "
            "(tf.config.set_logical_device_configuration; of a session, ConfigProto(device_count={'CPU': 2}))",
            action='leave it out; memory.zero=3, memory.recompute="auto" and more micro-batches save memory',
        )
    return others[0]


def has_compute_device() -> bool:
    """Tells whether there is a computing device with memory of its own, separate from the host's."""
    return bool(_list_host_devices(tf.config.list_logical_devices()))


def _list_host_devices(devices: Iterable[Any]) -> list[str]:
    found = list(devices)
    processors = [d for d in found if d.device_type == "CPU"]
    gpus = [d for d in found if d.device_type == "GPU"]
    return [str(d.name) for d in (*gpus, *processors[1:])]


def count_offloaded_bytes() -> tuple[int, int]:
    """Returns (bytes copied by steps of this process to the host's memory, bytes copied from it)."""
    from whale_ops.memory import load_library

    values = (ctypes.c_int64 * 2)()
    load_library().whale_offloaded(values)
    return values[0], values[1]
