"""However a run is stopped, nothing of it goes on."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.draws import one_of
from tests.launcher.helpers import MEET, PATIENCE_S, PATIENT, Launcher, wait_for_line
from tests.launcher.test_faults import CONNECT

SLEEP = MEET + "meet('a')\nprint('up')\nwait_for_a_signal()"
# A script that neither signals nor Python's own end can hurry, with a child of its own.
STUBBORN = (
    MEET + "import signal, subprocess\n"
    # It may come while the line before it is written, inside of which nothing can be printed.
    "def ignore(number, frame): os.write(1, b'ignored %d\\n' % number)\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, ignore)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\nmeet('a')\nprint('up')\n"
    "while True: time.sleep(1)"
)


@pytest.mark.parametrize("number", one_of(3, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_ends_all_ranks(launcher: Launcher, number: signal.Signals) -> None:
    launcher.settings = PATIENT  # so that they end by this signal, and not by the SIGKILL that follows
    with launcher.start("-np", "2", launcher.script(SLEEP)) as process:
        wait_for_line(process, "up")
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + number
        assert errors.splitlines()[-1] == f"whale run: stopped by {number.name}"
        assert "Traceback" not in errors
    assert launcher.left_behind() == []


def test_a_script_may_end_tidily_after_an_interrupt(launcher: Launcher) -> None:
    launcher.settings = PATIENT
    script = launcher.script(
        MEET + "try:\n    meet('a'); print('up'); wait_for_a_signal()\n"
        "except KeyboardInterrupt:\n    time.sleep(0.5); print('saved')"
    )
    with launcher.start("-np", "2", script) as process:
        wait_for_line(process, "up")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert output.count("saved") == 2


def test_ranks_that_ignore_signals_are_killed_with_their_children(launcher: Launcher) -> None:
    with launcher.start("-np", "2", launcher.script(STUBBORN)) as process:
        wait_for_line(process, "up")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
    assert launcher.left_behind() == []


def test_a_second_interrupt_does_not_wait(launcher: Launcher) -> None:
    launcher.settings = PATIENT
    with launcher.start("-np", "1", launcher.script(STUBBORN)) as process:
        wait_for_line(process, "up")
        process.send_signal(signal.SIGINT)
        wait_for_line(process, f"ignored {signal.SIGINT:d}")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130


def test_an_interrupt_while_starting(launcher: Launcher) -> None:
    with launcher.start("-np", "2", launcher.script(SLEEP)) as process:
        deadline_s = time.monotonic() + PATIENCE_S
        while len(launcher.left_behind(within_s=0.0)) < 2 and time.monotonic() < deadline_s:
            pass
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (143, -signal.SIGTERM)  # the latter before the launcher was ready for signals
    assert launcher.left_behind() == []


@pytest.mark.parametrize("script", [SLEEP, STUBBORN], ids=["sleeping", "stubborn"])
def test_a_killed_launcher_leaves_nothing(launcher: Launcher, script: str) -> None:
    temporary = launcher.folder / "temporary"
    temporary.mkdir()
    launcher.environment["TMPDIR"] = str(temporary)
    with launcher.start("-np", "2", launcher.script(script)) as process:
        wait_for_line(process, "up")
        assert len(launcher.left_behind(within_s=0.0)) >= 5  # mpirun, two workers, two scripts
        process.kill()
        process.wait()
        assert launcher.left_behind() == []
        assert list(temporary.iterdir()) == []


def _processes(launcher: Launcher, word: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                line, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            except OSError:
                continue
            if launcher.mark.encode() in environment and word.encode() in line.split(b"\0")[0]:
                found.append(int(folder.name))
    return found


def test_a_killed_mpirun_ends_the_run(launcher: Launcher) -> None:
    temporary = launcher.folder / "temporary"
    temporary.mkdir()
    launcher.environment["TMPDIR"] = str(temporary)
    # What MPI makes in a rank that connects when mpirun is gone.
    folder = f"{temporary}/ompi.{socket.gethostname()}.{os.getuid()}/jf.0/1/0"
    with launcher.start(
        "-np", "2", launcher.script(f"import os; os.makedirs({folder!r}, exist_ok=True)\n{SLEEP}")
    ) as process:
        wait_for_line(process, "up")
        for pid in _processes(launcher, "mpirun") + _processes(launcher, "prterun"):
            os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert errors.splitlines()[-1] == "whale run: mpirun was killed by SIGKILL"
        assert list(temporary.iterdir()) == []


def test_an_mpirun_that_is_told_to_end_is_named(launcher: Launcher) -> None:
    with launcher.start("-np", "2", launcher.script(SLEEP)) as process:
        wait_for_line(process, "up")
        for pid in _processes(launcher, "mpirun") + _processes(launcher, "prterun"):
            os.kill(pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 143
        assert errors.splitlines()[-1].startswith("whale run: mpirun was told to end by SIGTERM"), errors
    assert launcher.left_behind() == []


def test_a_stopped_mpirun_ends_the_run(launcher: Launcher) -> None:
    launcher.environment["WHALE_FAULT_FREEZE_S"] = "1"
    with launcher.start("-np", "2", launcher.script(SLEEP)) as process:
        wait_for_line(process, "up")
        for pid in _processes(launcher, "mpirun") + _processes(launcher, "prterun"):
            os.kill(pid, signal.SIGSTOP)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert errors.splitlines()[-1].startswith("whale run: mpirun is frozen: its process has been stopped for ")
    assert launcher.left_behind() == []


def test_the_next_run_removes_what_a_run_of_which_nobody_is_left_had_in_memory(launcher: Launcher) -> None:
    # A folder of its own: any other run on this machine would remove what is left as well.
    memory = launcher.folder / "memory"
    memory.mkdir()
    launcher.settings = {"whale.launcher.shm_cleanup.MEMORY": str(memory)}
    folder = "os.environ['OMPI_MCA_btl_sm_backing_directory']"
    script = launcher.script(MEET + f"meet('a')\nprint({folder})\ntime.sleep(600)")
    folders = []
    for _ in range(2):
        with launcher.start("-np", "2", script) as process:
            folders.append(Path(wait_for_line(process, "whale-")[-1].split()[-1]))
            assert folders[-1].stat().st_mode & 0o777 == 0o700
            assert folders[-1].parent == memory
            # Children before parents: a stopped process whose parent has ended is woken by the system.
            run = sorted(_processes(launcher, ""), reverse=True)
            for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: who sees another one end would clear up
                for pid in run:
                    os.kill(pid, number)
            process.wait()
        assert launcher.left_behind() == []
        (launcher.folder / "a.0").unlink()
        (launcher.folder / "a.1").unlink()
    assert folders[1].exists() and not folders[0].exists()
    folders[1].rmdir()


def test_a_killed_worker_is_a_lost_rank(launcher: Launcher) -> None:
    script = launcher.script(MEET + "meet('a')\nprint('up')\nif rank == 1: os.kill(os.getppid(), 9)\ntime.sleep(600)")
    with launcher.start("-np", "2", script) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert errors.splitlines()[-1].startswith("whale run: rank 1 was lost: ")


# Saves when it is told to end; rank 1 takes longer than ranks have that are to end at once.
SAVES = (
    CONNECT + "from whale.distributed.preemption import PreemptionNotice\nfrom whale.distributed.ranks import Ranks\n"
    "notice, comm = PreemptionNotice(), connect()\n"
    "ranks = Ranks(Config(), None, comm.size, (comm.rank,), [comm], 'test')\nprint('up', flush=True)\n"
    "while not notice.has_reached(ranks): time.sleep(0.05)\n"
    "time.sleep(3.5 * rank)\nprint('saved', flush=True)\ncomm.leave()\nsys.exit({code})"
)


@pytest.mark.parametrize("code", one_of(2, [0, 75]))
def test_who_saves_when_told_to_end_has_the_time_that_it_asked_for(launcher: Launcher, code: int) -> None:
    launcher.environment["WHALE_FAULT_NOTICE_S"] = "20"
    with launcher.start("-np", "2", launcher.script(SAVES.replace("{code}", str(code)))) as process:
        wait_for_line(process, "up")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code, errors
    assert output.count("saved") == 2
    first, *_, last = errors.splitlines()
    assert first == "whale run: told to end by SIGTERM: the ranks have 20 s to save"
    by_itself = "stopped by SIGTERM; every rank has ended by itself with code 0"
    assert re.fullmatch(f"whale run: {'rank [01] failed: exit code 75' if code else by_itself}", last), last
    assert launcher.left_behind() == []
