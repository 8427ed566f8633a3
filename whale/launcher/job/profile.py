"""Converts a run's trace to a profile for TensorBoard: an ``XSpace`` for each rank, beside the scalars.

The messages are those of tensorflow/tsl/profiler/protobuf/xplane.proto. Spans of one track become events of one line;
what a trace says beside their names and times, their statistics.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from whale.launcher.protobuf import encode_message, encode_number, encode_string

_PLANE = "/host:CPU"  # of threads of a host, to those who show profiles


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
            encode_message(
                3, encode_number(1, at) + encode_string(2, track.name or f"track {at}") + b"".join(track.events)
            )
            for at, track in sorted(self.tracks.items())
            if track.events
        )
        known = b"".join(_encode_entry(4, at, name) for name, at in self.names.items())
        keys = b"".join(_encode_entry(5, at, name) for name, at in self.keys.items())
        return encode_message(1, encode_number(1, 1) + encode_string(2, _PLANE) + lines + known + keys) + encode_string(
            4, f"rank{rank}"
        )

    def _add(self, track: _Track, name: str, start_us: float, end_us: float, args: dict[str, Any]) -> None:
        at = self.names.setdefault(name, len(self.names) + 1)
        times = encode_number(2, round(1e6 * start_us)) + encode_number(
            3, round(1e6 * max(0.0, end_us - start_us))
        )  # picoseconds
        found = (
            encode_message(
                4, encode_number(1, self.keys.setdefault(key, len(self.keys) + 1)) + encode_string(5, str(value))
            )
            for key, value in args.items()
        )
        track.events.append(encode_message(4, encode_number(1, at) + times + b"".join(found)))


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
    return encode_message(at, encode_number(1, key) + encode_message(2, encode_number(1, key) + encode_string(2, name)))
