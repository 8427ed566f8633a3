"""Answers `whale top` on a Unix socket of this host with the status of a run: its ranks, their steps, and their waits.

The socket has a name in Linux's abstract namespace, so that nothing is left of it however the launcher ends:
"whale-run-<user>-<process>-<random>". Only the user of the run and root get an answer; what a client sends is not read.

Decision: 0163.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from whale.launcher.job.progress import RunProgress
from whale.launcher.job.ranks import RankLink
from whale.launcher.mpirun import Options
from whale.launcher.protocol import Progress

NAME = "whale-run-{user}-{process}-"
_SEND_S = 5.0
_BACKLOG = 8


class RankStatus(msgspec.Struct, frozen=True):
    """Describes a rank of a run as its launcher knows it.

    Attributes:
        state: "starting", "in wh.init", "running", "stopped", "ended", or "running without wh.init".
        told_s: seconds since its latest report about its steps; None: there was none.
        latest: that report.
        before: an earlier report with fewer steps, to compute rates from; None if there is none.
    """

    rank: int
    host: str
    state: str
    told_s: float | None = None
    latest: Progress | None = None
    before: Progress | None = None


class RunStatus(msgspec.Struct, frozen=True):
    """Describes a run as its launcher knows it.

    Attributes:
        process: process number of the launcher.
        command: the script and its arguments.
        up_s: seconds since the run was started first.
        restarts: how often it has been started again.
        ranks: the status of each rank.
    """

    process: int
    command: str
    up_s: float
    restarts: int
    ranks: list[RankStatus]


class StatusSocket:
    """Listens on the socket that `whale top` connects to, from construction to ``close``.

    Attributes:
        listener: the listening socket; when it is readable, the event loop calls `answer`.
    """

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("\0" + NAME.format(user=os.getuid(), process=os.getpid()) + secrets.token_hex(4))
        self.listener.listen(_BACKLOG)
        self.listener.setblocking(False)

    def answer(self, read: Callable[[], RunStatus]) -> None:
        """Accepts one client and sends it the run's status, in a thread, so that a slow client does not block the event
        loop.

        Args:
            read: returns the run's status.
        """
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return  # gone again
        if find_peer(connection)[1] not in (0, os.getuid()):
            connection.close()
            return
        data = msgspec.json.encode(read())
        threading.Thread(target=_send, args=(connection, data), name="whale-status", daemon=True).start()

    def close(self) -> None:
        """Closes the socket; clients that still wait for an answer see the end of their connection."""
        self.listener.close()


def _send(connection: socket.socket, data: bytes) -> None:
    with connection:
        connection.settimeout(_SEND_S)
        try:
            connection.sendall(data)
        except OSError:
            pass  # it has gone away


def find_peer(connection: socket.socket) -> tuple[int, int]:
    """Returns (process number, user number) of the process at the other end of a Unix socket, from the kernel."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def make_status(options: Options, links: Mapping[int, RankLink], progress: RunProgress) -> RunStatus:
    """Creates the status of a run from what the launcher knows.

    Args:
        options: the options of `whale run`.
        links: the connections of the ranks that have come up.
        progress: the ranks' reports about their steps.
    """
    now_s = time.monotonic()
    told = progress.read_ranks()
    ranks = []
    for rank in sorted({*range(options.ranks), *links}):
        link = links.get(rank)
        latest = told.get(rank)
        ranks.append(
            RankStatus(
                rank,
                link.host if link is not None else "",
                _describe_state(link),
                now_s - latest.told_s if latest is not None else None,
                latest.latest if latest is not None else None,
                latest.before if latest is not None else None,
            )
        )
    command = " ".join([*(["-m"] if options.as_module else []), options.target, *options.arguments])
    return RunStatus(os.getpid(), command, now_s - progress.begun_s, progress.restarts, ranks)


def _describe_state(link: RankLink | None) -> str:
    if link is None:
        return "starting"
    if link.exited:
        return "ended"
    if link.stopped_s is not None:
        return "stopped"
    if link.joining is None:
        return "running without wh.init"
    return "in wh.init" if link.joining else "running"
