"""Accepts connections and hands on those that send the run's token; all others are closed.

The launcher accepts its workers this way, and a rank accepts other ranks that connect to it later. Anybody who reaches
the port may connect. So nothing that a connection sends is decoded before its first bytes were compared with the token,
in a time that does not depend on these bytes. At most `STRANGERS` connections without a token are held at once, each
for `TOKEN_S` at most; the oldest is closed for a new one. An error of one connection ends only that one. Processes of
the run send the token as soon as they are connected, so they count as strangers only for as long as the network takes.
If a flood of other connections pushes one of them out before that, it connects again: no process relies on its
connection until it is answered.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import selectors
import socket
import sys
import time
from collections.abc import Callable

STRANGERS = 64
TOKEN_S = 5.0
# Options of linux/tcp.h: lost packets are sent again six times before the interval doubles; the longest interval.
_THIN_LINEAR_TIMEOUTS, _RTO_MAX_MS, _AGAIN_MS = 16, 44, 1000


class TokenListener:
    """Accepts the connections of a listening socket in an event loop, and hands on those that have sent the token.

    Args:
        listener: the socket, non-blocking; the caller closes it.
        token: what a connection has to send first.
        selector: the loop's selector; the data of its keys are functions to call when their file is ready.
        welcome: called with each connection that has sent the token, which is then blocking and no longer in the
            selector, and the header bytes.
        header_bytes: number of bytes after the token that are read before the connection is handed on.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        selector: selectors.BaseSelector,
        welcome: Callable[[socket.socket, bytes], None],
        header_bytes: int = 0,
    ) -> None:
        self._listener = listener
        self._token = token.encode()
        self._wanted_bytes = len(self._token) + header_bytes
        self._selector = selector
        self._welcome = welcome
        self._strangers: collections.OrderedDict[socket.socket, tuple[float, bytearray]] = collections.OrderedDict()
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def deadlines_s(self) -> list[float]:
        """Returns the monotonic time at which the oldest connection without a token is due to be closed; [] if there
        is none.
        """
        return [since_s + TOKEN_S for since_s, _ in list(self._strangers.values())[:1]]

    def look(self) -> None:
        """Closes connections that have not sent a token in time; the loop calls it at `deadlines_s`."""
        now_s = time.monotonic()
        while self._strangers and next(iter(self._strangers.values()))[0] + TOKEN_S <= now_s:
            self._dismiss(next(iter(self._strangers)))

    def close(self) -> None:
        """Closes all connections that have not sent a token."""
        while self._strangers:
            self._dismiss(next(iter(self._strangers)))

    def _accept(self) -> None:
        # At most as many as can be held, then the loop's other work: a flood must not keep the loop from it.
        for _ in range(STRANGERS):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # The connection is gone, or no descriptors are left: then those without a token are given up.
                self.close()
                return
            if len(self._strangers) == STRANGERS:
                self._dismiss(next(iter(self._strangers)))
            self._strangers[connection] = time.monotonic(), bytearray()
            try:
                keep_alive(connection)
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ, lambda c=connection: self._read(c))
            except OSError:
                self._dismiss(connection)
                continue
            self._read(connection)  # a worker's token has usually arrived already

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._strangers:
            return  # closed for a newer one since the selector reported it
        said = self._strangers[connection][1]
        try:
            data = connection.recv(self._wanted_bytes - len(said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        if data and len(said) < self._wanted_bytes:
            return
        token, header = bytes(said[: len(self._token)]), bytes(said[len(self._token) :])
        if not hmac.compare_digest(token, self._token) or len(said) < self._wanted_bytes:
            self._dismiss(connection)
            return
        del self._strangers[connection]
        self._selector.unregister(connection)
        connection.setblocking(True)
        self._welcome(connection, header)

    def _dismiss(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        try:
            self._selector.unregister(connection)
        except KeyError:
            pass  # it was not registered yet
        connection.close()


def keep_alive(connection: socket.socket) -> None:
    """Sets socket options: the connection breaks within half a minute if the other host vanishes, and sends without
    delay.
    """
    # Frames are small, and the answer to a question about the time must not wait for an acknowledgement.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Where packets are lost, the time after which a heartbeat is sent again would double each time, to more than
    # `fault.freeze_s`.
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
        with contextlib.suppress(OSError):  # before Linux 6.15
            connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, _AGAIN_MS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
