"""Relays, in a worker, between the script and the launcher: output and messages one way, signals and news the other.

The worker sends a heartbeat twice a second. A heartbeat only says that the worker runs; the script may compute for any
length of time. If the script's process is stopped (SIGSTOP), the kernel tells the worker, its parent, which tells the
launcher.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import select
import signal
import socket
import time
from typing import Any

from whale.cgroup import count_memory_kills, memory_limit_bytes
from whale.launcher.connection import limit_silence
from whale.launcher.protocol import DEAF_S, HEARTBEAT_S, FrameKind, Unpacker, pack

_READ_BYTES = 1 << 16
_TRACE_BYTES = 1 << 20  # what a pipe may hold without privileges
_TRACE_EVERY_S = 0.1
_PF_EXITING = 4  # linux/sched.h
_CUT_OFF = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_STREAMS = (FrameKind.STDOUT, FrameKind.STDERR)


def trace_pipe() -> tuple[int, int]:
    """Returns (read end, write end) of a non-blocking pipe for the script's trace; what does not fit is dropped."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    try:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _TRACE_BYTES)
    except (AttributeError, OSError):
        pass  # the pipe keeps its default size; events that do not fit are counted in the trace
    return reader, writer


def is_ending(pid: int) -> bool:
    """Returns True if the kernel is tearing a process down: its descriptors are closed, but its memory is not all
    freed.
    """
    with open(f"/proc/{pid}/stat") as stat:
        return bool(int(stat.read().rpartition(")")[2].split()[6]) & _PF_EXITING)


class Relay:
    """Runs the worker's loop: turns what the script writes into frames, and frames of the launcher into signals and
    messages.

    Args:
        connection: the socket to the launcher.
        script_pid: process number, and process group, of the script.
        readers: read ends of the script's pipes: stdout, stderr, report of a failure.
        control: the worker's end of the socket over which the script and the worker exchange lines of JSON.
        trace: read end of the trace pipe, or None.

    Attributes:
        is_cut_off: whether the connection broke because the launcher's host does not answer any more.
    """

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
        self.is_cut_off = False
        self._told = 0  # the signal that told this process to end, or 0
        self._memory_kills = count_memory_kills()
        self._next_beat_s = 0.0
        self._deaf_from_s = math.inf  # when to report that the script has closed its control socket (monotonic time)
        # Reading must never block: a process that the script left behind may hold a pipe open.
        for reader in self._open:
            os.set_blocking(reader, False)

    def run(self) -> None:
        """Relays until the launcher closes the connection or it breaks, and then kills the script's process group."""
        wake, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._handle_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        os.write(wake_writer, b"\0")  # the script may have ended before the handler was there
        look_every_s = HEARTBEAT_S if self._trace is None else _TRACE_EVERY_S
        try:
            while self._running:
                ready, _, _ = select.select([self._connection.fileno(), wake, *self._open], [], [], look_every_s)
                self._send_heartbeat()
                self._relay_trace()
                if time.monotonic() >= self._deaf_from_s:
                    ending = is_ending(self._script)
                    self._deaf_from_s = time.monotonic() + DEAF_S if ending else math.inf
                    if not ending:
                        self._connection.sendall(pack(FrameKind.DEAF, {}))
                if wake in ready:
                    os.read(wake, _READ_BYTES)
                for reader in self._open.intersection(ready):
                    self._read(reader)
                if self._connection.fileno() in ready and not self._obey():
                    return
                pid, status, usage = os.wait4(self._script, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if pid and (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                    self._connection.sendall(pack(FrameKind.STOPPED, {"stopped": os.WIFSTOPPED(status)}))
                elif pid:
                    self._finish(status, usage.ru_maxrss * 1024)
            while True:
                ready, _, _ = select.select([self._connection.fileno()], [], [], HEARTBEAT_S)
                self._send_heartbeat()
                if ready and not self._obey():
                    return
        except OSError as error:
            self.is_cut_off = error.errno in _CUT_OFF
            if not (self.is_cut_off or isinstance(error, ConnectionError)):
                raise
        finally:
            self._kill(signal.SIGKILL)

    def _send_heartbeat(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + HEARTBEAT_S
            self._connection.sendall(pack(FrameKind.HEARTBEAT, {}))

    def _finish(self, status: int, held_bytes: int) -> None:
        """Handles the script's end: kills processes that it left behind, relays what the pipes still hold, reports its
        exit.

        Args:
            status: the status from ``os.wait4``.
            held_bytes: the peak resident memory of the script's process.
        """
        self._kill(signal.SIGKILL)
        self._running = False
        for reader in (self._control.fileno(), self._stdout, self._stderr, self._report):
            self._drain(reader)
        self._relay_trace()
        code = os.waitstatus_to_exitcode(status)
        exit_status: dict[str, Any] = {
            "code": code if code >= 0 else 128 - code,
            "signal": -code if code < 0 else 0,
            "told": self._told,
        }
        if code == -signal.SIGKILL and count_memory_kills() > self._memory_kills:
            exit_status["memory"] = {"limit_bytes": memory_limit_bytes(), "held_bytes": held_bytes}
        self._connection.sendall(pack(FrameKind.EXIT, exit_status))

    def _read(self, reader: int) -> bool:
        """Relays what one pipe or the control socket holds now. Returns False if it is empty or was closed."""
        try:
            data = os.read(reader, _READ_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the script ended with unread messages in its socket
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
                if b'"freeze_s"' in message:
                    limit_silence(self._connection, json.loads(message).get("freeze_s", 0.0))
                self._connection.sendall(pack(FrameKind.SCRIPT, message))
        else:
            self._drain(self._control.fileno())  # messages that the script sent before it printed this go first
            self._connection.sendall(pack(_STREAMS[reader == self._stderr], data))
        return True

    def _drain(self, reader: int) -> None:
        while reader in self._open and self._read(reader):
            pass

    def _relay_report(self) -> None:
        # The output from before the failure is shown before the failure.
        for reader in (self._stdout, self._stderr):
            self._drain(reader)
        self._connection.sendall(pack(FrameKind.FAILURE, json.loads(self._reported)))
        self._reported = b""

    def _relay_trace(self) -> None:
        """Sends the content of the trace pipe to the launcher. The loop polls the pipe, so that writing an event wakes
        no process.
        """
        if self._trace is None:
            return
        try:
            data = os.read(self._trace, _TRACE_BYTES)
        except BlockingIOError:
            return
        if data:
            self._connection.sendall(pack(FrameKind.TRACE, data))

    def _obey(self) -> bool:
        """Handles what the launcher has sent: signals, news for the script, clock questions. Returns False if it has
        hung up.
        """
        data = self._connection.recv(_READ_BYTES)
        received_ns = time.monotonic_ns()
        for kind, payload in self._unpacker.feed(data):
            if kind is FrameKind.SIGNAL:
                self._kill(json.loads(payload)["signal"])
            elif kind is FrameKind.LOST and self._running:
                self._tell_script(payload)
            elif kind is FrameKind.CLOCK:
                answer = {**json.loads(payload), "received_ns": received_ns, "answered_ns": time.monotonic_ns()}
                self._connection.sendall(pack(FrameKind.CLOCK, answer))
        return bool(data)

    def _kill(self, number: int) -> None:
        if not self._running:  # the number of the script's process group may have been given to another one
            return
        try:
            os.killpg(self._script, number)
        except ProcessLookupError:
            pass

    def _tell_script(self, message: bytes) -> None:
        try:
            self._control.send(message + b"\n")
        except OSError:
            # The script does not read its socket (which is full or closed), or has ended, which its exit reports.
            pass

    def _handle_signal(self, number: int, frame: object) -> None:
        """Handles a signal with which mpirun ends this rank: passes it on to the script, and kills the script half a
        second later.

        mpirun kills the worker itself after one second; processes of the script that are then still alive would never
        be ended. If the launcher is gone, the script is killed at once.

        Args:
            number: the signal.
            frame: ignored; Python passes it to signal handlers.
        """
        self._told = number
        self._kill(number)
        deadline_s = time.monotonic() + 0.5
        while self._running and time.monotonic() < deadline_s and not self._is_launcher_gone():
            if os.waitid(os.P_PID, self._script, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            time.sleep(0.02)
        self._kill(signal.SIGKILL)

    def _is_launcher_gone(self) -> bool:
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
