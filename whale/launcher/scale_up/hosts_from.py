"""Asks again and again for the hosts that a run may have: reads a file, or runs a program that prints them."""

from __future__ import annotations

import os
import socket
import subprocess
import threading

from whale.errors import ClusterError
from whale.launcher.mpirun import Host, parse_hosts

EVERY_S = 2.0
_ANSWERS_S = 30.0


def read_hosts(path: str) -> tuple[Host, ...]:
    """Reads the hosts of a file, or of a program's output: ``name slots=2`` (Open MPI, Horovod) or ``name:2`` a line.

    Raises:
        ClusterError: the program fails, or a line cannot be read; or no host is left.
    """
    if os.access(path, os.X_OK):
        try:
            done = subprocess.run(
                [os.path.abspath(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWERS_S
            )
            wrong = f"it ended with code {done.returncode}: {done.stderr.strip()}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            wrong = str(error)
        if wrong:
            raise ClusterError(
                "the program that lists the hosts fails",
                given=path,
                reason=wrong,
                expected="a line for each host, name:ranks, and exit code 0",
                action="correct the program",
            )
        text = done.stdout
    else:
        with open(path) as file:
            text = file.read()
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = next((f":{word[6:]}" for word in words[1:] if word.startswith("slots=")), "")
        try:
            hosts = parse_hosts(words[0] + slots)
            parse_hosts(",".join(host.name for host in (*found.values(), *hosts)))  # each stands once
        except ClusterError as error:
            raise ClusterError(
                error.message,
                given=f"line {number} of {path}: {line.strip()}",
                expected="a line for each host: its name, and slots=2 or :2 for its ranks",
                action="correct that line",
            ) from None
        found |= {host.name: host for host in hosts}
    if not found:
        raise ClusterError(
            "no host is listed",
            given=f"{path}, in which no line names one",
            expected="a line for each host: its name, and slots=2 or :2 for its ranks",
            action="name one",
        )
    return tuple(found.values())


class HostSource:
    """The source of a run's hosts, asked in a thread of its own every `EVERY_S` seconds and whenever `ask` is called.

    Attributes:
        news: readable when there is an answer that `take` has not taken.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._asked, self._ended = threading.Event(), False
        self._lock = threading.Lock()
        self._found: tuple[bool, tuple[Host, ...] | str] | None = None
        self.news, self._teller = socket.socketpair()
        self.news.setblocking(False)
        self._teller.setblocking(False)
        self._forced = False
        self._thread = threading.Thread(target=self._run, name="whale-hosts", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Asks now; the answer counts as news even if it is the one before."""
        with self._lock:
            self._forced = True
        self._asked.set()

    def take(self) -> tuple[bool, tuple[Host, ...] | str] | None:
        """Returns the latest answer (whether it was asked for; the hosts, or what is wrong in words), once."""
        try:
            self.news.recv(1 << 12)
        except BlockingIOError:
            pass
        with self._lock:
            found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Stops asking; a program that is still at work is left to its end."""
        self._ended = True
        self._asked.set()
        self.news.close()
        self._teller.close()

    def _run(self) -> None:
        before: tuple[Host, ...] | str | None = None
        while not self._ended:
            self._asked.wait(EVERY_S)
            self._asked.clear()
            with self._lock:
                forced, self._forced = self._forced, False
            try:
                found: tuple[Host, ...] | str = read_hosts(self._path)
            except (ClusterError, OSError) as error:
                found = str(error)
            if found == before and not forced:
                continue
            with self._lock:
                self._found = forced or (self._found is not None and self._found[0]), found
            before = found
            try:
                self._teller.send(b"\0")
            except OSError:
                return  # closed meanwhile
