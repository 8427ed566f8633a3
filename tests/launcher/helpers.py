"""Starts `whale run` on small scripts and looks for what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests import forkserver

MARKER = "WHALE_TEST_MARKER"
ROOT = Path(__file__).resolve().parents[2]
# What follows within moments on a quiet machine has this long: a busy one is no failure.
PATIENCE_S = 60.0
# Settings of a launcher that never loses patience with ranks that are to end: what ends them was something else.
PATIENT = {"whale.launcher.job.ending.OWN_END_S": 3600.0, "whale.launcher.job.ending.GRACE_S": 3600.0}


class Launcher:
    """Runs scripts under `whale run`; all processes of one launcher carry the same mark in their environment.

    Attributes:
        python: what starts the launcher, and so the ranks: a real Python, or `tests.forkserver.warm_python()`.
        settings: values that names in modules have instead of their own, in the launcher's process and only there.
    """

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        self.mark = uuid.uuid4().hex
        self.settings: Mapping[str, object] = {}
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("WHALE_", "OMP_", "TF_"))}
        self.environment = {**inherited, MARKER: self.mark, "PYTHONPATH": str(ROOT)}

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def command(self, *arguments: str) -> list[str]:
        if not self.settings:
            return [self.python, "-m", "whale", "run", *arguments]
        modules = {name.rpartition(".")[0] for name in self.settings}
        lines = [f"import sys, {', '.join(sorted(modules))}", "from whale.cli import main"]
        lines += [f"{name} = {value!r}" for name, value in self.settings.items()]
        return [self.python, "-c", "\n".join([*lines, "sys.exit(main())"]), "run", *arguments]

    def run(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            self.command(*arguments),
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def left_behind(self, within_s: float = PATIENCE_S) -> list[str]:
        """The command lines of marked processes that still run after ``within_s`` seconds; earlier if none does.

        A process that was killed still has to get a core before it is gone.
        """
        deadline_s = time.monotonic() + within_s
        while True:
            found = self._marked()
            if not found or time.monotonic() >= deadline_s:
                return found
            time.sleep(0.05)

    def _marked(self) -> list[str]:
        found = [_command_line(process) for process in forkserver.processes_of(self.mark)]
        mark = f"{MARKER}={self.mark}".encode()
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal() or int(folder.name) == os.getpid():
                continue
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(_command_line(int(folder.name)))
            except OSError:
                continue  # ended while we looked
        return [line for line in found if line]


def _command_line(process: int) -> str:
    """The command line of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def run_alone(launcher: Launcher, script: str) -> str:
    """Runs a script as one process that never imports Whale, with the argument "plain"; returns what it printed."""
    command = [forkserver.plain_python(), script, "plain"]
    done = subprocess.run(command, env=launcher.environment, capture_output=True, text=True, check=True)
    return done.stdout


def wait_for_line(process: subprocess.Popen[str], wanted: str) -> list[str]:
    """Reads stdout up to the line that contains ``wanted``."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if wanted in line:
            return lines
    raise AssertionError(f"{wanted!r} was not printed; stdout: {lines}")


# All ranks wait here for each other through files, so that what a test observes does not depend on who starts first.
MEET = """
import os, sys, time
def meet(name):
    rank, size = os.environ["WHALE_RANK"], int(os.environ["WHALE_SIZE"])
    open(f"{name}.{rank}", "w").close()
    while not all(os.path.exists(f"{name}.{other}") for other in range(size)):
        time.sleep(0.01)
def wait_for_a_signal():
    while True:  # one long sleep would not hear of a signal that comes between Python's last look and the sleep
        time.sleep(0.1)
rank = int(os.environ["WHALE_RANK"])
"""


def read_partly(late: subprocess.TimeoutExpired) -> str:
    """Returns what a command had said before its time was over: bytes, whatever it was to be read as."""
    return b"".join(part for part in (late.stdout, late.stderr) if part).decode(errors="replace")
