"""Connects a worker to the launcher over TCP, and estimates the offset between the clocks of their hosts.

The monotonic clock of each host counts from its own boot. `whale run --trace` merges the events of all hosts into one
timeline, so the launcher measures each host's offset by exchanging timestamps over the connection, as NTP does.

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

# Offset of tcpi_last_ack_recv in struct tcp_info (linux/tcp.h): milliseconds since the last acknowledgement.
_ACKNOWLEDGED_AT = 56
_CONNECT_S = 30.0
_AGAIN_S = 0.1

# A worker's connection breaks when nothing that it sent is acknowledged for `_ACKNOWLEDGED_S`, until the worker knows
# `fault.freeze_s`, after which the launcher gives a silent rank up: then it breaks `_LATER_S` after that.
_ACKNOWLEDGED_S, _LATER_S = 8.0, 4.0
_SAMPLES = 8  # as many as NTP's clock filter keeps; with two questions a second that is the last four seconds


def connect(token: str) -> socket.socket:
    """Connects this worker to the launcher and returns the socket once the launcher has accepted the run's token.

    The address comes from the environment variable ``WHALE_LAUNCHER_ADDRESS``. The token is sent immediately, because
    the launcher soon closes connections that have not shown one. While very many ranks connect at once it may close
    even a valid connection before the token arrives; then this function connects again.

    Args:
        token: the run's shared secret, as text; the launcher answers with ``WELCOME``.

    Raises:
        OSError: the launcher cannot be reached, or has closed every connection for `_CONNECT_S` seconds.
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
            raise ConnectionResetError(
                f"the `whale run` that listens at {host}:{port} has closed this rank's connection: it belongs to "
                "another run, or the run is ending"
            )
        except ConnectionError:
            connection.close()
            if time.monotonic() > until_s:
                raise
            time.sleep(_AGAIN_S)


def limit_silence(connection: socket.socket, freeze_s: float) -> None:
    """Sets how long a worker's connection survives while the launcher's host acknowledges nothing (TCP_USER_TIMEOUT).

    The limit is `freeze_s` plus `_LATER_S`, so the launcher gives up a silent rank first, and the rank's own connection
    breaks shortly after, for example when its host is unplugged. Without a limit the system would retransmit for about
    a quarter of an hour.

    Args:
        freeze_s: seconds for which a rank's host may be silent (the key ``fault.freeze_s``); 0: no limit.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        limit_ms = round(1e3 * (freeze_s + _LATER_S)) if freeze_s else 0
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def find_unacknowledged_s(connection: socket.socket) -> float:
    """Returns how many seconds ago the other host last acknowledged data (TCP_INFO); infinity where the system does not
    say.
    """
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED_AT + 4)
        return 1e-3 * float(struct.unpack_from("I", told, _ACKNOWLEDGED_AT)[0])
    except (AttributeError, OSError, struct.error):
        return float("inf")


def read_identity() -> str:
    """Returns a text that is equal for two processes if they read the same monotonic clock (same boot, same time
    namespace).

    An empty text means that this is unknown, and the offset has to be measured.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return ""  # not known: the difference is measured


class Clock:
    """Estimates the offset of another process's monotonic clock from timestamps exchanged over a connection.

    One question and its answer give four times. The offset is half the sum of the two apparent one-way delays, one of
    which contains the offset with a plus sign, the other with a minus sign (RFC 5905). Its error is at most half the
    difference of the true delays, so the answer with the shortest round trip among the last `_SAMPLES` is used. Older
    answers are dropped, since clocks drift.

    Args:
        is_ours: whether the other process reads the same clock as this one; then the offset is 0 and nothing is
          measured.
    """

    def __init__(self, is_ours: bool = False) -> None:
        self.is_ours = is_ours
        self._samples: collections.deque[tuple[int, int]] = collections.deque(maxlen=_SAMPLES)  # (round trip, offset)
        self.asked_ns = 0  # when the last question was sent

    @property
    def offset_ns(self) -> int | None:
        """Returns what to subtract from the other process's times to get this process's, in ns; None before the first
        answer.
        """
        if self.is_ours:
            return 0
        return min(self._samples)[1] if self._samples else None

    def add(self, asked_ns: int, received_ns: int, answered_ns: int, heard_ns: int) -> None:
        """Records one question and its answer.

        Args:
            asked_ns: when this process sent the question, by its own clock.
            received_ns: when the other process received the question, by the other clock.
            answered_ns: when the other process sent the answer, by the other clock.
            heard_ns: when this process received the answer, by its own clock.
        """
        round_trip_ns = (heard_ns - asked_ns) - (answered_ns - received_ns)
        self._samples.append((round_trip_ns, (received_ns - asked_ns + answered_ns - heard_ns) // 2))

    @property
    def is_known(self) -> bool:
        """Returns True if the offset is as good as it gets: the clock is shared, or `_SAMPLES` answers have arrived."""
        return self.is_ours or len(self._samples) == _SAMPLES

    def is_due(self, now_ns: int, every_s: float) -> bool:
        """Returns True if the last question is at least `every_s` seconds old, so that the next one should be sent."""
        return not self.is_ours and now_ns - self.asked_ns >= every_s * 1e9
