"""`whale run` from outside: output, exit codes, and the environment of a rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.helpers import MEET, PATIENCE_S, PATIENT, ROOT, Launcher


def test_every_line_carries_its_rank(launcher: Launcher) -> None:
    script = launcher.script(
        MEET + "for i in range(200): print(f'line {i}')\nos.system('echo native')\nprint('to stderr', file=sys.stderr)"
    )
    done = launcher.run("-np", "3", script)
    assert done.returncode == 0
    for rank in range(3):
        own = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert own == [*(f"[{rank}] line {i}" for i in range(200)), f"[{rank}] native"]
        assert f"[{rank}] to stderr\n" in done.stderr
    assert len(done.stdout.splitlines()) == 3 * 201


def test_arguments_main_and_path_are_those_of_a_plain_script(launcher: Launcher) -> None:
    launcher.script("answer = 42", "neighbour.py")
    script = launcher.script(
        "import sys, os, json, neighbour\n"
        "print(json.dumps([__name__, sys.argv, sys.path[0], neighbour.answer, sys.modules['__main__'].__file__]))"
    )
    done = launcher.run("-np", "1", script, "--epochs", "3", "-v")
    folder = str(launcher.folder)
    expected = ["__main__", [script, "--epochs", "3", "-v"], folder, 42, script]
    assert json.loads(done.stdout.removeprefix("[0] ")) == expected


def test_a_module_runs_with_m(launcher: Launcher) -> None:
    (launcher.folder / "package").mkdir()
    launcher.script("", "package/__init__.py")
    launcher.script("import sys; print(__name__, __package__, sys.argv[1:])", "package/train.py")
    done = launcher.run("-np", "2", "-m", "package.train", "-x", "1")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] __main__ package ['-x', '1']" for rank in range(2)]


def test_tensorflow_is_imported_without_collections(launcher: Launcher) -> None:
    """Also where the script has looked whether it is there; the collector is on before and after."""
    (launcher.folder / "tensorflow").mkdir()
    launcher.script("import gc; WITHIN = gc.isenabled()", "tensorflow/__init__.py")
    script = launcher.script(
        "import gc, importlib.util\nfound = importlib.util.find_spec('tensorflow') is not None\n"
        "before = gc.isenabled()\nimport tensorflow\nprint(found, before, tensorflow.WITHIN, gc.isenabled())"
    )
    assert launcher.run("-np", "1", script).stdout.split()[1:] == ["True", "True", "False", "True"]


def test_ranks_are_told_their_place_and_threads(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, json, whale.started\n"
        "names = ['TF_NUM_INTRAOP_THREADS', 'TF_NUM_INTEROP_THREADS', 'OMP_NUM_THREADS']\n"
        "place = whale.started.process_place()\n"
        "print(json.dumps([place.rank, place.size, place.local_rank, place.local_size, place.launcher]"
        " + [os.environ[n] for n in names] + [n for n in os.environ if n.startswith('WHALE_LAUNCHER')]))"
    )
    for threads, intra, inter in (("1", "1", "2"), ("3", "3", "3")):
        done = launcher.run("-np", "5", "--threads", threads, script)
        seen = sorted(json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines())
        assert seen == [[rank, 5, rank, 5, "whale run", intra, inter, intra] for rank in range(5)]


def test_threads_of_the_user_are_kept(launcher: Launcher) -> None:
    launcher.environment["OMP_NUM_THREADS"] = "7"
    script = launcher.script("import os; print(os.environ['OMP_NUM_THREADS'], os.environ['TF_NUM_INTEROP_THREADS'])")
    done = launcher.run("-np", "1", script)
    omp, inter = done.stdout.split()[1:]
    assert omp == "7" and int(inter) >= 2


def test_an_exception_is_printed_once_and_named_last(launcher: Launcher) -> None:
    script = launcher.script(
        MEET + "print('before'); meet('a')\nif rank == 1:\n    raise ValueError('no\\nmore')\ntime.sleep(60)"
    )
    done = launcher.run("-np", "3", script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "whale run: rank 1 failed: ValueError: no (exit code 1)"
    assert done.stderr.count("Traceback") == 1
    assert re.search(r'^\[1\]   File ".*script\.py", line \d+, in <module>$', done.stderr, re.MULTILINE)
    assert "runpy" not in done.stderr and "worker.py" not in done.stderr
    assert "prterun" not in done.stderr and "mpirun" not in done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] before" for rank in range(3)]


def test_the_same_exception_on_all_ranks_is_printed_once(launcher: Launcher) -> None:
    script = launcher.script(MEET + "meet('a')\nraise KeyError('weights')")
    done = launcher.run("-np", "3", script)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1


def test_the_cause_is_named_though_its_consequence_is_reported_first(launcher: Launcher) -> None:
    launcher.settings = PATIENT
    script = launcher.script(
        MEET + "import whale\nmeet('a')\n"
        "if rank == 0:\n    raise whale.CommError('rank 1 has left the run')\n"
        "time.sleep(0.4)\nprint('the reason', file=sys.stderr)\nraise ValueError('bad batch')"
    )
    done = launcher.run("-np", "2", script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "whale run: rank 1 failed: ValueError: bad batch (exit code 1)"
    assert "[1] the reason\n" in done.stderr
    assert "has left the run" not in done.stderr


def test_verbose_shows_the_errors_of_every_rank(launcher: Launcher) -> None:
    # Rank 1 raises when it has been told that rank 0 has: over the socket that whale.distributed.watch listens to.
    script = launcher.script(
        MEET + "import socket\nfrom whale.started import CONTROL_VARIABLE, own_descriptor\nmeet('a')\n"
        "if rank == 1: socket.socket(fileno=own_descriptor(CONTROL_VARIABLE)).recv(1000)\n"
        "raise ValueError(f'on {rank}')"
    )
    launcher.settings = PATIENT
    done = launcher.run("-np", "2", "-v", script)
    assert "[0] ValueError: on 0\n" in done.stderr and "[1] ValueError: on 1\n" in done.stderr
    assert done.stderr.splitlines()[-1] == "whale run: rank 0 failed: ValueError: on 0 (exit code 1)"


@pytest.mark.parametrize(
    ("ending", "code", "reason"),
    [
        ("sys.exit(7)", 7, "failed: exit code 7"),
        ("sys.exit('no data')", 1, "failed: SystemExit: no data (exit code 1)"),
        ("os._exit(9)", 9, "failed: exit code 9"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), 15)", 143, "was killed by SIGTERM"),
        ("os.abort()", 134, "was killed by SIGABRT"),
    ],
)
def test_the_exit_code_is_that_of_the_failed_rank(launcher: Launcher, ending: str, code: int, reason: str) -> None:
    script = launcher.script(MEET + f"meet('a')\nif rank == 1:\n    {ending}\ntime.sleep(60)")
    done = launcher.run("-np", "2", script)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == f"whale run: rank 1 {reason}"


def test_ranks_may_end_at_different_times(launcher: Launcher) -> None:
    script = launcher.script(MEET + "meet('a')\ntime.sleep(1.5 * rank)\nprint('done')\nsys.exit(0)")
    done = launcher.run("-np", "2", script)
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["[0] done", "[1] done"]


def test_a_crash_loses_no_output(launcher: Launcher) -> None:
    script = launcher.script(
        "import os\nfor i in range(5000): print('row', i)\nos.write(1, b'open end')\nos.kill(os.getpid(), 11)"
    )
    done = launcher.run("-np", "1", script)
    assert done.returncode == 139
    assert done.stdout.splitlines() == [*(f"[0] row {i}" for i in range(5000)), "[0] open end"]
    assert "was killed by SIGSEGV" in done.stderr


def test_large_output_from_all_ranks(launcher: Launcher) -> None:
    # A rank that gets no processor in the middle of a line has not stopped writing.
    launcher.settings = {"whale.launcher.job.output.IDLE_S": 3600.0}
    script = launcher.script("import os, sys\nfor i in range(300): os.write(1 + i % 2, b'x' * 99_999 + b'\\n')")
    done = launcher.run("-np", "2", script, timeout_s=120)
    assert done.returncode == 0
    for text in (done.stdout, done.stderr):
        lines = [line for line in text.splitlines() if not line.startswith("whale run: warning")]
        assert len(lines) == 300 and {line[4:] for line in lines} == {"x" * 99_999}


def test_a_progress_bar_keeps_its_carriage_returns(launcher: Launcher) -> None:
    script = launcher.script(
        "import sys, time\nfor i in range(3):\n"
        "    print(f'\\rstep {i}', end='', flush=True); time.sleep(0.2)\nprint('\\rdone  ')"
    )
    done = subprocess.run(
        launcher.command("-np", "1", script),
        env=launcher.environment,
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.replace(b"[0] ", b"") == b"\rstep 0\rstep 1\rstep 2\rdone  \n"


def test_a_question_without_a_line_end_is_shown(launcher: Launcher) -> None:
    script = launcher.script("import sys, time\nprint('working ...', end='', flush=True)\ntime.sleep(60)")
    with launcher.start("-np", "1", script) as process:
        assert process.stdout is not None
        assert process.stdout.read(len("[0] working ...")) == "[0] working ..."


def test_standard_input_is_empty(launcher: Launcher) -> None:
    done = launcher.run("-np", "1", launcher.script("import sys; print(repr(sys.stdin.read()))"))
    assert done.stdout == "[0] ''\n"


def test_a_reader_that_goes_away_ends_the_run(launcher: Launcher) -> None:
    script = launcher.script("while True: print('again')")
    with launcher.start("-np", "2", script) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=PATIENCE_S) == 141


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-np", "2", "absent.py"], ["the script does not exist", "absent.py"]),
        (["-np", "0", "{script}"], ["-np must be at least 1", "-np 0"]),
        (["-np", "1", "--threads", "0", "{script}"], ["a rank needs a thread"]),
        (["-np", "3", "--hosts", "localhost:2", "{script}"], ["do not hold that many ranks", "at most 2"]),
        (["-np", "1", "--hosts", "a:b", "{script}"], ["list of hosts cannot be read", "'a:b'"]),
        (["-np", "1", "--hosts", "no-such-host.invalid", "{script}"], ["'no-such-host.invalid' cannot be reached"]),
    ],
)
def test_mistakes_are_explained_before_anything_starts(
    launcher: Launcher, arguments: list[str], words: list[str]
) -> None:
    script = launcher.script("print('started')")
    done = launcher.run(*(argument.format(script=script) for argument in arguments))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("whale run: ") and "\n  next: " in done.stderr
    for word in words:
        assert word in done.stderr


def test_named_local_hosts(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "--hosts", "localhost:2", launcher.script("print('here')"))
    assert sorted(done.stdout.splitlines()) == ["[0] here", "[1] here"], done.stderr


def test_ranks_that_cannot_start_show_what_mpirun_said(launcher: Launcher) -> None:
    launcher.script(
        "import os\nif 'OMPI_COMM_WORLD_RANK' in os.environ:\n    os.write(2, b'a broken Python'); os._exit(3)",
        "sitecustomize.py",
    )
    launcher.environment["PYTHONPATH"] += os.pathsep + str(launcher.folder)
    done = launcher.run("-np", "2", launcher.script("print('started')"))
    assert done.returncode == 2 and done.stdout == ""
    assert "the ranks did not start: mpirun has ended" in done.stderr and "a broken Python" in done.stderr


def test_a_plain_mpirun_gives_a_place_as_well(tmp_path: Path) -> None:
    from whale.launcher.mpirun import find_mpirun

    code = "import whale.started as c; print(c.process_place())"
    line = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert sorted(done.stdout.splitlines()) == [
        f"ProcessPlace(rank={rank}, size=2, local_rank={rank}, local_size=2, launcher='Open MPI')" for rank in range(2)
    ]


def test_no_files_are_left(launcher: Launcher) -> None:
    temporary = launcher.folder / "temporary"
    temporary.mkdir()
    launcher.environment["TMPDIR"] = str(temporary)
    script = launcher.script(MEET + "meet('a')\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert launcher.run("-np", "2", script).returncode == 137
    assert list(temporary.iterdir()) == []


def test_nothing_listens_beyond_this_host(launcher: Launcher) -> None:
    """Neither mpirun nor workers; a script listens where it asks to, and has its own LD_PRELOAD."""
    launcher.environment["LD_PRELOAD"] = "libm.so.6"
    script = launcher.script(
        """\
import glob, os, socket
parent = lambda pid: int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
own = socket.create_server(("", 0))
worker = os.getppid()
def sockets(pid):
    return [os.readlink(path) for path in glob.glob(f"/proc/{pid}/fd/*") if os.path.lexists(path)]
for who, pid in (("script", os.getpid()), ("worker", worker), ("mpirun", parent(worker))):
    for table in ("tcp", "tcp6"):
        for row in open(f"/proc/net/{table}").read().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets(pid):
                print(who, words[1].partition(":")[0])
print(os.environ["LD_PRELOAD"], os.environ.get("WHALE_LOOPBACK"))
"""
    )
    done = launcher.run("-np", "1", script)
    assert done.returncode == 0, done.stderr
    *found, environment = (line.removeprefix("[0] ") for line in done.stdout.splitlines())
    listens = {
        who: {line.split()[1] for line in found if line.startswith(who)} for who in ("script", "worker", "mpirun")
    }
    assert listens["script"] == {"00000000"} and not listens["worker"]
    assert "0100007F" in listens["mpirun"]
    assert listens["mpirun"] <= {"0100007F", "0" * 24 + "01000000"}  # 127.0.0.1, ::1
    assert environment == "libm.so.6 None"
