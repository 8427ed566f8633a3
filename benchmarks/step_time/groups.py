"""Process groups that stay alive and are asked for a few steps at a time; idle ones are stopped and burn no time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whale.launcher.mpirun import find_mpirun
from whale.launcher.worker import thread_variables

START_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 300.0
END_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Configuration:
    """What one group runs.

    Attributes:
        title: for the table.
        kind: of worker.CONFIGURATIONS.
        ranks, threads: processes, and threads of each.
        environment: further variables, name and value.
        workloads: those it makes sense for; empty: all.
    """

    title: str
    kind: str
    ranks: int = 1
    threads: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    workloads: tuple[str, ...] = ()


@dataclass
class _Process:
    connection: socket.socket
    stream: Any
    pid: int


class Group:
    """The running processes of one configuration. Use as a context manager."""

    def __init__(self, configuration: Configuration, workload: str, pinned: bool) -> None:
        self.configuration = configuration
        self._processes: list[_Process] = []
        self._output = tempfile.TemporaryFile("w+")
        self._stopped = False
        worker = [sys.executable, "-m", "benchmarks.step_time.worker", configuration.kind, workload]
        if pinned:
            worker += ["--cores", ",".join(map(str, _cores(configuration)))]
        line = worker
        if configuration.kind != "plain":
            root = ["--allow-run-as-root"] if os.getuid() == 0 else []
            ranks = ["-np", str(configuration.ranks)]
            line = [find_mpirun(), *root, "--oversubscribe", "--bind-to", "none", *ranks, *worker]
        token = secrets.token_hex(8)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            environment = {
                **os.environ,
                **{name: str(value) for name, value in thread_variables(configuration.threads).items()},
                **dict(configuration.environment),
                "BENCH_ADDRESS": f"127.0.0.1:{listener.getsockname()[1]}",
                "BENCH_TOKEN": token,
                "TF_CPP_MIN_LOG_LEVEL": "2",
            }
            self._child = subprocess.Popen(line, env=environment, stdout=self._output, stderr=subprocess.STDOUT)
            try:
                self._connect(listener, token)
                for process in self._processes:
                    self._read(process, START_TIMEOUT_S)
            except BaseException:
                self._end(0.0)
                raise
        self._pause()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._end(END_TIMEOUT_S if kind is None else 0.0)

    def run(self, steps: int) -> list[dict[str, Any]]:
        """What every rank says of its next ``steps`` steps, in rank order: times_s, cpu_s (a step), loss, counters."""
        self._resume()
        for process in self._processes:
            process.stream.write(json.dumps({"steps": steps}) + "\n")
            process.stream.flush()
        answers = [self._read(process, STEP_TIMEOUT_S * steps) for process in self._processes]
        self._pause()
        return answers

    def close(self) -> None:
        """Ends the processes, in order if they can."""
        self._end(END_TIMEOUT_S)

    def _end(self, patience_s: float) -> None:
        self._resume()
        try:
            for process in self._processes:
                process.stream.write('{"steps": 0}\n')
                process.stream.flush()
            self._child.wait(patience_s)
        except (OSError, subprocess.TimeoutExpired):
            for process in self._processes:
                _signal(process.pid, signal.SIGKILL)
            self._child.kill()
            self._child.wait()
        for process in self._processes:
            process.stream.close()
            process.connection.close()
        self._output.close()

    def _connect(self, listener: socket.socket, token: str) -> None:
        found: dict[int, _Process] = {}
        deadline_s = time.monotonic() + START_TIMEOUT_S
        listener.settimeout(1.0)
        while len(found) < self.configuration.ranks:
            if self._child.poll() is not None or time.monotonic() > deadline_s:
                raise self._failed("did not start")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(10.0)
            stream = connection.makefile("rw")
            hello = json.loads(stream.readline())
            if hello.get("token") == token:
                found[hello["rank"]] = _Process(connection, stream, hello["pid"])
        self._processes = [found[rank] for rank in sorted(found)]

    def _read(self, process: _Process, timeout_s: float) -> dict[str, Any]:
        process.connection.settimeout(timeout_s)
        try:
            line = process.stream.readline()
        except TimeoutError as error:
            raise self._failed(f"did not answer within {timeout_s:.0f} s") from error
        if not line:
            raise self._failed("ended")
        return json.loads(line)

    def _failed(self, what: str) -> RuntimeError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(10)  # it may still be writing what went wrong
        self._output.seek(0)
        return RuntimeError(f"{self.configuration.title}: {what}\n{self._output.read()[-4000:]}")

    def _pause(self) -> None:
        # All ranks have answered: none waits for another. Their background threads (MPI, Horovod) would go on polling.
        for process in self._processes:
            _signal(process.pid, signal.SIGSTOP)
        self._stopped = True

    def _resume(self) -> None:
        if self._stopped:
            for process in self._processes:
                _signal(process.pid, signal.SIGCONT)
        self._stopped = False


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _cores(configuration: Configuration) -> Sequence[int]:
    """The cores of the group: as many as it has threads in all, or all there are. Rank r gets the r-th (modulo)."""
    available = sorted(os.sched_getaffinity(0))
    if configuration.ranks == 1 and configuration.threads > 1:
        return []  # one process of several threads is not pinned to one core
    return available[: configuration.ranks]
