"""Writes TensorBoard's files of a run without TensorFlow: scalars and texts of each rank, and a profile from the trace.

An event file is a sequence of records (length, checksum of the length, data, checksum of the data), each of which is an
``Event`` of tensorflow/core/util/event.proto. A profile is one ``XSpace`` per rank
(tensorflow/tsl/profiler/protobuf/xplane.proto), in a folder beside the scalars: each track of the trace becomes a line,
each span an event, and a span's arguments its statistics. The protobuf messages are encoded by hand, since the launcher
loads neither TensorFlow nor protobuf.
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
_PLANE = "/host:CPU"  # the name under which profile viewers look for the threads of a host
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf wire types


class EventFiles:
    """Writes the event files of a run, from construction to ``close``; a rank's file is created with its first record.

    Args:
        folder: the folder that TensorBoard is given as ``--logdir``; created if it does not exist.

    Raises:
        ClusterError: the folder cannot be created or written to.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}
        self._error: OSError | None = None
        try:
            os.makedirs(folder, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError("no permission to write in this folder")
        except OSError as error:
            raise ClusterError(
                "TensorBoard's files cannot be written",
                given=f"--logdir {folder}",
                reason=error,
                expected="a folder that can be written to, or created",
                action="give --logdir another folder",
            ) from error

    def write_scalars(self, rank: int, step: int, values: Mapping[str, float]) -> None:
        """Writes scalars (tag -> value) of a rank at a step."""
        found = [
            _encode_string(1, tag) + _encode_field(2, _FIXED32, struct.pack("<f", value))
            for tag, value in values.items()
        ]
        self._write(rank, step, found)

    def write_text(self, rank: int, tag: str, text: str) -> None:
        """Writes a text of a rank, which TensorBoard shows verbatim on its Text page."""
        shown = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown leaves indented lines alone
        tensor = _encode_number(1, _DT_STRING) + _encode_message(2, b"") + _encode_string(8, shown)
        metadata = _encode_message(1, _encode_string(1, "text"))
        self._write(rank, 0, [_encode_string(1, tag) + _encode_message(8, tensor) + _encode_message(9, metadata)])

    def format_summary(self) -> str:
        """Returns a sentence for the end of the run: where the files are, or why there are none."""
        if not self._files and self._error is None:
            return f"nothing for TensorBoard is in {self._folder}: no rank has run a step that Whale distributes"
        text = f"scalars and plans are in {self._folder}: tensorboard --logdir {self._folder}"
        return text if self._error is None else f"{text}; then they could not be written: {self._error}"

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()

    def _write(self, rank: int, step: int, values: list[bytes]) -> None:
        """Writes one event with the given values; after an error, such as a full disk, nothing more is written.

        The error does not end the run; `format_summary` reports it.
        """
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
    """Returns the masked CRC-32C of TensorFlow's record format, 4 bytes (tensorflow/core/lib/hash/crc32c.h)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@dataclass(slots=True)
class _Track:
    """Holds one track of the trace, in general a thread.

    Attributes:
        name: the track's name.
        events: ended events, encoded as protobuf messages.
        open: events that have begun and not ended, as (name, start in us, arguments), innermost last.
    """

    name: str = ""
    events: list[bytes] = field(default_factory=list)
    open: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)


@dataclass(slots=True)
class _Rank:
    """Converts a rank's trace events to an ``XSpace``.

    Attributes:
        tracks: the rank's tracks, by number.
        names: names of events -> their numbers in the profile.
        keys: names of event arguments -> their numbers in the profile.
        end_us: the latest time that occurs, in microseconds.
    """

    tracks: dict[int, _Track] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    end_us: float = 0.0

    def take(self, event: dict[str, Any]) -> None:
        """Adds one event, a JSON object of Chrome's trace format."""
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
        """Returns the rank's encoded ``XSpace``. Events that never ended get the end of the trace as their end."""
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
    """Converts a finished trace to a profile that TensorBoard shows.

    Args:
        trace: path of the file that `whale run --trace` has written, one event per line.
        folder: the folder that TensorBoard is given as ``--logdir``.

    Returns:
        "" on success, else a sentence that says why the profile could not be written.
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
        return f"the trace {trace} could not be made a profile for TensorBoard: {error}"
    return ""


def _read_events(trace: str) -> Iterator[dict[str, Any]]:
    with open(trace, "rb") as file:
        for line in file:
            if (line := line.strip().rstrip(b",")) not in (b"[", b"]", b"[]", b""):
                yield msgspec.json.decode(line, type=dict[str, Any])


def _encode_entry(at: int, key: int, name: str) -> bytes:
    """Encodes an entry of a protobuf map from a number to a message that holds the same number and a name.

    Args:
        at: field number of the map.
        key: the number.
        name: the name.
    """
    return _encode_message(
        at, _encode_number(1, key) + _encode_message(2, _encode_number(1, key) + _encode_string(2, name))
    )


def _encode_varint(value: int) -> bytes:
    """Encodes a non-negative integer as a protobuf varint, seven bits per byte."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _encode_field(number: int, kind: int, payload: bytes) -> bytes:
    """Encodes a protobuf field from its number, its wire type (`kind`) and its payload, which is encoded already."""
    return _encode_varint(number << 3 | kind) + payload


def _encode_number(at: int, value: int) -> bytes:
    """Encodes the protobuf field with number `at`, which holds a non-negative integer."""
    return _encode_field(at, _VARINT, _encode_varint(value))


def _encode_message(number: int, payload: bytes) -> bytes:
    """Encodes the protobuf field with this number, which holds a message or bytes."""
    return _encode_field(number, _BYTES, _encode_varint(len(payload)) + payload)


def _encode_string(number: int, content: str) -> bytes:
    """Encodes the protobuf field with this number, which holds a string."""
    return _encode_message(number, content.encode(errors="replace"))
