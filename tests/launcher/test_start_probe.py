"""Asks hosts whose ranks do not come up, and names those that do not reach the launcher."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.launcher.helpers import PATIENCE_S
from whale.launcher.job.mpirun_process import MpirunProcess
from whale.launcher.job.start_probe import AFTER_S, StartProbe, find_start_cause


def _run_here(host: str, program: str) -> tuple[int, str]:
    """Stands for ssh to a host, which is this one; "deaf" is reached by no ssh."""
    if host == "deaf":
        return 255, ""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout.strip()


def _answer(address: tuple[str, int], *hosts: str) -> StartProbe:
    probe = StartProbe(hosts, address, _run_here)
    assert probe.find_deadline_s(3.0) == 3.0 + AFTER_S and probe.make_error() is None
    probe.ask()
    probe.ask()
    until_s = time.monotonic() + PATIENCE_S
    while probe.find_deadline_s(3.0) < math.inf and time.monotonic() < until_s:
        time.sleep(0.02)
    return probe


def test_hosts_that_do_not_reach_the_launcher_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        assert _answer(address, "h1", "deaf").make_error() is None
    found = _answer(address, "h1", "deaf").make_error()
    assert found is not None and found.message.startswith("h1 cannot connect to ")
    assert f"h1 to 127.0.0.1, TCP port {address[1]}: " in found.facts["given"]
    assert found.action is not None and found.action.startswith("open TCP ports ")


def test_ranks_of_this_host_are_not_asked() -> None:
    probe = StartProbe((), ("127.0.0.1", 1), _run_here)
    probe.ask()
    assert probe.find_deadline_s(3.0) == math.inf and probe.make_error() is None
    probe.end_daemons([1])
    probe.close()


_DAEMON = "A daemon failed to report back after being spawned.\n\n  Local host:    h0\n  Remote host:   h1\n"


@pytest.mark.parametrize(
    ("said", "hosts", "cause", "action"),
    [
        (f"me@h1: Permission denied (publickey).\n{_DAEMON}", ("h1",), "Permission denied", "ssh-copy-id h1"),
        (f"Host key verification failed.\n{_DAEMON}", ("h1",), "Host key", "ssh-keygen -R h1"),
        (f"ssh: connect to host h1 port 22: Connection refused\n{_DAEMON}", ("h1",), "refused", "sshd listens"),
        (f"sh: 1: /opt/bin/prted: not found\n{_DAEMON}", ("h1",), "prted: not found", "install Open MPI"),
        ("No module named 'whale'\n", ("h2", "h3"), "No module named 'whale'", "install Whale for"),
        ("could not be run:\n  Executable: /opt/python\n  Node: h2\n", ("h2",), "/opt/python cannot", "same Python"),
        (_DAEMON, ("h1",), "A daemon failed", "`ssh h1 true` on h0"),
        ("", ("h2", "h3"), "", "`ssh h2, h3 true` on h0"),
    ],
)
def test_what_keeps_ranks_from_starting_is_read_from_what_was_said(
    said: str, hosts: tuple[str, ...], cause: str, action: str
) -> None:
    found = find_start_cause(said, ["h2", "h3"], "h0")
    assert found.hosts == hosts and cause in found.cause and action in found.action
    assert found.is_known == (bool(said) and said != _DAEMON)


def test_an_mpirun_starts_over_what_a_killed_one_of_its_number_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = subprocess.Popen(["true"])
    first.wait()
    for pid in (*range(300, 900), *range(first.pid, first.pid + 2000)):  # the next numbers, or those after the last
        (tmp_path / f"ompi.{pid}").mkdir(exist_ok=True)
    process = MpirunProcess(["sh", "-c", f"echo {tmp_path}/ompi.*"], {"PATH": os.environ["PATH"]})
    said = b"".join(iter(process.read, b"")).decode()
    process.end(5.0, by_itself=True)
    assert f"ompi.{first.pid} " in said and f"ompi.{process.pid} " not in said
    assert (tmp_path / f"ompi.{process.pid + 1}").exists()
