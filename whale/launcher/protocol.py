"""Defines what launcher and worker send: the run's token as it is, WELCOME back, then frames both ways.

A frame is one byte of kind, four bytes of payload length (big endian), payload. The launcher looks at nothing of a
connection before the token has come and was compared (job/door.py).
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, TypedDict, TypeVar

import msgspec

from whale.replicas import Held

ADDRESS_VARIABLE = "WHALE_LAUNCHER_ADDRESS"
TOKEN_VARIABLE = "WHALE_LAUNCHER_TOKEN"
# Set when the ranks' traces are wanted.
TRACE_VARIABLE = "WHALE_LAUNCHER_TRACE"
# The library that mpirun, where all ranks are on this host, is started with; whale_ops/loopback looks for this name.
LOOPBACK_VARIABLE = "WHALE_LOOPBACK"
PRELOAD_VARIABLE = "LD_PRELOAD"
# The folder for this run's shared memory on each host: what a killed rank leaves there is found, and removed.
SEGMENTS_VARIABLE = "WHALE_LAUNCHER_SEGMENTS"

_HEADER = struct.Struct("!BI")
TOKEN_BYTES = 32  # of a run's token as text: 128 random bits in hexadecimal digits
WELCOME = b"+"  # the launcher's answer to the token
HELLO_LIMIT_BYTES = 4096
FRAME_LIMIT_BYTES = 1 << 28  # of any other frame; counters of many keys are the longest
TEXT_LIMIT = 1 << 20  # characters of an error's message, and of its traceback
CONSEQUENCE = "CommError"  # the error of a script that only says that another rank has failed or is gone
HEARTBEAT_S = 0.5
DEAF_S = 3.0
# Of ranks that come while a run goes on: the number of the first one that their mpirun starts.
FIRST_VARIABLE = "WHALE_LAUNCHER_FIRST"
TOTAL_VARIABLE = "WHALE_LAUNCHER_TOTAL"


class FrameKind(enum.IntEnum):
    """The kinds of frames. The payload is JSON, but for STDOUT, STDERR and TRACE, where it is the bytes written."""

    HELLO = 1  # worker: `Hello`
    STDOUT = 2  # worker
    STDERR = 3  # worker
    FAILURE = 4  # worker: `RaisedReport`, sent when the script raised, before its process ends
    EXIT = 5  # worker: `ExitStatus`, after all output
    SIGNAL = 6  # launcher: {signal}, to be sent to the script's process group
    HEARTBEAT = 7  # worker: {}, every HEARTBEAT_S
    STOPPED = 8  # worker: `StopReport`, when the script's process is stopped (SIGSTOP) or goes on
    SCRIPT = 9  # worker: `ScriptMessage`, a message of the script, see whale/distributed/watch.py
    LOST = 10  # launcher: for the script: another rank, or mpirun, is gone, or ranks have come; see the same file
    CLOCK = 11  # launcher: {asked_ns}; worker: `ClockAnswer`
    TRACE = 12  # worker: what the script wrote to its trace, see whale/distributed/trace.py
    DEAF = 13  # worker: {}, when the script has closed its end of the socket between them for DEAF_S, and runs


class Hello(msgspec.Struct, frozen=True):
    """A worker's greeting; ``pid`` is the script's process, ``clock`` as in clock.py."""

    rank: int
    size: int
    host: str
    pid: int
    clock: str


class RaisedReport(msgspec.Struct, frozen=True):
    """A script's failure, as script.py reports it."""

    type: str
    message: str
    traceback: str
    code: int


class MemoryKill(msgspec.Struct, frozen=True):
    """The kernel's reason to kill a script: memory was out.

    Attributes:
        limit_bytes: that of its control group; None: it has none, and the host's was out.
        held_bytes: the most that the script's process held.
    """

    limit_bytes: int | None
    held_bytes: int


class ExitStatus(msgspec.Struct, frozen=True):
    """The end of a script's process: its exit code, and the signal that killed it or 0.

    Attributes:
        told: the signal by which the worker was told to end before, as mpirun does; or 0.
        memory: where the kernel killed it as memory was out.
    """

    code: int
    signal: int
    told: int = 0
    memory: MemoryKill | None = None


class StopReport(msgspec.Struct, frozen=True):
    """The message that a script's process was stopped, or goes on."""

    stopped: bool


class ClockAnswer(msgspec.Struct, frozen=True):
    """A worker's answer to the question for its time; in nanoseconds of the clocks of asker, worker, worker."""

    asked_ns: int
    received_ns: int
    answered_ns: int


class Stall(TypedDict):
    """A rank's longest wait."""

    what: str
    seconds: float
    missing: list[int]


class RankEnd(TypedDict):
    """The end of a rank's run: what it trained alone, and what its variables hold, as whale/replicas.py compares it."""

    alone: str
    held: dict[str, Held]


class Counter(TypedDict):
    """The communication of a rank under one key."""

    key: str
    kind: str
    calls: int
    logical_bytes: int
    wire_bytes: int
    seconds: float
    waiting_seconds: float


class Progress(TypedDict):
    """The work of a rank's process since its ``wh.init``: calls and seconds by program, and sums over exchanges.

    ``begun_ns`` tells one ``wh.init`` from another; ``doing`` is the program that runs and its seconds so far, ``wait``
    the longest wait of an exchange, from a second on.
    """

    begun_ns: int
    programs: dict[str, tuple[int, float]]
    logical_bytes: int
    sent_bytes: int
    waiting_s: float
    memory_bytes: int
    peak_bytes: int
    doing: tuple[str, float] | None
    wait: Stall | None


class PlanText(TypedDict):
    """The plan of a program, as a text."""

    name: str
    text: str


class ScriptMessage(msgspec.Struct, frozen=True):
    """A message of a script's; what it does not say is None."""

    joining: bool | None = None
    freeze_s: float | None = None
    notice_s: float | None = None
    elastic: bool | None = None
    members: tuple[int, ...] | None = None
    address: str | None = None
    start: str | None = None
    ready: bool | None = None
    stall: Stall | None = None
    end: RankEnd | None = None
    counters: list[Counter] | None = None
    progress: Progress | None = None
    plan: PlanText | None = None


_Message = TypeVar("_Message")


def unpack(payload: bytes, message: type[_Message]) -> _Message:
    """Decodes the message in a frame's payload.

    Raises:
        ValueError: it holds none of that kind.
    """
    try:
        return msgspec.json.decode(payload, type=message)
    except RecursionError:  # brackets within brackets, in a field that nobody asked for
        raise ValueError("a message is nested too deeply") from None


def pack(kind: FrameKind, payload: bytes | dict[str, Any]) -> bytes:
    """Encodes one frame."""
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return _HEADER.pack(kind, len(data)) + data


class Unpacker:
    """The decoder that collects received bytes and returns the frames that are complete.

    Args:
        first_bytes: the longest payload of the first frame.
        limit_bytes: the longest of each other.
    """

    __slots__ = ("_buffer", "_first_bytes", "_limit_bytes")

    def __init__(self, first_bytes: int | None = None, limit_bytes: int = FRAME_LIMIT_BYTES) -> None:
        self._buffer = bytearray()
        self._limit_bytes = limit_bytes
        self._first_bytes = first_bytes

    def feed(self, data: bytes) -> list[tuple[FrameKind, bytes]]:
        """Returns the frames that ``data`` completes.

        Raises:
            ValueError: the bytes are no frames, or a frame is longer than the limit.
        """
        self._buffer += data
        frames: list[tuple[FrameKind, bytes]] = []
        offset = 0
        while len(self._buffer) - offset >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._buffer, offset)
            kind = FrameKind(number)
            limit = self._limit_bytes if self._first_bytes is None else self._first_bytes
            if length > limit:
                raise ValueError(f"a frame of {length} bytes, limit {limit}")
            end = offset + _HEADER.size + length
            if len(self._buffer) < end:
                break
            self._first_bytes = None
            frames.append((kind, bytes(self._buffer[offset + _HEADER.size : end])))
            offset = end
        del self._buffer[:offset]
        return frames
