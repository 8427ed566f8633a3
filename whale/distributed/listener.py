"""Connects ranks that were not started together: each rank listens on a port, and groups of ranks connect by sockets.

A connecting rank immediately sends the run's secret and the number of the group that it connects for. Connections for a
group that this rank is not forming yet are kept until it does.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from whale.errors import CommError
from whale.token_listener import STRANGERS, TokenListener

_HEADER = struct.Struct("!II")  # number of the group, rank
_CONNECTS_S, _TRIES_S, _LOOKS_S = 5.0, 0.05, 0.1
# TCP_RTO_MAX_MS of linux/tcp.h, since Linux 6.15, and its value in ms: the longest time until lost data is sent again,
# which by default doubles up to minutes.
_RTO_MAX_MS, _AGAIN_MS = 44, 1000
_LATER_S = 4.0  # seconds by which a connection outlasts fault.freeze_s, so that the launcher says first who is gone


class RankListener:
    """Listens, in a thread, for connections of other ranks of the run, from construction to ``close``.

    Attribute `address` is the "host:port" that other ranks connect to.

    Args:
      peers: "address secret": the address to listen on, and the secret that other ranks have to send, as `whale run`
        gives both.
      freeze_s: seconds for which a rank's host may be silent before connections to it break (a little later); 0: no
        limit.

    Raises:
      OSError: this host does not have that address.
    """

    def __init__(self, peers: str, freeze_s: float) -> None:
        address, secret = peers.split(" ")
        self._silent_ms = round(1e3 * (freeze_s + _LATER_S)) if freeze_s else 0
        self._secret = secret
        self._listener = socket.create_server((address, 0), backlog=STRANGERS)
        self._listener.setblocking(False)
        self.address = f"{address}:{self._listener.getsockname()[1]}"
        self._came: dict[tuple[int, int], socket.socket] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="whale-listener", daemon=True)
        self._thread.start()

    def connect_group(
        self, group: int, me: int, members: Sequence[int], addresses: Mapping[int, str], given_up: Callable[[], bool]
    ) -> list[int]:
        """Connects this rank with all others of a group, and returns the sockets' descriptors in the order of
        `members`.

        This rank connects to members with lower numbers, and waits for those with higher ones. The entry of this rank
        is -1.

        Args:
          group: number of the group, used by no other group of the run; groups made later have higher numbers.
          me: number of this rank.
          members: numbers of all ranks of the group, as they were started.
          addresses: rank -> address at which it listens.
          given_up: returns True once a member is known to be gone, or too much time has passed.

        Raises:
          CommError: `given_up` returned True, or a connection broke.
        """
        found: dict[int, socket.socket] = {}
        try:
            for other in members:
                if other < me:
                    found[other] = self._connect_to(group, me, other, addresses[other], given_up)
            for other in members:
                if other > me:
                    found[other] = self._await_connection(group, other, given_up)
            for other in members:
                if other > me:
                    found[other].sendall(b"+")
        except BaseException as error:
            for connection in found.values():
                connection.close()
            if isinstance(error, OSError):
                raise _make_gone_error(members[-1]) from error
            raise
        for connection in found.values():
            self._configure(connection)
        return [-1 if other == me else found[other].detach() for other in members]

    def _configure(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._silent_ms)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, _AGAIN_MS)

    def close(self) -> None:
        """Stops listening, and closes connections that no group has used."""
        self._closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            pass
        self._thread.join()
        self._listener.close()
        with self._changed:
            for connection in self._came.values():
                connection.close()
            self._came.clear()

    def _connect_to(self, group: int, me: int, other: int, address: str, given_up: Callable[[], bool]) -> socket.socket:
        host, _, port = address.rpartition(":")
        while not given_up():
            try:
                connection = socket.create_connection((host, int(port)), timeout=_CONNECTS_S)
            except OSError:
                time.sleep(_TRIES_S)
                continue
            try:
                connection.sendall(self._secret.encode() + _HEADER.pack(group, me))
                connection.settimeout(_LOOKS_S)
                while not given_up():
                    try:
                        if connection.recv(1):  # the other rank is forming the same group
                            return connection
                        break
                    except TimeoutError:
                        continue
            except OSError:
                pass
            connection.close()
        raise _make_gone_error(other)

    def _await_connection(self, group: int, other: int, given_up: Callable[[], bool]) -> socket.socket:
        with self._changed:
            while (group, other) not in self._came:
                if given_up():
                    raise _make_gone_error(other)
                self._changed.wait(_LOOKS_S)
            for late in [key for key in self._came if key[0] < group]:
                self._came.pop(late).close()
            return self._came.pop((group, other))

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            door = TokenListener(self._listener, self._secret, selector, self._keep, header_bytes=_HEADER.size)
            while not self._closed:
                timeout_s = max(0.0, min(door.deadlines_s) - time.monotonic()) if door.deadlines_s else None
                for key, _ in selector.select(timeout_s):
                    key.data()
                door.look()
            door.close()

    def _keep(self, connection: socket.socket, header: bytes) -> None:
        """Stores another rank's connection until this rank forms the same group; a later connection replaces an earlier
        one.

        Args:
          connection: the socket.
          header: what the other rank has sent after the secret: the number of the group, and its own number.
        """
        with self._changed:
            key = _HEADER.unpack(header)
            if (before := self._came.pop(key, None)) is not None:
                before.close()
            self._came[key] = connection
            self._changed.notify_all()


def _make_gone_error(rank: int) -> CommError:
    return CommError(
        "a rank is gone while the ranks connect anew",
        given=f"no connection with rank {rank} (numbered as it was started), or another rank is gone",
        expected="a connection with every rank that takes part",
        action="read in the output of `whale run` what has happened to that rank",
    )
