"""Starts, watches and ends the mpirun processes of a run.

MpirunProcess  one mpirun: starts it, reads its output, and ends it together with what it has started
Mpiruns        the mpirun processes of a run's start: one for all ranks, or one per host so that hosts can be lost
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from whale.launcher.job import ranks
from whale.launcher.mpirun import MpirunStart

_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


class MpirunProcess:
    """Runs one mpirun in a process group of its own; the kernel sends it SIGTERM when the launcher dies.

    Args:
        line: the command line.
        environment: the complete environment of the process.
    """

    def __init__(self, line: Sequence[str], environment: Mapping[str, str]) -> None:
        self._said: collections.deque[bytes] = collections.deque(maxlen=40)
        self._start_s = time.time()
        self._process = subprocess.Popen(
            line,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_prepare_process,
        )

    @property
    def pid(self) -> int:
        """Returns the process number, which is also the number of the process group."""
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """Returns the pipe with mpirun's stdout and stderr, for a selector; `read` reads it."""
        assert self._process.stdout is not None  # a pipe was asked for
        return self._process.stdout

    @property
    def has_ended(self) -> bool:
        """Returns True if the process has ended; some of its output may still be unread."""
        return self._process.poll() is not None

    @property
    def is_stopped(self) -> bool:
        """Returns True if the process is stopped, as by SIGSTOP."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False  # it has ended, and that is known

    @property
    def returncode(self) -> int:
        """Returns, once the process has ended, its exit code, or minus the number of the signal that killed it."""
        return self._process.returncode

    @property
    def output_text(self) -> str:
        """Returns the last part of the output read so far (up to 40 reads), stripped."""
        return b"".join(self._said).decode(errors="replace").strip()

    def read(self) -> bytes:
        """Reads new output: at least one byte if `output` is readable, b"" at its end."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        if data:
            self._said.append(data)
        return data

    def end(self, grace_s: float, by_itself: bool) -> None:
        """Ends the process with growing force, and returns once it has ended or has survived even SIGKILL.

        Args:
            grace_s: seconds to wait after each step: doing nothing (if `by_itself`), SIGTERM, SIGKILL.
            by_itself: whether to wait before the first signal, because mpirun ends as soon as its workers have ended.
        """
        children = [
            pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if ranks.read_parent(pid) == self.pid
        ]
        for number in (0, signal.SIGTERM, signal.SIGKILL) if by_itself else (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)
                os.killpg(self.pid, signal.SIGCONT)  # a stopped process would not receive SIGTERM
                # Reads while it waits: an mpirun that blocks on a full pipe would never end.
                self._process.communicate(timeout=grace_s)
                break
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        for child in children:  # an ssh to a host that is gone waits for as long as the network is silent
            with contextlib.suppress(OSError):
                if os.getsid(child) == self.pid:
                    os.kill(child, signal.SIGKILL)

    def remove_files(self) -> None:
        """Removes the temporary files that Open MPI 5 leaves behind if it was killed; called when all processes have
        ended.
        """
        temporary = tempfile.gettempdir()
        shutil.rmtree(_find_session_folder(self.pid), ignore_errors=True)
        if (self.returncode or 0) >= 0:
            return
        # Ranks whose mpirun was killed create folders here, as processes without an mpirun do. Those that were made
        # during this run are removed, if they are empty.
        shared = os.path.join(temporary, f"ompi.{socket.gethostname().partition('.')[0]}.{os.getuid()}")
        for folder, _, _ in os.walk(shared, topdown=False):
            try:
                if os.stat(folder).st_ctime >= self._start_s:
                    os.rmdir(folder)
            except OSError:
                continue  # not empty, or gone


class Mpiruns:
    """Starts the mpirun processes of a run's start, and detects those that were stopped or killed.

    Args:
        starts: the processes to start.
        freeze_s: seconds for which an mpirun may be stopped before its ranks count as failed; 0: no limit.
    """

    def __init__(self, starts: Sequence[MpirunStart], freeze_s: float) -> None:
        self._starts, self._freeze_s = starts, freeze_s
        self._stopped_s: dict[int, float] = {}  # index of a stopped mpirun -> since when
        self.processes: list[MpirunProcess] = []
        for start in starts:
            self.processes.append(MpirunProcess(start.line, start.environment))

    @property
    def has_ended(self) -> bool:
        """Returns True if all mpirun processes have ended."""
        return all(process.has_ended for process in self.processes)

    @property
    def has_any_ended(self) -> bool:
        """Returns True if at least one mpirun process has ended."""
        return any(process.has_ended for process in self.processes)

    @property
    def output_text(self) -> str:
        """Returns the last output of all mpirun processes, one after the other."""
        return "\n".join(filter(None, (process.output_text for process in self.processes)))

    def find_gone(self, complete: bool, links: Mapping[int, ranks.RankLink]) -> Iterator[ranks.Failure]:
        """Yields failures for mpirun processes that were stopped or killed, without which their ranks cannot end
        properly.

        With one mpirun for the run, the failure is mpirun's; with one mpirun per host, there is one failure for each of
        its ranks.

        Args:
            complete: whether all ranks have connected.
            links: the connections of the ranks.
        """
        now_s = time.monotonic()
        for number, (start, process) in enumerate(zip(self._starts, self.processes)):
            failure = None
            if process.has_ended:
                # A single mpirun that exits by itself says by its code how its ranks ended. With one mpirun per host,
                # none ends before its workers do.
                if complete and (process.returncode < 0 or len(self.processes) > 1):
                    failure = ranks.make_gone_mpirun_failure(process.returncode)
            elif process.is_stopped:
                since_s = self._stopped_s.setdefault(number, now_s)
                if self._freeze_s and now_s - since_s >= self._freeze_s:
                    failure = ranks.make_stopped_mpirun_failure(now_s - since_s)
            else:
                self._stopped_s.pop(number, None)
            if failure is None:
                continue
            if len(self.processes) == 1:
                yield failure
                continue
            for rank in start.ranks:
                link = links.get(rank)
                if link is not None and not link.exited:
                    yield ranks.make_lost_with_mpirun_failure(rank, link.host, failure)


def _find_session_folder(pid: int) -> str:
    """Returns the temporary folder of an Open MPI 5 mpirun with this process number."""
    return os.path.join(tempfile.gettempdir(), f"ompi.{pid}")


def _prepare_process() -> None:
    """Prepares the forked process that becomes mpirun; it runs between fork and exec.

    It asks the kernel for SIGTERM when the launcher dies, even by SIGKILL. It also removes files that a killed mpirun
    with the same process number has left: PMIx cannot create its socket over such a file.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    shutil.rmtree(_find_session_folder(os.getpid()), ignore_errors=True)
