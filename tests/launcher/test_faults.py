"""Ranks that freeze, wait, or are lost, as `whale run` sees them; no TensorFlow."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import time

import pytest

from tests.launcher.helpers import MEET, PATIENCE_S, Launcher, wait_for_line
from whale.launcher import worker_io
from whale.launcher.connection import find_unacknowledged_s, limit_silence
from whale.launcher.job import ranks, start_probe
from whale.launcher.protocol import RaisedReport

# What wh.init does about communication.
CONNECT = """
import os, sys, time
import numpy as np, whale_ops
from whale.config import Config
from whale.distributed.watch import LauncherWatch
from whale_ops import _native

def connect():
    global watch
    watch = LauncherWatch(Config())
    comm = whale_ops.connect_mpi("test")
    watch.look_after(comm)
    return comm

def reduce(comm, key):
    data, result = np.ones(3, np.float32), np.empty(3, np.float32)
    return _native.HostOperation(comm.handle, "AllReduce", key, dtype="float32", element_bytes=4, counts=[3],
        input_address=data.ctypes.data, output_address=result.ctypes.data, buffers=(data, result))

rank = int(os.environ["WHALE_RANK"])
"""


@pytest.mark.parametrize("whom", ["os.getpid()", "os.getppid()"], ids=["script", "worker"])
def test_a_frozen_rank_ends_the_run(launcher: Launcher, whom: str) -> None:
    launcher.environment["WHALE_FAULT_FREEZE_S"] = "1"
    script = launcher.script(
        MEET + "import signal\nmeet('a')\nprint('up', flush=True)\ntime.sleep(0.2)\n"
        f"if rank == 1: os.kill({whom}, signal.SIGSTOP)\ntime.sleep(600)"
    )
    with launcher.start("-np", "2", script) as process:
        wait_for_line(process, "up")
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert errors.splitlines()[-1].startswith("whale run: rank 1 is frozen: "), errors


def test_a_rank_that_closes_what_it_has_not_opened_ends_the_run(launcher: Launcher) -> None:
    """MPI's library then says thousands of times a second that its descriptor is none."""
    script = launcher.script(
        CONNECT + "comm = connect()\nreduce(comm, 'a').wait(60)\nprint('up', flush=True)\n"
        "if rank == 1:\n    os.closerange(3, 1000)\n    for _ in range(10000): print('bad', file=sys.stderr)\n"
        "time.sleep(600)"
    )
    done = launcher.run("-np", "2", script, timeout_s=2 * PATIENCE_S)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("whale run: rank 1 cannot be reached: its script goes on, and has closed"), done.stderr
    assert len(done.stderr) < 100_000


def test_a_worker_waits_a_moment_longer_for_its_launcher_than_that_for_its_rank() -> None:
    with socket.socket() as connection:
        for freeze_s, expected_ms in ((3.5, 7500), (0.0, 0)):  # 0: for as long as the system does
            limit_silence(connection, freeze_s)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == expected_ms


def test_a_process_that_gives_its_memory_back_has_ended() -> None:
    assert not worker_io.is_ending(os.getpid())
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert worker_io.is_ending(child)
    os.waitpid(child, 0)


def test_a_rank_that_goes_on_in_time_is_not_frozen(launcher: Launcher) -> None:
    launcher.environment["WHALE_FAULT_FREEZE_S"] = "5"
    script = launcher.script(MEET + "meet('a')\nprint('up', os.getpid())\ntime.sleep(7)\nprint('done')")
    with launcher.start("-np", "1", script) as process:
        pid = int(wait_for_line(process, "up")[-1].split()[-1])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0 and "done" in output, errors


def test_a_rank_that_computes_is_not_frozen_whatever_lock_it_holds(launcher: Launcher) -> None:
    launcher.environment["WHALE_FAULT_FREEZE_S"] = "3"  # of silence, in which a busy machine lets a worker beat
    # PyDLL keeps the interpreter's lock: no thread of the script runs meanwhile.
    script = launcher.script("import ctypes\nctypes.PyDLL(None).sleep(7)\nprint('done')")
    done = launcher.run("-np", "2", script)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


def test_a_worker_that_waits_for_a_processor_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script's parent is this test's process, whose state is what /proc says of it."""
    ends = socket.socketpair()
    link = ranks.RankLink(ends[0], rank=0, host=socket.gethostname(), pid=os.getpid(), freeze_s=3.5)
    states = {os.getppid(): "R"}
    monkeypatch.setattr(ranks, "_read_state", states.__getitem__)
    assert link.find_freeze(link.heard_s + 100, 2.0) is None
    states[os.getppid()] = "S"
    assert link.find_freeze(link.heard_s + 3.4, 2.0) is None
    assert link.find_freeze(link.heard_s + 3.6, 2.0) is None  # a beat may be on the way
    found = link.find_freeze(link.heard_s + 4.1, 2.0)
    assert found is not None and "nothing was heard" in found.reason and found.gone


def test_a_host_that_acknowledges_again_after_a_cut_has_a_moment_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as worker:
        connection, _ = listener.accept()
        link = ranks.RankLink(connection, rank=0, host="another", pid=0, freeze_s=3.5)
        assert link.find_freeze(link.heard_s + 1.1, 2.0) is None
        assert b"asked_ns" in worker.recv(100), "a silent worker is asked"
        assert find_unacknowledged_s(connection) < 1.0, "this host's kernel acknowledges"
        assert link.find_freeze(link.heard_s + 4.9, 2.0) is None
        monkeypatch.setattr(ranks, "find_unacknowledged_s", lambda connection: 4.0)
        assert link.find_freeze(link.heard_s + 4.9, 2.0) is None  # a beat may be on the way
        assert link.find_freeze(link.heard_s + 5.3, 2.0) is not None
        connection.close()


def test_a_stopped_launcher_blames_nobody(launcher: Launcher) -> None:
    launcher.environment["WHALE_FAULT_FREEZE_S"] = "1"
    with launcher.start("-np", "2", launcher.script(MEET + "meet('a')\nprint('up')\ntime.sleep(6)")) as process:
        wait_for_line(process, "up")
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors


def test_the_children_of_a_rank_whose_worker_was_killed_end_too(launcher: Launcher) -> None:
    script = launcher.script(
        MEET + "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "meet('a')\nif rank == 1: os.kill(os.getppid(), 9)\ntime.sleep(600)"
    )
    done = launcher.run("-np", "2", script)
    assert "whale run: rank 1 was lost: " in done.stderr
    assert launcher.left_behind() == []


def test_a_wait_is_reported_once_with_the_rank_that_is_missing(launcher: Launcher) -> None:
    launcher.environment["WHALE_FAULT_STALL_S"] = "1"
    script = launcher.script(
        CONNECT + "comm = connect()\nif rank == 1: time.sleep(4)\n"
        "reduce(comm, 'dense/kernel').wait(600)\ncomm.leave()\nprint('done')"
    )
    done = launcher.run("-np", "3", script)
    assert done.returncode == 0 and done.stdout.count("done") == 3, done.stderr
    lines = done.stderr.splitlines()
    said = [
        re.fullmatch(r"whale run: ranks? (.*) ha(?:s|ve) waited (\d+) s in AllReduce 'dense/kernel' for rank.*", line)
        for line in lines
    ]
    (first,) = [i for i, found in enumerate(said) if found][:1]
    assert any("  rank 1 (" in line and "waits in no operation" in line for line in lines[first:]), lines
    # Of each rank after 1 s, and then not before it has become twice as long; the seconds are rounded.
    for rank in "02":
        waited_s = [int(found[2]) for found in said if found and rank in found[1]]
        assert waited_s and waited_s[0] >= 1, lines
        assert all(later >= 2 * earlier - 1 for earlier, later in itertools.pairwise(waited_s)), lines


def test_a_run_gives_up_waiting_when_told_to(launcher: Launcher) -> None:
    launcher.environment["WHALE_FAULT_GIVE_UP_S"] = "1"
    script = launcher.script(
        CONNECT + "comm = connect()\nif rank == 1: time.sleep(600)\nreduce(comm, 'dense/kernel').wait(600)"
    )
    done = launcher.run("-np", "2", script)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    sentence = r"rank 0 has waited [1-9]\d* s in AllReduce 'dense/kernel' for rank 1, longer than fault\.give_up_s"
    assert re.search(f"CommError: {sentence}", last)


def test_a_rank_that_ends_while_others_start(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(CONNECT + "if rank == 0: connect()"))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "whale run: rank 1 has ended without calling wh.init, in which rank 0 waits for it"


def test_a_rank_that_ends_within_its_start(launcher: Launcher) -> None:
    script = launcher.script(CONNECT + "if rank == 0: connect()\nLauncherWatch(Config())\ntime.sleep(1)\nos._exit(0)")
    done = launcher.run("-np", "2", script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "whale run: rank 1 has ended inside wh.init, in which rank 0 waits for it"


def test_a_rank_that_ends_without_a_good_bye_fails_the_others(launcher: Launcher) -> None:
    script = launcher.script(
        CONNECT
        + "comm = connect()\nreduce(comm, 'a').wait(600)\nif rank == 1: os._exit(0)\nreduce(comm, 'b').wait(600)"
    )
    done = launcher.run("-np", "2", script)
    assert done.returncode == 1
    sentence = "rank 1 has ended without wh.shutdown (exit code 0) while rank 0 waited for it in AllReduce 'b'"
    assert sentence in done.stderr


def test_no_segment_is_left_by_a_killed_rank(launcher: Launcher) -> None:
    script = launcher.script(
        CONNECT + "comm = connect()\nfolder = os.environ['OMPI_MCA_btl_sm_backing_directory']\n"
        "print('in', folder, len(os.listdir(folder)), os.environ['WHALE_RUN_FILES'])\n"
        "reduce(comm, 'a').wait(600)\nos.kill(os.getpid(), 9)"
    )
    done = launcher.run("-np", "2", script)
    assert done.returncode == 137
    folder, count, files = done.stdout.splitlines()[0].split()[2:]
    assert int(count) > 0 and not os.path.exists(folder) and files == folder


def test_an_error_inside_a_traced_step_is_named_by_what_it_says() -> None:
    """AutoGraph's message begins with where the error was."""
    text = 'in user code:\n\n    File "train.py", line 3, in step  *\n        act()\n\n    ValueError: this is bad\n'
    failure = ranks.make_raised_failure(1, RaisedReport(type="ValueError", message=text, traceback="", code=1))
    assert failure.reason == "failed: ValueError: this is bad (exit code 1)"


def test_the_cause_is_no_rank_that_only_says_that_another_one_is_gone() -> None:
    said = [
        ranks.make_raised_failure(0, RaisedReport(type="CommError", message="rank 1 is gone", traceback="", code=1)),
        ranks.make_raised_failure(1, RaisedReport(type="ValueError", message="this is bad", traceback="", code=1)),
        ranks.make_raised_failure(2, RaisedReport(type="KeyError", message="later", traceback="", code=1)),
    ]
    assert ranks.find_cause(said).rank == 1
    assert ranks.find_cause(said[:1]).rank == 0


NO_SPACE = """
It appears as if there is not enough space for /dev/shm/whale-36/sm_segment.vm.0.2f070001.1 (the shared-memory backing
file). It is likely that your MPI job will now either abort or experience
performance degradation.

  Local host:  vm
  Space Requested: 16777216 B
  Space Available: 1048576 B
--------------------------------------------------------------------------
"""


def test_a_start_that_fails_in_mpi_says_why(launcher: Launcher) -> None:
    """MPI ends the process in wh.init, and says why to mpirun alone."""
    script = launcher.script(
        CONNECT + f"watch = LauncherWatch(Config())\nif rank == 1:\n"
        f"    os.write(os.open(f'/proc/{{os.getppid()}}/fd/1', os.O_WRONLY), {NO_SPACE!r}.encode())\n    os._exit(14)\n"
        "time.sleep(600)"
    )
    done = launcher.run("-np", "2", script)
    assert done.returncode == 14
    assert done.stderr == (
        "whale run: rank 1 failed: MPI did not start (exit code 14)\n"
        "  cause: too little memory for files in /dev/shm: 1.0 MiB are free, and each rank takes 16.0 MiB\n"
        "  next: enlarge it (docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm), or remove what others "
        "left there; then `whale doctor`\n"
    )


def test_what_mpi_says_is_shown_where_it_is_not_understood() -> None:
    told = start_probe.explain_start("-" * 40 + "\nNo device can be used.\n\nYour MPI job is going to abort.\n")
    assert told.startswith("  mpi_said: \n    No device can be used.\n    Your MPI job is going to abort.\n  next: ")
