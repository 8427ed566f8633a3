"""Writes TensorBoard's files of a run without TensorFlow: scalars and texts of each rank, and the profile of a trace.

An event file is a row of records (length, its checksum, data, their checksum); a record is an ``Event`` of
tensorflow/core/util/event.proto. A profile is an ``XSpace`` for each rank, beside the scalars, of
tensorflow/tsl/profiler/protobuf/xplane.proto: spans of one track become events of one line; what a trace says beside
their names and times, their statistics. Messages are encoded by hand: the launcher has neither TensorFlow nor its
messages.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from whale.errors import ClusterError

_DT_STRING = 7
_PLANE = "/host:CPU"  # of threads of a host, to those who show profiles
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of fields on the wire


class EventFiles:
    """The event files of a run, open from construction to ``close``; a rank's file is made with its first record.

    Args:
        folder: what TensorBoard is given as ``--logdir``.

    Raises:
        ClusterError: it cannot be made, or written to.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}
        self._error: OSError | None = None
        try:
            os.makedirs(folder, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError("no permission")
        except OSError as error:
            raise ClusterError(
                "TensorBoard's files cannot be written",
                given=f"--logdir {folder}",
                reason=error,
                expected="a folder, or a place where one can be made",
                action="correct the path",
            ) from error

    def write_scalars(self, rank: int, step: int, values: Mapping[str, float]) -> None:
        """Writes values of a rank at a step, by tag."""
        found = [
            _encode_string(1, tag) + _encode_field(2, _FIXED32, struct.pack("<f", value))
            for tag, value in values.items()
        ]
        self._write(rank, step, found)

    def write_text(self, rank: int, tag: str, text: str) -> None:
        """Writes a text of a rank, which TensorBoard shows as it is under Text."""
        shown = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown leaves indented lines alone
        tensor = _encode_number(1, _DT_STRING) + _encode_message(2, b"") + _encode_string(8, shown)
        metadata = _encode_message(1, _encode_string(1, "text"))
        self._write(rank, 0, [_encode_string(1, tag) + _encode_message(8, tensor) + _encode_message(9, metadata)])

    def format_summary(self) -> str:
        """Says in a sentence what was written."""
        if not self._files and self._error is None:
            return f"nothing for TensorBoard is in {self._folder}: no rank has run a step that Whale distributes"
        text = f"scalars and plans are in {self._folder}: tensorboard --logdir {self._folder}"
        return text if self._error is None else f"{text}; then they could not be written: {self._error}"

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()

    def _write(self, rank: int, step: int, values: list[bytes]) -> None:
        """Writes values; an error (a full disk) is kept for `format_summary` and does not end the run."""
        if self._error is not None:
            return
        try:
            if rank not in self._files:
                self._files[rank] = self._open(rank)
            event = (
                _encode_now()
                + _encode_number(2, step)
                + _encode_message(5, b"".join(_encode_message(1, v) for v in values))
            )
            self._files[rank].write(_encode_record(event))
        except OSError as error:
            self._error = error

    def _open(self, rank: int) -> BinaryIO:
        folder = os.path.join(self._folder, f"rank{rank}")
        os.makedirs(folder, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.whale"
        file = open(os.path.join(folder, name), "wb", buffering=0)
        file.write(_encode_record(_encode_now() + _encode_string(3, "brain.Event:2")))
        return file


def _encode_now() -> bytes:
    return _encode_field(1, _FIXED64, struct.pack("<d", time.time()))


def _encode_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _compute_checksum(length) + data + _compute_checksum(data)


def _make_crc_table() -> list[int]:
    table = list(range(256))
    for i in table:
        for _ in range(8):
            table[i] = table[i] >> 1 ^ (0x82F63B78 if table[i] & 1 else 0)
    return table


_CRC32C = _make_crc_table()


def _compute_checksum(data: bytes) -> bytes:
    """Returns the CRC-32C, masked as in TensorFlow's records (tensorflow/core/lib/hash/crc32c.h)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@dataclass(slots=True)
class _Track:
    """A track's encoded events that have ended, and those under way as (name, start, arguments)."""

    name: str = ""
    events: list[bytes] = field(default_factory=list)
    open: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)


@dataclass(slots=True)
class _Rank:
    """A rank's tracks by their numbers; names of events and of statistics -> numbers; the latest time, in us."""

    tracks: dict[int, _Track] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    end_us: float = 0.0

    def take(self, event: dict[str, Any]) -> None:
        """Takes one event of the trace."""
        track = self.tracks.setdefault(int(event.get("tid", 0)), _Track())
        kind, name, args = event.get("ph"), str(event.get("name", "")), dict(event.get("args") or {})
        if kind == "M":
            track.name = str(args.get("name", "")) if name == "thread_name" else track.name
            return
        start_us = max(0.0, float(event.get("ts", 0.0)))
        self.end_us = max(self.end_us, start_us + float(event.get("dur", 0.0)))
        if kind == "B":
            track.open.append((name, start_us, args))
        elif kind == "E" and track.open:
            begun, begun_us, before = track.open.pop()
            self._add(track, begun, begun_us, start_us, before | args)
        elif kind in ("X", "i"):
            self._add(track, name, start_us, start_us + float(event.get("dur", 0.0)), args)

    def encode(self, rank: int) -> bytes:
        """Returns all of it encoded; what was under way at the end of the trace ends there."""
        for track in self.tracks.values():
            while track.open:
                name, start_us, args = track.open.pop()
                self._add(track, name, start_us, self.end_us, args)
        lines = b"".join(
            _encode_message(
                3, _encode_number(1, at) + _encode_string(2, track.name or f"track {at}") + b"".join(track.events)
            )
            for at, track in sorted(self.tracks.items())
            if track.events
        )
        known = b"".join(_encode_entry(4, at, name) for name, at in self.names.items())
        keys = b"".join(_encode_entry(5, at, name) for name, at in self.keys.items())
        return _encode_message(
            1, _encode_number(1, 1) + _encode_string(2, _PLANE) + lines + known + keys
        ) + _encode_string(4, f"rank{rank}")

    def _add(self, track: _Track, name: str, start_us: float, end_us: float, args: dict[str, Any]) -> None:
        at = self.names.setdefault(name, len(self.names) + 1)
        times = _encode_number(2, round(1e6 * start_us)) + _encode_number(
            3, round(1e6 * max(0.0, end_us - start_us))
        )  # picoseconds
        found = (
            _encode_message(
                4, _encode_number(1, self.keys.setdefault(key, len(self.keys) + 1)) + _encode_string(5, str(value))
            )
            for key, value in args.items()
        )
        track.events.append(_encode_message(4, _encode_number(1, at) + times + b"".join(found)))


def write_profile(trace: str, folder: str) -> str:
    """Writes the profile of a finished trace.

    Args:
        trace: the file that `whale run --trace` has written, an event a line.
        folder: what TensorBoard is given as ``--logdir``.

    Returns:
        Why it could not be written, as a sentence; "" if it was.
    """
    ranks: dict[int, _Rank] = {}
    into = os.path.join(folder, "plugins", "profile", time.strftime("%Y_%m_%d_%H_%M_%S"))
    try:
        for event in _read_events(trace):
            ranks.setdefault(int(event["pid"]), _Rank()).take(event)
        os.makedirs(into, exist_ok=True)
        for rank, found in sorted(ranks.items()):
            with open(os.path.join(into, f"rank{rank}.xplane.pb"), "wb") as file:
                file.write(found.encode(rank))
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"the trace could not be made a profile: {error}"
    return ""


def _read_events(trace: str) -> Iterator[dict[str, Any]]:
    with open(trace, "rb") as file:
        for line in file:
            if (line := line.strip().rstrip(b",")) not in (b"[", b"]", b"[]", b""):
                yield msgspec.json.decode(line, type=dict[str, Any])


def _encode_entry(at: int, key: int, name: str) -> bytes:
    """Encodes an entry of a map from numbers to messages that hold the number and a name."""
    return _encode_message(
        at, _encode_number(1, key) + _encode_message(2, _encode_number(1, key) + _encode_string(2, name))
    )


def _encode_varint(value: int) -> bytes:
    """Encodes a whole number that is not negative, seven bits a byte."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _encode_field(number: int, kind: int, payload: bytes) -> bytes:
    """Encodes a field, whose payload is encoded already as its wire type wants it."""
    return _encode_varint(number << 3 | kind) + payload


def _encode_number(at: int, value: int) -> bytes:
    """Encodes a protobuf field that holds a whole number, 0 or more."""
    return _encode_field(at, _VARINT, _encode_varint(value))


def _encode_message(number: int, payload: bytes) -> bytes:
    """Encodes a protobuf field that holds a message or bytes."""
    return _encode_field(number, _BYTES, _encode_varint(len(payload)) + payload)


def _encode_string(number: int, content: str) -> bytes:
    """Encodes a protobuf field that holds a text."""
    return _encode_message(number, content.encode(errors="replace"))
