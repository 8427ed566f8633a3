"""Connects a worker to the launcher, and measures how far the rank's clock is ahead of the launcher's.

Each clock counts from the start of its own machine; the offset comes of questions and answers over the connection.

Decision: 0065.
"""

from __future__ import annotations

import collections
import os
import socket
import struct
import time
from pathlib import Path

from whale.launcher.protocol import ADDRESS_VARIABLE, WELCOME
from whale.token_listener import keep_alive

# Where TCP_INFO has the milliseconds since anything was acknowledged.
_ACKNOWLEDGED_AT = 56
_CONNECT_S = 30.0
_AGAIN_S = 0.1

# What a worker sends has to be acknowledged within so many seconds; once `fault.freeze_s` is known, after which the
# launcher gives the rank up, within so many more than that.
_ACKNOWLEDGED_S, _LATER_S = 8.0, 4.0
_SAMPLES = 8  # as many as NTP's clock filter keeps; with two questions a second that is the last four seconds


def connect(token: str) -> socket.socket:
    """Connects to the launcher and returns the connection once the launcher has welcomed it.

    The token is sent at once, since the launcher does not keep connections for long that have not shown it. When many
    come at a time it may close even this one before the token is there: then this rank tries again.

    Raises:
        OSError: the launcher is not reached, or closes every connection, for `_CONNECT_S`.
    """
    host, _, port = os.environ[ADDRESS_VARIABLE].rpartition(":")
    until_s = time.monotonic() + _CONNECT_S
    while True:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        try:
            keep_alive(connection)
            limit_silence(connection, _ACKNOWLEDGED_S - _LATER_S)
            connection.sendall(token.encode())
            if connection.recv(len(WELCOME)) == WELCOME:
                connection.settimeout(None)
                return connection
            raise ConnectionResetError(f"whale run at {host}:{port} closes the connection")
        except ConnectionError:
            connection.close()
            if time.monotonic() > until_s:
                raise
            time.sleep(_AGAIN_S)


def limit_silence(connection: socket.socket, freeze_s: float) -> None:
    """Lets a worker's connection break a moment after the launcher gives the rank up: when its host is unplugged.

    Without a limit the system would send what is not acknowledged again and again, for a quarter of an hour.

    Args:
        freeze_s: for how long a rank's host may be silent; 0: for ever.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        limit_ms = round(1e3 * (freeze_s + _LATER_S)) if freeze_s else 0
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def find_unacknowledged_s(connection: socket.socket) -> float:
    """Returns for how many seconds the other host has acknowledged nothing; infinite where the system does not tell."""
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED_AT + 4)
        return 1e-3 * float(struct.unpack_from("I", told, _ACKNOWLEDGED_AT)[0])
    except (AttributeError, OSError, struct.error):
        return float("inf")


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
