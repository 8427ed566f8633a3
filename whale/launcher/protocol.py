"""Defines the messages between the launcher and a worker: the run's token as plain bytes, WELCOME, then frames both
ways.

A frame is one byte of kind, four bytes of payload length (big endian), and the payload. The launcher parses nothing
that arrives on a connection until the token has been received and compared (whale/token_listener.py).
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
# Set when `whale run --trace` wants the ranks' traces.
TRACE_VARIABLE = "WHALE_LAUNCHER_TRACE"
# Path of the library that is preloaded into mpirun when all ranks are on this host; whale_ops/loopback reads it.
LOOPBACK_VARIABLE = "WHALE_LOOPBACK"
PRELOAD_VARIABLE = "LD_PRELOAD"
# The folder for this run's shared memory on each host, so that what a killed rank leaves there can be removed.
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
# For an mpirun that starts only some of a run's ranks (joining ranks, or those of one host): the number of its first
# rank; and, if these belong to the run's start, the number of all ranks.
FIRST_VARIABLE = "WHALE_LAUNCHER_FIRST"
TOTAL_VARIABLE = "WHALE_LAUNCHER_TOTAL"


class FrameKind(enum.IntEnum):
    """Numbers the kinds of frames. The payload is JSON, except for STDOUT, STDERR and TRACE, whose payload is raw
    bytes.
    """

    # Who sends it: the payload.
    HELLO = 1  # worker: `Hello`
    STDOUT = 2  # worker: what the script wrote to stdout
    STDERR = 3  # worker: what the script wrote to stderr
    FAILURE = 4  # worker: `RaisedReport`, sent when the script raised, before its process ends
    EXIT = 5  # worker: `ExitStatus`, after all output
    SIGNAL = 6  # launcher: {signal}, to be sent to the script's process group
    HEARTBEAT = 7  # worker: {}, every HEARTBEAT_S
    STOPPED = 8  # worker: `StopReport`, when the script's process is stopped (SIGSTOP) or goes on
    SCRIPT = 9  # worker: `ScriptMessage`, a message of the script, see whale/distributed/watch.py
    LOST = 10  # launcher: news for the script (a rank or mpirun is gone, ranks have joined), see the same file
    CLOCK = 11  # launcher: {asked_ns}; worker: `ClockAnswer`
    TRACE = 12  # worker: what the script wrote to its trace, see whale/distributed/trace.py
    DEAF = 13  # worker: {}, when the script closed its end of their socket DEAF_S ago and still runs


class Hello(msgspec.Struct, frozen=True):
    """Holds a worker's first message: its rank, the number of ranks, its host, and where its script runs.

    Attributes:
        pid: process number of the script on that host.
        clock: what `whale.launcher.connection.read_identity` returned there, so that the launcher knows whether both
          read the same clock.
    """

    rank: int
    size: int
    host: str
    pid: int
    clock: str


class RaisedReport(msgspec.Struct, frozen=True):
    """Reports that a script ended with an exception or a non-zero ``sys.exit``; script.py writes it.

    Attributes:
        type: class name of the exception; "" for ``sys.exit`` with a number.
        message: the exception's text.
        traceback: the formatted traceback, "" if a hook of the user's has printed it.
        code: exit code of the script.
    """

    type: str
    message: str
    traceback: str
    code: int


class MemoryKill(msgspec.Struct, frozen=True):
    """Reports that the kernel killed a script because memory ran out.

    Attributes:
        limit_bytes: memory limit of the script's control group; None: it has no limit, the host itself ran out of
          memory.
        held_bytes: the peak resident memory of the script's process.
    """

    limit_bytes: int | None
    held_bytes: int


class ExitStatus(msgspec.Struct, frozen=True):
    """Reports how a script's process ended.

    Attributes:
        code: exit code; 128 + signal if a signal killed it.
        signal: the signal that killed it, or 0.
        told: the signal that the worker itself received before, as mpirun sends when it ends its ranks; or 0.
        memory: details if the kernel killed the script because memory ran out; else None.
    """

    code: int
    signal: int
    told: int = 0
    memory: MemoryKill | None = None


class StopReport(msgspec.Struct, frozen=True):
    """Reports that a script's process was stopped (SIGSTOP), or continued."""

    stopped: bool


class ClockAnswer(msgspec.Struct, frozen=True):
    """Holds a worker's answer to a question about its clock, from which `Clock` computes the offset of its host's
    clock.

    Attributes:
        asked_ns: when the launcher asked, by the launcher's clock.
        received_ns: when the worker received the question, by the worker's clock.
        answered_ns: when the worker answered, by the worker's clock.
    """

    asked_ns: int
    received_ns: int
    answered_ns: int


class Stall(TypedDict):
    """Reports what a rank has waited for longest: the operation (``what``), for how long, and the ranks that are
    missing.
    """

    what: str
    seconds: float
    missing: list[int]


class RankEnd(TypedDict):
    """Reports what a rank had when its run of Whale ended, so that the launcher can warn of ranks that trained apart.

    ``alone`` is a sentence about what the rank trained by itself, "" if Whale distributed its steps. ``held`` describes
    its variables (whale/replicas.py), which are compared between the ranks.
    """

    alone: str
    held: dict[str, Held]


class Counter(TypedDict):
    """Holds the counters of one kind of operation under one key on a rank; see ``whale_ops.communicator.OpCounter``."""

    key: str
    kind: str
    calls: int
    logical_bytes: int
    wire_bytes: int
    seconds: float
    waiting_seconds: float


class Progress(TypedDict):
    """Reports the work that a rank's process has done since its ``wh.init``; each rank sends one about every second.

    ``begun_ns`` is the time of that ``wh.init``, which tells one ``wh.init`` of a process from the next. ``programs``
    maps the name of a program to (calls, seconds). ``logical_bytes``, ``sent_bytes`` and ``waiting_s`` are sums over
    all exchanges. ``memory_bytes`` and ``peak_bytes`` are the resident memory now and at its peak. ``doing`` is
    (program, seconds so far) while a step runs, else None. ``wait`` is the longest wait of an exchange under way, if
    longer than a second, else None.
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
    """Holds the plan under which a program runs, as text, for TensorBoard; ``name`` is the program's."""

    name: str
    text: str


class ScriptMessage(msgspec.Struct, frozen=True):
    """Represents one message from a script to the launcher; every field that the message does not contain is None.

    The fields are described in whale/distributed/watch.py, which sends them, and in
    `whale.launcher.job.ranks.RankLink`, which keeps them.
    """

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
    """Decodes a frame's JSON payload into the given type of message.

    Raises:
        ValueError: the payload is not JSON, or has not the fields of that type.
    """
    try:
        return msgspec.json.decode(payload, type=message)
    except RecursionError:  # deeply nested brackets in a field that the type does not have
        raise ValueError("a message between a rank and the launcher is nested too deeply to be read") from None


def pack(kind: FrameKind, payload: bytes | dict[str, Any]) -> bytes:
    """Encodes one frame; a dictionary becomes a JSON payload, bytes stay as given."""
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return _HEADER.pack(kind, len(data)) + data


class Unpacker:
    """Collects the bytes received on one connection and splits them into frames.

    Args:
        first_bytes: the longest payload that the first frame may have; None: `limit_bytes` holds for that one, too.
        limit_bytes: the longest payload of every later frame.
    """

    __slots__ = ("_buffer", "_first_bytes", "_limit_bytes")

    def __init__(self, first_bytes: int | None = None, limit_bytes: int = FRAME_LIMIT_BYTES) -> None:
        self._buffer = bytearray()
        self._limit_bytes = limit_bytes
        self._first_bytes = first_bytes

    def feed(self, data: bytes) -> list[tuple[FrameKind, bytes]]:
        """Appends received bytes and returns the frames that are now complete, as (kind, payload).

        Raises:
            ValueError: the kind of a frame is unknown, or its payload is longer than the limit.
        """
        self._buffer += data
        frames: list[tuple[FrameKind, bytes]] = []
        offset = 0
        while len(self._buffer) - offset >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._buffer, offset)
            kind = FrameKind(number)
            limit = self._limit_bytes if self._first_bytes is None else self._first_bytes
            if length > limit:
                raise ValueError(
                    f"a message of {length} bytes arrived, and messages of ranks have at most {limit} bytes: the "
                    "sender is no rank of this run"
                )
            end = offset + _HEADER.size + length
            if len(self._buffer) < end:
                break
            self._first_bytes = None
            frames.append((kind, bytes(self._buffer[offset + _HEADER.size : end])))
            offset = end
        del self._buffer[:offset]
        return frames
