"""Process groups that stay alive and are asked for a few steps at a time; idle ones are stopped and burn no time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 60.0


@dataclass
class _Process:
    connection: socket.socket
    stream: Any
    pid: int


class Group:
    """The running processes of one configuration, stopped while they are not asked. Use as a context manager."""

    def __init__(
        self, title: str, line: Sequence[str], ranks: int, environment: Mapping[str, str], *, stops: bool = True
    ) -> None:
        """Starts the processes and waits until every one is ready.

        Args:
            title: of the group, for errors.
            line: the command that starts all processes; each connects to BENCH_ADDRESS (see `serve`).
            ranks: number of processes.
            environment: variables beside those of this process.
            stops: stop the processes while they are not asked.
        """
        self._title, self._ranks = title, ranks
        self._processes: list[_Process] = []
        self._output = tempfile.TemporaryFile("w+")
        self._stops, self._stopped = stops, False
        token = secrets.token_hex(8)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            variables = {
                **os.environ,
                **environment,
                "BENCH_ADDRESS": f"127.0.0.1:{listener.getsockname()[1]}",
                "BENCH_TOKEN": token,
                "TF_CPP_MIN_LOG_LEVEL": "2",
            }
            self._child = subprocess.Popen(line, env=variables, stdout=self._output, stderr=subprocess.STDOUT)
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

    def ask(self, timeout_s: float, **question: Any) -> list[dict[str, Any]]:
        """What every process answers, in rank order."""
        self._resume()
        for process in self._processes:
            process.stream.write(json.dumps(question) + "\n")
            process.stream.flush()
        answers = [self._read(process, timeout_s) for process in self._processes]
        self._pause()
        return answers

    def close(self) -> None:
        """Ends the processes, in order if they can."""
        self._end(END_TIMEOUT_S)

    def _end(self, patience_s: float) -> None:
        self._resume()
        try:
            for process in self._processes:
                process.stream.write("{}\n")
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
        while len(found) < self._ranks:
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
        return RuntimeError(f"{self._title}: {what}\n{self._output.read()[-4000:]}")

    def _pause(self) -> None:
        # All ranks have answered: none waits for another. Their background threads (MPI, Horovod) would go on polling.
        if self._stops:
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


def thread_variables(threads: int) -> dict[str, str]:
    """Returns the variables with which each process of a group computes with so many threads."""
    from whale.launcher.worker import make_thread_variables  # ranks of others have no Whale

    return {name: str(value) for name, value in make_thread_variables(threads).items()}


def under_mpirun(worker: Sequence[str], ranks: int) -> list[str]:
    """The command that starts a worker ``ranks`` times through this environment's Open MPI."""
    from whale.launcher.mpirun import find_mpirun  # ranks of others have no Whale

    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return [find_mpirun(), *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *worker]


Answer = Callable[..., dict[str, Any]]


def serve(rank: int, start: Callable[[], tuple[Answer, Callable[[], None]]]) -> None:
    """One process of a group: calls ``start``, answers questions with the first thing it gave, ends with the second.

    Between two questions it waits in a read.
    """
    host, port = os.environ["BENCH_ADDRESS"].split(":")
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rw") as stream:

        def say(**facts: Any) -> None:
            stream.write(json.dumps(facts) + "\n")
            stream.flush()

        say(token=os.environ["BENCH_TOKEN"], rank=rank, pid=os.getpid())
        answer, end = start()
        say(ready=True)
        while question := json.loads(stream.readline() or "{}"):
            say(**answer(**question))
        end()
