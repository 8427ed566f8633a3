"""Connects a worker to the launcher.

Decision: 0065.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from whale.launcher.protocol import ADDRESS_VARIABLE, WELCOME
from whale.token_listener import keep_alive

# Where TCP_INFO has the milliseconds since anything was acknowledged.
_ACKNOWLEDGED_AT = 56
_CONNECT_S = 30.0
_AGAIN_S = 0.1
# What a worker sends has to be acknowledged within so many seconds; once `fault.freeze_s` is known, after which the
# launcher gives the rank up, within so many more than that.
_ACKNOWLEDGED_S, _LATER_S = 8.0, 4.0


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
