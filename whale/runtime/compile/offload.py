"""Finds the device that computes under ``memory.offload``, and counts bytes copied between its memory and the host's.

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
    """Returns the name of the device that computes: the first accelerator, or else a second logical CPU device.

    Args:
      config: of the run, for the message.
      devices: of a session; None: this process's.

    Raises:
      ConfigError: there is only one CPU device, whose memory is the host's.
    """
    others = _list_other_devices(tf.config.list_logical_devices() if devices is None else devices)
    if not others:
        raise ConfigError(
            "variables cannot be offloaded to the host's memory: the computing device is the host",
            given=f"memory.offload={config['memory.offload']!r}, and no device beside {HOST_DEVICE}",
            expected="an accelerator; to try it without one, a second logical device of the processor "
            "(tf.config.set_logical_device_configuration; of a session, ConfigProto(device_count={'CPU': 2}))",
            action="leave memory.offload out; memory.zero=3, memory.recompute or more micro-batches save memory",
        )
    return others[0]


def has_compute_device() -> bool:
    """Returns True if there is a GPU or a second logical CPU device, which has memory of its own for Whale."""
    return bool(_list_other_devices(tf.config.list_logical_devices()))


def _list_other_devices(devices: Iterable[Any]) -> list[str]:
    """Returns the names of the devices beside the host: GPUs, and all logical CPU devices but the first."""
    found = list(devices)
    processors = [d for d in found if d.device_type == "CPU"]
    gpus = [d for d in found if d.device_type == "GPU"]
    return [str(d.name) for d in (*gpus, *processors[1:])]


def count_offloaded_bytes() -> tuple[int, int]:
    """Returns how many bytes the steps of this process have copied to the host's memory, and from it."""
    from whale_ops.memory import load_library

    values = (ctypes.c_int64 * 2)()
    load_library().whale_offloaded(values)
    return values[0], values[1]
