"""Starts, watches and ends the mpiruns that hold a run's workers.

MpirunProcess   one: starts it, listens to what it says, and ends it with all that it started
Mpiruns         those of a run's start: one for all ranks, or one for each host, without which the others go on
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
    """An mpirun in a process group of its own, which gets a SIGTERM when this process dies.

    Args:
        line: the command.
        environment: of the command, whole.
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
        """Returns the number of its process, which is that of its process group as well."""
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """Returns the file of its stdout and stderr, to wait for; `read` takes what is there."""
        assert self._process.stdout is not None  # a pipe was asked for
        return self._process.stdout

    @property
    def has_ended(self) -> bool:
        """Tells whether the process has ended; its last output may not have been read yet."""
        return self._process.poll() is not None

    @property
    def is_stopped(self) -> bool:
        """Tells whether the process is stopped, as by SIGSTOP."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False  # it has ended, and that is known

    @property
    def returncode(self) -> int:
        """Returns, for an ended process, what `subprocess` does: the exit code, or minus the signal."""
        return self._process.returncode

    @property
    def output_text(self) -> str:
        """Returns the output so far (at least the last part of it), without space around."""
        return b"".join(self._said).decode(errors="replace").strip()

    def read(self) -> bytes:
        """Reads new output: at least a byte once `output` is readable, nothing at its end."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        if data:
            self._said.append(data)
        return data

    def end(self, grace_s: float, by_itself: bool) -> None:
        """Ends the process; returns once it has ended, or cannot even be killed.

        Args:
            grace_s: how long it has after each of nothing, SIGTERM and SIGKILL.
            by_itself: nothing is sent at first, since its workers are about to end.
        """
        children = [
            pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if ranks.read_parent(pid) == self.pid
        ]
        for number in (0, signal.SIGTERM, signal.SIGKILL) if by_itself else (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)
                os.killpg(self.pid, signal.SIGCONT)  # one that is stopped would not hear of a SIGTERM
                # Reads on while it waits, or an mpirun with much to say would never end.
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
        """Removes the files of Open MPI 5 in the temporary folder, which stay when it is killed; once all has ended."""
        temporary = tempfile.gettempdir()
        shutil.rmtree(_find_session_folder(self.pid), ignore_errors=True)
        if (self.returncode or 0) >= 0:
            return
        # Ranks whose mpirun is gone make folders as processes without one do. They are empty, and of no other run.
        shared = os.path.join(temporary, f"ompi.{socket.gethostname().partition('.')[0]}.{os.getuid()}")
        for folder, _, _ in os.walk(shared, topdown=False):
            try:
                if os.stat(folder).st_ctime >= self._start_s:
                    os.rmdir(folder)
            except OSError:
                continue  # not empty, or gone


class Mpiruns:
    """The mpiruns of a run's start; starts them.

    Args:
        starts: their commands.
        freeze_s: for how long one may be stopped; 0 for as long as it likes.
    """

    def __init__(self, starts: Sequence[MpirunStart], freeze_s: float) -> None:
        self._starts, self._freeze_s = starts, freeze_s
        self._stopped_s: dict[int, float] = {}  # which one, and since when
        self.processes: list[MpirunProcess] = []
        for start in starts:
            self.processes.append(MpirunProcess(start.line, start.environment))

    @property
    def has_ended(self) -> bool:
        """Tells whether all have ended."""
        return all(process.has_ended for process in self.processes)

    @property
    def has_any_ended(self) -> bool:
        """Tells whether one has ended."""
        return any(process.has_ended for process in self.processes)

    @property
    def output_text(self) -> str:
        """Returns what they have printed, at least the last of it."""
        return "\n".join(filter(None, (process.output_text for process in self.processes)))

    def find_gone(self, complete: bool, links: Mapping[int, ranks.RankLink]) -> Iterator[ranks.Failure]:
        """Yields the failures of mpiruns that were stopped or killed: none of the ranks of such a one can end.

        Args:
            complete: whether all ranks have come up.
            links: of the ranks.
        """
        now_s = time.monotonic()
        for number, (start, process) in enumerate(zip(self._starts, self.processes)):
            failure = None
            if process.has_ended:
                # One that is alone says by its code how its ranks ended; that of a host is through after them.
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
    """Returns the folder where the mpirun of Open MPI 5 with this process number keeps its files."""
    return os.path.join(tempfile.gettempdir(), f"ompi.{pid}")


def _prepare_process() -> None:
    """Does, in the process that becomes mpirun, what it needs before it starts.

    It asks the kernel for a SIGTERM when the launcher dies, even by SIGKILL. And it removes what an mpirun that was
    killed left under the same process number: over such a file PMIx's listener does not start.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    shutil.rmtree(_find_session_folder(os.getpid()), ignore_errors=True)
