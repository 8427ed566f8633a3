"""Asks hosts whose ranks do not come up whether they reach the launcher, and ends daemons of Open MPI that are left.

A firewall that lets only ssh through is said by nobody: what mpirun has started on a host tries to connect for minutes.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from whale.errors import ClusterError

AFTER_S = 5.0  # without a rank; workers connect before their scripts begin, so that slow scripts are no reason
_CONNECT_S = 4.0
_ANSWER_S = 8.0
_LOOKS_S = 0.1
_CLOSED = 7  # the exit code of what asks, where it does not reach the launcher
SILENT = 124  # that of an ssh that says nothing at all
_BEGUN = "whale asks"  # said by a shell, before Python is there
_ASKS = """
import socket, sys
try:
    socket.create_connection(({address!r}, {port}), {timeout_s}).close()
except OSError as error:
    print(error)
    sys.exit({code})
"""
_ENDS = """
import os
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        with open(f"/proc/{{pid}}/comm") as name, open(f"/proc/{{pid}}/cmdline") as line:
            if name.read().strip() in ("prted", "orted") and {mark!r} in line.read():
                os.kill(int(pid), 9)
    except OSError:
        pass
"""
# What mpirun's daemon needs of a host, and ends without a word where it is missing.
_LOOKS = """
import os, resource, tempfile
for folder in (os.environ.get("TMPDIR", "/tmp"), "/dev/shm"):
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        print(f"{folder}: {error.strerror}")
"""
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def run_on_host(host: str, program: str) -> tuple[int, str]:
    """Runs a program of Python on a host by what mpirun uses; returns exit code and output.

    Without an answer the code is 255, or SILENT if not even a shell there has said a word.
    """
    agent = os.environ.get("PRTE_MCA_plm_ssh_agent") or os.environ.get("OMPI_MCA_plm_rsh_agent") or "ssh"
    command = f"echo {_BEGUN}; {shlex.join([sys.executable, '-I', '-S', '-c', program])}"
    line = [*shlex.split(agent.partition(":")[0]), host, command]
    try:
        with subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            errors="replace", start_new_session=True,
        ) as asked:  # fmt: skip
            try:
                said, _ = asked.communicate(timeout=_ANSWER_S)
            except subprocess.TimeoutExpired:
                os.killpg(asked.pid, signal.SIGKILL)
                said, _ = asked.communicate()
                return (255 if _BEGUN in said else SILENT), ""
    except OSError:
        return 255, ""
    return asked.returncode, said.partition(_BEGUN)[2].strip()


def find_missing(hosts: Sequence[str], run: Callable[[str, str], tuple[int, str]] = run_on_host) -> dict[str, str]:
    """Returns what hosts lack that mpirun's daemon needs, in words, by host; those that lack nothing are left out."""
    with ThreadPoolExecutor(min(32, max(1, len(hosts)))) as pool:
        answers = dict(zip(hosts, pool.map(lambda host: run(host, _LOOKS), hosts)))
    return {host: said.replace("\n", ", ") for host, (code, said) in answers.items() if code == 0 and said}


class StartProbe:
    """Asks each of some hosts, in threads, whether it reaches the launcher.

    Args:
        hosts: others than this one.
        address: where the launcher listens.
        run: runs a program on a host.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        address: tuple[str, int],
        run: Callable[[str, str], tuple[int, str]] = run_on_host,
    ) -> None:
        self._hosts, self._address, self._run = hosts, address, run
        self._pool: ThreadPoolExecutor | None = None
        self._asked: dict[str, Future[tuple[int, str]]] = {}
        self._told: list[str] = []

    def find_deadline_s(self, begun_s: float) -> float:
        """Returns the monotonic time at which to ask, or to look for answers, in a start that began then."""
        if self._is_asking:
            return time.monotonic() + _LOOKS_S
        return begun_s + AFTER_S if self._hosts and self._pool is None else math.inf

    @property
    def _is_asking(self) -> bool:
        return any(not future.done() for future in self._asked.values())

    def ask(self) -> None:
        """Begins to ask, once."""
        if self._pool is None and self._hosts:
            address, port = self._address
            program = _ASKS.format(address=address, port=port, timeout_s=_CONNECT_S, code=_CLOSED)
            self._pool = ThreadPoolExecutor(min(32, len(self._hosts)))
            self._asked = {host: self._pool.submit(self._run, host, program) for host in self._hosts}

    def make_error(self) -> ClusterError | None:
        """Returns what is wrong, once all hosts have answered, or None if all of these reach the launcher."""
        if not self._asked or self._is_asking:
            return None
        answers = {host: future.result() for host, future in self._asked.items()}
        return make_blocked_error(
            {host: said for host, (code, said) in answers.items() if code == _CLOSED}, self._address
        )

    def take_silent(self) -> list[str]:
        """Returns, once, the hosts on which ssh has not come as far as to a shell."""
        if not self._asked or self._is_asking:
            return []
        silent = [host for host, future in self._asked.items() if future.result()[0] == SILENT]
        found = [host for host in silent if host not in self._told]
        self._told += found
        return found

    def end_daemons(self, mpiruns: Sequence[int]) -> None:
        """Ends, on hosts that have answered, what these mpiruns have started there and cannot reach."""
        if self._pool is None:
            return
        names = [f"prterun-{socket.gethostname()}-{pid}@" for pid in mpiruns]
        unanswered = (255, SILENT)
        answered = [h for h, future in self._asked.items() if future.done() and future.result()[0] not in unanswered]
        wait([self._pool.submit(self._run, host, _ENDS.format(mark=name)) for host in answered for name in names])

    def close(self) -> None:
        """Waits for nobody any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def make_blocked_error(reasons: Mapping[str, str], address: tuple[str, int]) -> ClusterError | None:
    """Returns the error of hosts that cannot connect to the launcher, by host; None without one."""
    if not reasons:
        return None
    try:
        low, high = _PORTS.read_text().split()
    except (OSError, ValueError):
        low, high = "1024", "65535"
    hosts, here = ", ".join(reasons), socket.gethostname()
    return ClusterError(
        f"{hosts} cannot connect to {here}, though ssh from here to there works",
        given="; ".join(f"{host} to {address[0]}, TCP port {address[1]}: {why}" for host, why in reasons.items()),
        expected=f"TCP in both directions between all hosts of a run: Whale and Open MPI listen on ports that the "
        f"system chooses, {low} to {high} here",
        action=f"open TCP ports {low} to {high} between {here} and {hosts} in their firewalls",
    )
