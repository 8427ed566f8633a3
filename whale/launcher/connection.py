"""Connects a worker to the launcher."""

from __future__ import annotations

import os
import socket
import time

from whale.launcher.protocol import ADDRESS_VARIABLE, WELCOME

_CONNECT_S = 30.0
_AGAIN_S = 0.1


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


def keep_alive(connection: socket.socket) -> None:
    """Lets a connection break within half a minute when the other host is gone without a word; sends at once."""
    # Frames are small, and the answer to a question about the time must not wait for an acknowledgement.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
