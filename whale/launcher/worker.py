"""The process that mpirun starts for a rank: forks the script, relays its output, reports its end.

    python -m whale.launcher.worker [-m] script [arguments ...]

It ends with code 0 only after the launcher has closed the connection, so that mpirun, which would stop all ranks when
the first one is gone, leaves that to the launcher. When the connection breaks, the script's process group is killed.

Twice a second it tells the launcher that it runs. That says nothing of the script, which may compute for as long as it
likes; whether the script's process is stopped, the kernel tells its parent, and the worker the launcher.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import hashlib
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from whale.launcher import clock
from whale.launcher.connection import connect
from whale.launcher.protocol import (
    ADDRESS_VARIABLE,
    DEAF_S,
    FIRST_VARIABLE,
    HEARTBEAT_S,
    LOOPBACK_VARIABLE,
    PRELOAD_VARIABLE,
    SEGMENTS_VARIABLE,
    TOKEN_BYTES,
    TOKEN_VARIABLE,
    TOTAL_VARIABLE,
    TRACE_VARIABLE,
    Kind,
    Unpacker,
    pack,
)
from whale.launcher.script import run_script
from whale.launcher.segments import open_folder
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
_READ_BYTES = 1 << 16
_TRACE_BYTES = 1 << 20  # what a pipe may hold without privileges
_TRACE_EVERY_S = 0.1
_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4  # linux/sched.h
_PLACE_VARIABLES = (RANK_VARIABLE, SIZE_VARIABLE, LOCAL_RANK_VARIABLE, LOCAL_SIZE_VARIABLE)
_STREAMS = (Kind.STDOUT, Kind.STDERR)


def main() -> None:
    """Runs one rank. Returns in the script's process (through sys.exit) and never returns in the worker's own."""
    arguments = sys.argv[1:]
    as_module = arguments[0] == "-m"
    target, *rest = arguments[1:] if as_module else arguments
    # A run started inside another run's rank must not take the outer rank for its own.
    place = process_place({name: text for name, text in os.environ.items() if name not in _PLACE_VARIABLES})
    # Ranks before those of this mpirun, and all of them: it is that of one host, or comes while the run goes on.
    first = int(os.environ.pop(FIRST_VARIABLE, "0"))
    total = int(os.environ.pop(TOTAL_VARIABLE, "0")) or first + place.size
    place = replace(place, rank=first + place.rank, size=total)
    connection = connect(os.environ[TOKEN_VARIABLE])
    os.environ[PEERS_VARIABLE] = f"{connection.getsockname()[0]} {_secret(os.environ[TOKEN_VARIABLE])}"
    segments, traced = os.environ.pop(SEGMENTS_VARIABLE), os.environ.pop(TRACE_VARIABLE, None) is not None
    _set_environment(os.environ, place)
    os.environ.pop(FILES_VARIABLE, None)  # of a run within which this one is started
    if open_folder(segments):
        os.environ[FILES_VARIABLE] = segments
        os.environ.setdefault(_MPI_SEGMENTS_VARIABLE, segments)

    # stdout, stderr, report: the script's ends, then the worker's.
    pipes = [os.pipe() for _ in range(3)]
    greeted, greeting = os.pipe()
    control, script_control = socket.socketpair()
    trace, script_trace = _trace_pipe() if traced else (None, None)
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
        # Whatever the script does, be it to kill this worker, the launcher knows by then whose doing it is.
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
        "clock": clock.identity(),
    }
    connection.sendall(pack(Kind.HELLO, hello))
    os.close(greeted)
    os.close(greeting)
    try:
        os.setpgid(script_pid, script_pid)
    except OSError:
        # Both sides call it, whichever is first; the script may even have ended.
        pass
    _Relay(connection, script_pid, [reader for reader, _ in pipes], control, trace).run()
    shutil.rmtree(segments, ignore_errors=True)
    os._exit(0)


def is_ending(pid: int) -> bool:
    """Whether the kernel takes a process apart, whose descriptors are closed while much memory is still given back."""
    with open(f"/proc/{pid}/stat") as stat:
        return bool(int(stat.read().rpartition(")")[2].split()[6]) & _PF_EXITING)


def _secret(token: str) -> str:
    """By which the ranks of a run know each other; nobody finds the token by it."""
    return hashlib.sha256(f"{token} between ranks".encode()).hexdigest()[:TOKEN_BYTES]


def default_threads(local_size: int) -> int:
    """Threads for one rank: this host's usable cores divided by the ranks on it, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def _set_environment(environment: MutableMapping[str, str], place: ProcessPlace) -> None:
    values = (place.rank, place.size, place.local_rank, place.local_size)
    environment.update({name: str(value) for name, value in zip(_PLACE_VARIABLES, values)})
    # The script is not part of the control channel, nor are processes that it starts.
    for name in (ADDRESS_VARIABLE, TOKEN_VARIABLE):
        environment.pop(name)
    # What a script listens to is its own affair.
    if (library := environment.pop(LOOPBACK_VARIABLE, None)) is not None:
        environment[PRELOAD_VARIABLE] = environment[PRELOAD_VARIABLE].removeprefix(library).removeprefix(":")
        if not environment[PRELOAD_VARIABLE]:
            del environment[PRELOAD_VARIABLE]
    asked = environment.pop(THREADS_VARIABLE, None)
    threads = default_threads(place.local_size) if asked is None else int(asked)
    for name, count in thread_variables(threads).items():
        if asked is not None or name not in environment:
            environment[name] = str(count)


def thread_variables(threads: int) -> Mapping[str, int]:
    """The environment variables that give a rank ``threads`` threads for computing.

    Inter-op threads are two at least: while a rank waits for others at one place of its graph, it computes at
    another, and a rank with more to do takes the core of one that waits (figures are in
    docs/decisions/0004-two-inter-op-threads.md).
    """
    return {"TF_NUM_INTRAOP_THREADS": threads, "TF_NUM_INTEROP_THREADS": max(2, threads), "OMP_NUM_THREADS": threads}


def _trace_pipe() -> tuple[int, int]:
    """A pipe into which the script writes without ever waiting, and from which the worker reads now and then."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    try:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _TRACE_BYTES)
    except (AttributeError, OSError):
        pass  # it stays as large as the system makes it; events that do not fit are counted in the trace
    return reader, writer


def _become_script(worker_pid: int, stdout: int, stderr: int, report: int) -> None:
    """Makes the forked process the script's: own process group, output into the pipes, default signals."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker_pid:  # the worker was killed before the line above
        os._exit(128 + signal.SIGKILL)
    # mpirun never ends rank 0's input; to read it would be to wait for ever.
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.set_inheritable(report, False)
    # A pipe is no terminal, and Python would hold back lines until the end.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()


class _Relay:
    """The worker's loop: the script's pipes -> frames; the launcher's frames -> signals."""

    def __init__(
        self,
        connection: socket.socket,
        script_pid: int,
        readers: list[int],
        control: socket.socket,
        trace: int | None,
    ) -> None:
        self._connection = connection
        self._trace = trace
        self._control = control
        self._from_script = b""
        self._script = script_pid
        self._stdout, self._stderr, self._report = readers
        self._open = {*readers, control.fileno()}
        self._reported = b""
        self._unpacker = Unpacker()
        self._running = True
        self._next_beat_s = 0.0
        self._deaf_from_s = math.inf  # when the launcher is told that the script has closed its end; monotonic
        # Reading must never wait: a process that the script left behind may hold a pipe open.
        for reader in self._open:
            os.set_blocking(reader, False)

    def run(self) -> None:
        wake, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        os.write(wake_writer, b"\0")  # the script may have ended before the handler was there
        look_every_s = HEARTBEAT_S if self._trace is None else _TRACE_EVERY_S
        try:
            while self._running:
                ready, _, _ = select.select([self._connection.fileno(), wake, *self._open], [], [], look_every_s)
                self._beat()
                self._relay_trace()
                if time.monotonic() >= self._deaf_from_s:
                    ending = is_ending(self._script)
                    self._deaf_from_s = time.monotonic() + DEAF_S if ending else math.inf
                    if not ending:
                        self._connection.sendall(pack(Kind.DEAF, {}))
                if wake in ready:
                    os.read(wake, _READ_BYTES)
                for reader in self._open.intersection(ready):
                    self._read(reader)
                if self._connection.fileno() in ready and not self._obey():
                    return
                pid, status = os.waitpid(self._script, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if pid and (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                    self._connection.sendall(pack(Kind.STOPPED, {"stopped": os.WIFSTOPPED(status)}))
                elif pid:
                    self._finish(status)
            while True:
                ready, _, _ = select.select([self._connection.fileno()], [], [], HEARTBEAT_S)
                self._beat()
                if ready and not self._obey():
                    return
        except (BrokenPipeError, ConnectionError):
            return
        finally:
            self._kill(signal.SIGKILL)

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + HEARTBEAT_S
            self._connection.sendall(pack(Kind.HEARTBEAT, {}))

    def _finish(self, status: int) -> None:
        """After the script's end: ends what it left behind, sends all that the pipes hold, then the exit status."""
        self._kill(signal.SIGKILL)
        self._running = False
        for reader in (self._stdout, self._stderr, self._report):
            while reader in self._open and self._read(reader):
                pass
        self._relay_trace()
        code = os.waitstatus_to_exitcode(status)
        exit_status = {"code": code if code >= 0 else 128 - code, "signal": -code if code < 0 else 0}
        self._connection.sendall(pack(Kind.EXIT, exit_status))

    def _read(self, reader: int) -> bool:
        """Relays what a pipe holds now. False when it holds nothing or was closed."""
        try:
            data = os.read(reader, _READ_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the script ended without having read what it was told
            data = b""
        if not data:
            self._open.discard(reader)
            if reader == self._control.fileno():
                self._deaf_from_s = time.monotonic() + DEAF_S
            if reader == self._report and self._reported:
                self._relay_report()
            return False
        if reader == self._report:
            self._reported += data
        elif reader == self._control.fileno():
            *messages, self._from_script = (self._from_script + data).split(b"\n")
            for message in messages:
                self._connection.sendall(pack(Kind.SCRIPT, message))
        else:
            self._connection.sendall(pack(_STREAMS[reader == self._stderr], data))
        return True

    def _relay_report(self) -> None:
        # What the script printed before it failed stands before the failure.
        for reader in (self._stdout, self._stderr):
            while reader in self._open and self._read(reader):
                pass
        self._connection.sendall(pack(Kind.FAILURE, json.loads(self._reported)))
        self._reported = b""

    def _relay_trace(self) -> None:
        """Passes on what the trace's pipe holds. Nobody is woken up when something is written to it."""
        if self._trace is None:
            return
        try:
            data = os.read(self._trace, _TRACE_BYTES)
        except BlockingIOError:
            return
        if data:
            self._connection.sendall(pack(Kind.TRACE, data))

    def _obey(self) -> bool:
        """Handles what the launcher sent. False when it has closed the connection."""
        data = self._connection.recv(_READ_BYTES)
        received_ns = time.monotonic_ns()
        for kind, payload in self._unpacker.feed(data):
            if kind is Kind.SIGNAL:
                self._kill(json.loads(payload)["signal"])
            elif kind is Kind.LOST and self._running:
                self._tell_script(payload)
            elif kind is Kind.CLOCK:
                answer = {**json.loads(payload), "received_ns": received_ns, "answered_ns": time.monotonic_ns()}
                self._connection.sendall(pack(Kind.CLOCK, answer))
        return bool(data)

    def _kill(self, number: int) -> None:
        if not self._running:  # by now the group's number may belong to somebody else
            return
        try:
            os.killpg(self._script, number)
        except ProcessLookupError:
            pass

    def _tell_script(self, message: bytes) -> None:
        try:
            self._control.send(message + b"\n")
        except OSError:
            # A script that never listens has nothing to be told; one that has ended is seen by its end.
            pass

    def _on_signal(self, number: int, frame: object) -> None:
        """mpirun ends this rank: the script is told, and has a moment unless the launcher is gone.

        mpirun kills this process after a second; the script's children would then be nobody's.
        """
        self._kill(number)
        deadline_s = time.monotonic() + 0.5
        while self._running and time.monotonic() < deadline_s and not self._launcher_is_gone():
            if os.waitid(os.P_PID, self._script, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            time.sleep(0.02)
        self._kill(signal.SIGKILL)

    def _launcher_is_gone(self) -> bool:
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


if __name__ == "__main__":
    main()
