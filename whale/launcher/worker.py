"""Runs the worker, the process that mpirun starts for a rank: it forks the script, relays its output, reports its end.

    python -m whale.launcher.worker [-m] script [arguments ...]

mpirun ends all ranks as soon as one of its processes is gone. So that the launcher decides this instead, the worker
exits, always with code 0, only after the launcher has closed the connection. If the connection breaks, the worker kills
the script's process group.

Decision: 0001.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from whale.launcher.connection import connect, read_identity
from whale.launcher.protocol import (
    ADDRESS_VARIABLE,
    FIRST_VARIABLE,
    LOOPBACK_VARIABLE,
    PRELOAD_VARIABLE,
    SEGMENTS_VARIABLE,
    TOKEN_BYTES,
    TOKEN_VARIABLE,
    TOTAL_VARIABLE,
    TRACE_VARIABLE,
    FrameKind,
    pack,
)
from whale.launcher.script import run_script
from whale.launcher.shm_cleanup import open_folder
from whale.launcher.worker_io import Relay, trace_pipe
from whale.started import (
    CONTROL_VARIABLE,
    FILES_VARIABLE,
    LOCAL_RANK_VARIABLE,
    LOCAL_SIZE_VARIABLE,
    PEERS_VARIABLE,
    RANK_VARIABLE,
    SIZE_VARIABLE,
    TRACE_PIPE_VARIABLE,
    ProcessPlace,
    process_place,
)

THREADS_VARIABLE = "WHALE_LAUNCHER_THREADS"
_MPI_SEGMENTS_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
_PR_SET_PDEATHSIG = 1
_DAEMONS = ("prted", "orted")
_PLACE_VARIABLES = (RANK_VARIABLE, SIZE_VARIABLE, LOCAL_RANK_VARIABLE, LOCAL_SIZE_VARIABLE)


def main() -> None:
    """Runs one rank: connects to the launcher, forks the script, and relays until the launcher closes the connection.

    In the forked process this calls the script and leaves by ``sys.exit``; in the worker itself it never returns.
    """
    arguments = sys.argv[1:]
    as_module = arguments[0] == "-m"
    target, *rest = arguments[1:] if as_module else arguments
    # In a run that was started by a rank of another run, these variables tell the outer rank.
    place = process_place({name: text for name, text in os.environ.items() if name not in _PLACE_VARIABLES})
    # Set if this mpirun starts only some of the run's ranks: its first rank, and the number of all ranks.
    first = int(os.environ.pop(FIRST_VARIABLE, "0"))
    total = int(os.environ.pop(TOTAL_VARIABLE, "0")) or first + place.size
    place = replace(place, rank=first + place.rank, size=total)
    connection = connect(os.environ[TOKEN_VARIABLE])
    os.environ[PEERS_VARIABLE] = f"{connection.getsockname()[0]} {_derive_secret(os.environ[TOKEN_VARIABLE])}"
    segments, traced = os.environ.pop(SEGMENTS_VARIABLE), os.environ.pop(TRACE_VARIABLE, None) is not None
    _set_environment(os.environ, place)
    os.environ.pop(FILES_VARIABLE, None)  # set if this run was started by a rank of another run
    if open_folder(segments):
        os.environ[FILES_VARIABLE] = segments
        os.environ.setdefault(_MPI_SEGMENTS_VARIABLE, segments)

    # For stdout, stderr and the report of a failure: (the worker's read end, the script's write end).
    pipes = [os.pipe() for _ in range(3)]
    greeted, greeting = os.pipe()
    control, script_control = socket.socketpair()
    trace, script_trace = trace_pipe() if traced else (None, None)
    sys.stdout.flush()
    sys.stderr.flush()
    worker_pid = os.getpid()
    script_pid = os.fork()
    if script_pid == 0:
        connection.close()
        control.close()
        os.environ[CONTROL_VARIABLE] = f"{os.getpid()}:{script_control.detach()}"
        for reader, _ in pipes:
            os.close(reader)
        if trace is not None:
            os.close(trace)
            os.environ[TRACE_PIPE_VARIABLE] = f"{os.getpid()}:{script_trace}"
        # Waits until the worker has sent HELLO: if the script kills the worker at once, the launcher knows its rank.
        os.close(greeting)
        os.read(greeted, 1)
        os.close(greeted)
        _become_script(worker_pid, *(writer for _, writer in pipes))
        sys.exit(run_script(target, rest, as_module, report=pipes[2][1]))
    for _, writer in pipes:
        os.close(writer)
    script_control.close()
    if script_trace is not None:
        os.close(script_trace)
    hello = {
        "rank": place.rank,
        "size": place.size,
        "host": socket.gethostname(),
        "pid": script_pid,
        "clock": read_identity(),
    }
    connection.sendall(pack(FrameKind.HELLO, hello))
    os.close(greeted)
    os.close(greeting)
    try:
        os.setpgid(script_pid, script_pid)
    except OSError:
        # Both processes call setpgid, since either may come first; the script may even have ended.
        pass
    relay = Relay(connection, script_pid, [reader for reader, _ in pipes], control, trace)
    relay.run()
    shutil.rmtree(segments, ignore_errors=True)
    if relay.is_cut_off:
        _end_daemon()
    os._exit(0)


def _end_daemon() -> None:
    """Kills the Open MPI daemon of this host, once mpirun's host is out of reach; the daemon would try for minutes to
    connect to mpirun.
    """
    parent = os.getppid()
    try:
        if Path(f"/proc/{parent}/comm").read_text().strip() in _DAEMONS:
            os.kill(parent, signal.SIGKILL)
    except OSError:
        pass  # it has ended


def _derive_secret(token: str) -> str:
    """Returns the secret that ranks show each other when they connect; the run's token cannot be computed from it."""
    return hashlib.sha256(f"{token} between ranks".encode()).hexdigest()[:TOKEN_BYTES]


def find_default_threads(local_size: int) -> int:
    """Returns the default number of compute threads per rank: the cores this process may use divided by the host's
    ranks.
    """
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def _set_environment(environment: MutableMapping[str, str], place: ProcessPlace) -> None:
    values = (place.rank, place.size, place.local_rank, place.local_size)
    environment.update({name: str(value) for name, value in zip(_PLACE_VARIABLES, values)})
    # The script and its child processes must not talk to the launcher themselves.
    for name in (ADDRESS_VARIABLE, TOKEN_VARIABLE):
        environment.pop(name)
    # The preloaded library is for mpirun only: the script may listen on any address.
    if (library := environment.pop(LOOPBACK_VARIABLE, None)) is not None:
        environment[PRELOAD_VARIABLE] = environment[PRELOAD_VARIABLE].removeprefix(library).removeprefix(":")
        if not environment[PRELOAD_VARIABLE]:
            del environment[PRELOAD_VARIABLE]
    asked = environment.pop(THREADS_VARIABLE, None)
    threads = find_default_threads(place.local_size) if asked is None else int(asked)
    for name, count in make_thread_variables(threads).items():
        if asked is not None or name not in environment:
            environment[name] = str(count)


def make_thread_variables(threads: int) -> Mapping[str, int]:
    """Returns the environment variables that give a rank `threads` compute threads, for TensorFlow and OpenMP.

    There are at least two inter-op threads: while an op of a rank waits in an exchange, another op can run, and the
    core of a rank that waits is used by a rank that has more to do (measured in
    docs/decisions/0004-two-inter-op-threads.md; 0227 says where the calling thread is used instead of one of them).
    """
    return {"TF_NUM_INTRAOP_THREADS": threads, "TF_NUM_INTEROP_THREADS": max(2, threads), "OMP_NUM_THREADS": threads}


def _become_script(worker_pid: int, stdout: int, stderr: int, report: int) -> None:
    """Prepares the forked process to run the script: a process group of its own, and its output into the worker's
    pipes.

    Args:
        worker_pid: process number of the worker; the kernel kills the script when the worker dies.
        stdout, stderr: write ends of the pipes that replace the script's output.
        report: descriptor for the report of a failure; the script's own child processes do not inherit it.
    """
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker_pid:  # the worker was killed before the line above
        os._exit(128 + signal.SIGKILL)
    # mpirun never closes rank 0's stdin, so reading it would block for ever.
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.set_inheritable(report, False)
    # Python buffers whole blocks of a stdout that is a pipe, and lines are to be shown as they are printed.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()


if __name__ == "__main__":
    main()
