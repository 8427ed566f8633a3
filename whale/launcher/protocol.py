"""The frames between launcher and worker: one byte of kind, four bytes of payload length (big endian), payload."""

from __future__ import annotations

import enum
import json
import struct
from typing import Any

ADDRESS_VARIABLE = "WHALE_LAUNCHER_ADDRESS"
TOKEN_VARIABLE = "WHALE_LAUNCHER_TOKEN"
# Set when the ranks' traces are wanted.
TRACE_VARIABLE = "WHALE_LAUNCHER_TRACE"
# The folder for this run's shared memory on each host: what a killed rank leaves there is found, and removed.
SEGMENTS_VARIABLE = "WHALE_LAUNCHER_SEGMENTS"

_HEADER = struct.Struct("!BI")
HELLO_LIMIT_BYTES = 4096
HEARTBEAT_S = 0.5


class Kind(enum.IntEnum):
    """What a frame says. The payload is JSON, but for STDOUT, STDERR and TRACE, where it is the bytes written."""

    HELLO = 1  # worker: {token, rank, size, host, pid, clock}: the pid is the script's; the clock, see clock.py
    STDOUT = 2  # worker
    STDERR = 3  # worker
    FAILURE = 4  # worker: {type, message, traceback, code}, sent when the script raised, before its process ends
    EXIT = 5  # worker: {code, signal}, after all output
    SIGNAL = 6  # launcher: {signal}, to be sent to the script's process group
    HEARTBEAT = 7  # worker: {}, every HEARTBEAT_S
    STOPPED = 8  # worker: {stopped}, when the script's process is stopped (SIGSTOP) or goes on
    SCRIPT = 9  # worker: a message of the script to the launcher, see whale/runtime/ranks/watch.py
    LOST = 10  # launcher: {rank, what}, for the script: another rank is gone
    CLOCK = 11  # launcher: {asked_ns}; worker: {asked_ns, received_ns, answered_ns}
    TRACE = 12  # worker: what the script wrote to its trace, see whale/runtime/ranks/trace.py


def pack(kind: Kind, payload: bytes | dict[str, Any]) -> bytes:
    """One frame as bytes."""
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return _HEADER.pack(kind, len(data)) + data


class Unpacker:
    """Collects received bytes and returns the frames that are complete.

    Attributes:
        limit_bytes: of the payload of the first frame, as long as it is set.
    """

    __slots__ = ("_buffer", "limit_bytes")

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._buffer = bytearray()
        self.limit_bytes = limit_bytes

    def feed(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """The frames that ``data`` completes.

        Raises:
            ValueError: the bytes are no frames, or a frame is longer than the limit.
        """
        self._buffer += data
        frames: list[tuple[Kind, bytes]] = []
        offset = 0
        while len(self._buffer) - offset >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._buffer, offset)
            kind = Kind(number)
            # What follows a greeting in the same bytes is not under its limit, which ends with the greeting.
            if self.limit_bytes is not None and not frames and length > self.limit_bytes:
                raise ValueError(f"a frame of {length} bytes, limit {self.limit_bytes}")
            end = offset + _HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append((kind, bytes(self._buffer[offset + _HEADER.size : end])))
            offset = end
        del self._buffer[:offset]
        return frames
