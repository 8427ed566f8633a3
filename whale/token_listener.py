"""Accepts connections: those that show the run's token are handed on, all others are closed.

The launcher accepts its workers so, and a rank the ranks that connect anew. Anybody who reaches the port may connect.
So nothing that such a connection sends is decoded before as many bytes as a token has were compared with it, in a time
that does not depend on them; only `STRANGERS` of them are held at once, the oldest goes for a new one, each for
`TOKEN_S` at most; and whatever happens to one ends that one alone. Whoever belongs to the run sends the token as soon
as it is connected, so that it is a stranger for as long as the network takes, and comes again if a flood of others has
pushed it out before that: until it is answered, it takes nothing for granted.
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
# linux/tcp.h: what is lost is sent again six times before the time until then doubles; that it takes at most.
_THIN_LINEAR_TIMEOUTS, _RTO_MAX_MS, _AGAIN_MS = 16, 44, 1000


class TokenListener:
    """The acceptor of a listening socket's connections, which hands on those that have shown the token.

    Args:
        listener: set to not wait; the caller closes it.
        token: what a connection has to send first.
        selector: that of the loop; the data of its keys are called when their file is ready.
        welcome: gets each connection that has shown the token, which is then no longer in the selector and waits, and
            the bytes behind the token.
        header_bytes: how many bytes belong to the token, behind it: they are read before the connection is handed on.
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
        """Returns the monotonic time at which the next stranger has had its time."""
        return [since_s + TOKEN_S for since_s, _ in list(self._strangers.values())[:1]]

    def look(self) -> None:
        """Closes connections that had enough time to show a token."""
        now_s = time.monotonic()
        while self._strangers and next(iter(self._strangers.values()))[0] + TOKEN_S <= now_s:
            self._dismiss(next(iter(self._strangers)))

    def close(self) -> None:
        """Closes the connections that have shown no token."""
        while self._strangers:
            self._dismiss(next(iter(self._strangers)))

    def _accept(self) -> None:
        # As many as can be held, and then the loop's other work: a flood must not keep it from that.
        for _ in range(STRANGERS):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # It went away meanwhile, or there are no descriptors left: those of strangers are the ones to spare.
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
            self._read(connection)  # a worker's token is there already, as a rule

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._strangers:
            return  # it made room for another one since the selector saw it
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
            pass  # it never got that far
        connection.close()


def keep_alive(connection: socket.socket) -> None:
    """Lets a connection break within half a minute when the other host is gone without a word; sends at once."""
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
