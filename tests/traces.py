"""Reads Chrome traces for tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """An event, with its start and end in microseconds; of a point both are equal, of what never ended end is None."""

    name: str
    phase: str
    category: str
    track: int
    start: float
    end: float | None
    arguments: dict[str, Any]

    def within(self, other: Piece) -> bool:
        assert self.end is not None and other.end is not None
        return other.start <= self.start and self.end <= other.end


def pieces(events: Iterable[dict[str, Any]], rank: int) -> list[Piece]:
    """The events of a rank in order of their starts; begins and ends are joined, which must fit each other."""
    found: list[Piece] = []
    open_events: dict[int, list[dict[str, Any]]] = {}

    def take(event: dict[str, Any], end: float | None, more: dict[str, Any]) -> None:
        start = event.get("ts", float("-inf"))
        arguments = {**event.get("args", {}), **more}
        fields = event["name"], event["ph"], event.get("cat", ""), event.get("tid", 0)
        found.append(Piece(*fields, start, end, arguments))

    for event in events:
        if event["pid"] != rank:
            continue
        if event["ph"] == "B":
            open_events.setdefault(event["tid"], []).append(event)
        elif event["ph"] == "E":
            begun = open_events[event["tid"]].pop()
            assert begun["name"] == event["name"] and begun["ts"] <= event["ts"]
            take(begun, event["ts"], event.get("args", {}))
        else:
            assert event["ph"] in ("X", "i", "M"), event
            take(event, event.get("ts", 0.0) + event.get("dur", 0.0), {})
    for left in open_events.values():
        for event in left:
            take(event, None, {})
    return sorted(found, key=lambda piece: piece.start)


def only(found: Iterable[Piece], name: str) -> Piece:
    """The one piece of that name."""
    (piece,) = [piece for piece in found if piece.name == name]
    return piece
