"""A copy of the checkout in a temporary folder, in which faults are planted and tests run."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import Mutant

ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = Path("whale_ops", "lib")
_COMPILED = (".cc", ".h")
_MARK = "MUTANTS_OF_THIS_RUN"  # in the environment of every process that tests start here
_GRACE_S = 10.0
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a run of tests: its exit code, None where the limit of this tool ended it, and what it wrote."""

    code: int | None
    output: str
    seconds: float


class Copy:
    """The files that git has or would take, with the compiled libraries and their objects."""

    def __init__(self, folder: Path) -> None:
        self.root, self._kept, self._token = folder / "checkout", folder / "lib", secrets.token_hex(16)
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():  # one that was removed is listed until that is committed
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        if (ROOT / _LIBRARIES).is_dir():
            shutil.copytree(ROOT / _LIBRARIES, self.root / _LIBRARIES)
        # Python takes a module as compiled before if the source has the size and the second of then.
        self._seconds = itertools.count(int(time.time()))
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "TMPDIR": str(self._temporary),
            "XDG_CACHE_HOME": str(self._temporary),
            _MARK: self._token,
        }
        self.build()
        shutil.copytree(self.root / _LIBRARIES, self._kept)

    def build(self) -> None:
        """Compiles what the libraries lack.

        Raises:
          RuntimeError: a source does not compile; with the compiler's words.
        """
        command = [sys.executable, "-m", "whale_ops.build"]
        done = subprocess.run(command, cwd=self.root, env=self._environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{done.stdout}{done.stderr}")

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the product has the fault.

        Raises:
          RuntimeError: what it replaces does not stand exactly once in its file, or it does not compile.
        """
        path = self.root / mutant.path
        before, stat = path.read_text(), path.stat()
        if before.count(mutant.old) != 1:
            raise RuntimeError(f"{mutant.name}: {before.count(mutant.old)} places in {mutant.path}, expected one")
        compiled = path.suffix in _COMPILED
        try:
            path.write_text(before.replace(mutant.old, mutant.new))
            second = next(self._seconds)
            os.utime(path, (second, second))
            if compiled:
                self.build()
            yield
        finally:
            path.write_text(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            if compiled:
                shutil.rmtree(self.root / _LIBRARIES)
                shutil.copytree(self._kept, self.root / _LIBRARIES)

    def test(self, arguments: Sequence[str], limit_s: float) -> Ended:
        """Runs pytest; nothing that it has started is there afterwards."""
        command = [sys.executable, "-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider", *arguments]
        segments = _segments()
        begin_s = time.monotonic()
        with tempfile.TemporaryFile(dir=self._temporary) as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for this process, which then ends that one
            )
            code: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(limit_s)
            finally:
                self._end(process)
                for folder in _segments() - segments:
                    _remove_left(folder)
            output.seek(0)
            said = output.read().decode(errors="replace")
        return Ended(code, said, time.monotonic() - begin_s)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Ends pytest, which ends what its tests have started, and then kills what is left of that."""
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        while left := self._processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)
        process.wait()

    def _processes(self) -> list[int]:
        """Processes that carry the mark of this copy in their environment; of dead ones nothing is to be read."""
        mark, found = f"{_MARK}={self._token}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


def _segments() -> set[Path]:
    """The folders in memory that ranks of this host share."""
    return set(_MEMORY.glob("whale-*"))


def _remove_left(folder: Path) -> None:
    """Removes a folder that no run holds (see whale/launcher/shm_cleanup.py): others may run tests beside this."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def copied() -> Iterator[Copy]:
    """A copy, which is gone afterwards, also where the process is told to end."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous: dict[int, Callable[..., object] | int | None] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        previous[number] = signal.signal(number, end)
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            yield Copy(Path(folder))
    finally:
        for told, handler in previous.items():
            signal.signal(told, handler)
