"""Accepts connections: those that show the run's token become a rank's, all others are closed.

Anybody who reaches the port may connect. So nothing that such a connection sends is decoded before as many bytes as a
token has were compared with it, in a time that does not depend on them; only `STRANGERS` of them are held at once, the
oldest goes for a new one, each for `TOKEN_S` at most; and whatever happens to one ends that one alone. Workers send
the token as soon as they are connected, so one of them is a stranger for as long as the network takes, and come again
if a flood of others has pushed it out before that: until it is told that it is welcome, a worker takes nothing for
granted.
"""

from __future__ import annotations

import collections
import hmac
import selectors
import socket
import time
from collections.abc import Callable

from whale.launcher.connection import keep_alive
from whale.launcher.protocol import TOKEN_BYTES, WELCOME

STRANGERS = 64
TOKEN_S = 5.0


class Listener:
    """The acceptor of a listener's connections, which hands on those that have shown the token.

    Args:
        listener: set to not wait; the caller closes it.
        token: of `TOKEN_BYTES` characters.
        selector: that of the loop; the data of its keys are called when their file is ready.
        welcome: gets each connection that has shown the token, which is then no longer in the selector.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        selector: selectors.BaseSelector,
        welcome: Callable[[socket.socket], None],
    ) -> None:
        self._listener = listener
        self._token = token.encode()
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
            data = connection.recv(TOKEN_BYTES - len(said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        if data and len(said) < TOKEN_BYTES:
            return
        if not hmac.compare_digest(bytes(said), self._token):
            self._dismiss(connection)
            return
        del self._strangers[connection]
        self._selector.unregister(connection)
        connection.setblocking(True)
        try:
            connection.sendall(WELCOME)
        except OSError:
            connection.close()
            return
        self._welcome(connection)

    def _dismiss(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        try:
            self._selector.unregister(connection)
        except KeyError:
            pass  # it never got that far
        connection.close()
