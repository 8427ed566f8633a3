"""Measures how far a rank's clock is ahead of the launcher's: each counts from the start of its own machine."""

from __future__ import annotations

import collections
import os
from pathlib import Path

_SAMPLES = 8  # as many as NTP's clock filter keeps; with two questions a second that is the last four seconds


def read_identity() -> str:
    """Returns a text that is equal for processes that read the same monotonic clock (one boot, one time namespace)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return ""  # not known: the difference is measured


class Clock:
    """The offset of another process's monotonic clock, measured by questions and answers over a connection.

    The offset is that of RFC 5905: half of the sum of what both ways seem to take, one with the offset added and one
    with it taken away. It is wrong by half the difference of the two ways at most, so of the last few answers the one
    with the shortest round trip counts. Clocks drift, so older ones do not.

    Args:
        is_ours: the other process reads the same clock; nothing is measured, and the offset is 0.
    """

    def __init__(self, is_ours: bool = False) -> None:
        self.is_ours = is_ours
        self._samples: collections.deque[tuple[int, int]] = collections.deque(maxlen=_SAMPLES)  # (round trip, offset)
        self.asked_ns = 0  # when the last question was sent

    @property
    def offset_ns(self) -> int | None:
        """Returns what to subtract from the other process's times to get this one's; None before the first answer."""
        if self.is_ours:
            return 0
        return min(self._samples)[1] if self._samples else None

    def add(self, asked_ns: int, received_ns: int, answered_ns: int, heard_ns: int) -> None:
        """Records an answer: asked and heard in this process's time, received and answered in the other's."""
        round_trip_ns = (heard_ns - asked_ns) - (answered_ns - received_ns)
        self._samples.append((round_trip_ns, (received_ns - asked_ns + answered_ns - heard_ns) // 2))

    @property
    def is_known(self) -> bool:
        """Tells whether enough answers have come to choose one."""
        return self.is_ours or len(self._samples) == _SAMPLES

    def is_due(self, now_ns: int, every_s: float) -> bool:
        """Tells whether it is time to ask again."""
        return not self.is_ours and now_ns - self.asked_ns >= every_s * 1e9
