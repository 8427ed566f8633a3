"""Asks hosts whose ranks do not come up, and names those that do not reach the launcher."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import time

from tests.launcher.helpers import PATIENCE_S
from whale.launcher.job.start_probe import AFTER_S, StartProbe


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
