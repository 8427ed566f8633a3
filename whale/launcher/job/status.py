"""Tells `whale top` of a run over a socket of this host: its ranks, what they have done, and what they wait for.

The socket has a name in Linux's abstract namespace, so that nothing is left of it however the launcher ends:
"whale-run-<user>-<process>-<random>". The user of the run is answered, and root; what they send is not read.

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
    """A rank of a run as its launcher knows it.

    Attributes:
        state: "starting", "in wh.init", "running", "stopped", "ended", or "running without wh.init".
        told_s: how long ago it told of its steps; None: it never did.
        latest, before: what it told then, and the time before that.
    """

    rank: int
    host: str
    state: str
    told_s: float | None = None
    latest: Progress | None = None
    before: Progress | None = None


class RunStatus(msgspec.Struct, frozen=True):
    """A run as its launcher knows it; ``up_s`` since it was started."""

    process: int
    command: str
    up_s: float
    restarts: int
    ranks: list[RankStatus]


class StatusSocket:
    """The socket, from construction to ``close``. `answer` is called when somebody has connected.

    Attributes:
        listener: becomes readable then.
    """

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("\0" + NAME.format(user=os.getuid(), process=os.getpid()) + secrets.token_hex(4))
        self.listener.listen(_BACKLOG)
        self.listener.setblocking(False)

    def answer(self, read: Callable[[], RunStatus]) -> None:
        """Sends the run's status to who has connected, in a thread: who does not read it holds nothing up."""
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
        """Ends it; who has connected and was not answered hears the end."""
        self.listener.close()


def _send(connection: socket.socket, data: bytes) -> None:
    with connection:
        connection.settimeout(_SEND_S)
        try:
            connection.sendall(data)
        except OSError:
            pass  # it has gone away


def find_peer(connection: socket.socket) -> tuple[int, int]:
    """Returns the process and the user at the other end of a socket of this host, as the kernel says."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def make_status(options: Options, links: Mapping[int, RankLink], progress: RunProgress) -> RunStatus:
    """Returns what the launcher knows of a run; `links` are the ranks that have come up."""
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
