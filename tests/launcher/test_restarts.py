"""`whale run --max-restarts`."""

from __future__ import annotations

import signal

from tests.launcher.helpers import MARKER, MEET, PATIENCE_S, Launcher, wait_for_line
from tests.programs import mlp, planned

FAILS_TWICE = (
    MEET + "import whale\nmeet(f'a{whale.restarts()}')\nprint('attempt', whale.restarts())\n"
    "if whale.restarts() < 2 and rank == 1: os.kill(os.getpid(), 9)\n"
    "if whale.restarts() < 2: time.sleep(600)"
)


def test_a_run_starts_again_after_a_fault(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "--max-restarts", "3", launcher.script(FAILS_TWICE))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] attempt {n}" for rank in range(2) for n in range(3)]
    said = [line for line in done.stderr.splitlines() if line.startswith("whale run: ")]
    assert said == [
        "whale run: rank 1 was killed by SIGKILL",
        "whale run: starting again (restart 1 of 3)",
        "whale run: rank 1 was killed by SIGKILL",
        "whale run: starting again (restart 2 of 3)",
        "whale run: warning: the script never called wh.init(): each of the 2 ranks has run all of it alone",
    ]


def test_the_last_attempt_decides(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "--max-restarts", "1", launcher.script(FAILS_TWICE))
    assert done.returncode == 137
    assert done.stderr.splitlines()[-1] == "whale run: rank 1 was killed by SIGKILL"


def test_a_run_that_is_stopped_does_not_start_again(launcher: Launcher) -> None:
    script = launcher.script(MEET + "meet('a')\nprint('up')\nwait_for_a_signal()")
    with launcher.start("-np", "1", "--max-restarts", "5", script) as process:
        wait_for_line(process, "up")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130 and "starting again" not in errors and "up" not in output


HOSTS = "127.0.0.2:1,127.0.0.3:1"  # other hosts by name, whose routes end at this one
# Runs what is meant for another host here; the second host cannot be reached any more once there is a file `gone`.
AGENT = """#!/bin/sh
while true; do case "$1" in 127.0.0.*) break;; esac; shift; done
host=$1; shift
test "$host" = 127.0.0.3 && test -e {folder}/gone && exit 255
exec env -i PATH="$PATH" HOME="$HOME" {mark} sh -c "$*"
"""


def _loses_a_host(launcher: Launcher) -> str:
    """A script whose second host is gone in the middle of the first attempt."""
    agent = launcher.folder / "ssh"
    agent.write_text(AGENT.format(folder=launcher.folder, mark=f"{MARKER}={launcher.mark}"))
    agent.chmod(0o755)
    launcher.environment["PRTE_MCA_plm_ssh_agent"] = str(agent)
    return launcher.script(
        MEET + "import whale\nmeet(f'a{whale.restarts()}')\n"
        "print('attempt', whale.restarts(), 'on', os.environ['WHALE_SIZE'], 'WHALE_MESH_PLAN' in os.environ)\n"
        "if whale.restarts() == 0:\n"
        "    if rank == 1:\n        time.sleep(0.5); open('gone', 'w').close(); os.kill(os.getppid(), 9)\n"
        "    time.sleep(600)"
    )


def test_a_host_that_is_gone_is_left_out(launcher: Launcher) -> None:
    script = _loses_a_host(launcher)
    planned(mlp(4, 4, 4, 2), 2, 4).save(launcher.folder / "p")
    done = launcher.run("-np", "2", "--hosts", HOSTS, "--plan", "p", "--max-restarts", "1", script)
    assert done.returncode == 0, done.stderr
    said = ["[0] attempt 0 on 2 True", "[0] attempt 1 on 1 False", "[1] attempt 0 on 2 True"]
    assert sorted(done.stdout.splitlines()) == said
    assert "starting again on 1 rank without 127.0.0.3 (restart 1 of 1)" in done.stderr
    assert "the saved plan is for 2 ranks: the script is planned again for 1 rank" in done.stderr


def test_too_few_ranks_are_no_run(launcher: Launcher) -> None:
    script = _loses_a_host(launcher)
    limits = "--max-restarts", "1", "--min-ranks", "2"
    done = launcher.run("-np", "2", "--hosts", HOSTS, *limits, script)
    assert done.returncode == 2, done.stderr
    assert "too few hosts are left to start again" in done.stderr and "127.0.0.3" in done.stderr
