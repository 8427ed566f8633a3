"""Ranks on another host: everything that mpirun asks ssh to do is done, but by a stand-in for ssh, on this host."""

from __future__ import annotations

import json

import pytest

from tests.launcher.helpers import MEET, Launcher
from whale.errors import ClusterError
from whale.launcher.mpirun import Host, Options, find_listen_address

OTHER = "127.0.0.2"  # another host by name, whose route starts at this one
SSH = """#!/bin/sh
# Runs the command for the other host here, without the environment of this run.
while [ "$1" != "{other}" ]; do shift; done
shift
exec env -i PATH="$PATH" HOME="$HOME" {mark} sh -c "$*"
"""


def with_ssh(launcher: Launcher) -> None:
    agent = launcher.folder / "ssh"
    agent.write_text(SSH.format(other=OTHER, mark=f"WHALE_TEST_MARKER={launcher.mark}"))
    agent.chmod(0o755)
    launcher.environment["PRTE_MCA_plm_ssh_agent"] = str(agent)


def test_ranks_of_another_host_get_their_environment(launcher: Launcher) -> None:
    with_ssh(launcher)
    launcher.environment.update({"WHALE_FAULT_STALL_S": "7", "OMP_NUM_THREADS": "5"})
    launcher.environment.pop("GLIBC_TUNABLES", None)
    script = launcher.script(
        "import json, os\nprint(json.dumps([os.environ.get(name) for name in "
        "('WHALE_RANK', 'WHALE_SIZE', 'WHALE_FAULT_STALL_S', 'OMP_NUM_THREADS', 'GLIBC_TUNABLES', "
        "'WHALE_LAUNCHER_TOKEN')]))"
    )
    done = launcher.run("-np", "2", "--hosts", f"{OTHER}:2", script)
    assert done.returncode == 0, done.stderr
    seen = sorted(json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines())
    pages = "glibc.malloc.hugetlb=1"
    assert seen == [["0", "2", "7", "5", pages, None], ["1", "2", "7", "5", pages, None]]


def test_a_failure_on_another_host_ends_the_run(launcher: Launcher) -> None:
    with_ssh(launcher)
    script = launcher.script(MEET + "meet('a')\nif rank == 1: raise OSError('disk full')\ntime.sleep(600)")
    done = launcher.run("-np", "2", "--hosts", f"{OTHER}:2", script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "whale run: rank 1 failed: OSError: disk full (exit code 1)"


def test_a_host_that_refuses_is_shown(launcher: Launcher) -> None:
    launcher.environment["PRTE_MCA_plm_ssh_agent"] = "/bin/false"
    done = launcher.run("-np", "1", "--hosts", f"{OTHER}:1", launcher.script("print('started')"))
    assert done.returncode == 2 and done.stdout == ""
    assert f"the ranks did not start on {OTHER}: mpirun has ended" in done.stderr


def test_names_of_one_host_stand_for_several_only_where_these_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(4, "train.py", hosts=(Host("localhost", 2), Host("127.0.0.1", 2)))
    for network in ("", "latency_us=100"):
        monkeypatch.setenv("WHALE_DEBUG_EMULATE_NETWORK", network)
        with pytest.raises(ClusterError, match=r"localhost and 127\.0\.0\.1 are the same host"):
            find_listen_address(options)
    monkeypatch.setenv("WHALE_DEBUG_EMULATE_NETWORK", "latency_us=100,hosts=2+2")
    assert find_listen_address(options) == "127.0.0.1"
