"""Installs the wheel as a newcomer would, and runs it: ``python -m tests.wheels dist/*.whl [--tensorflow 2.15.1 ...]``.

For each TensorFlow a fresh environment, in a folder that no build has seen, by another user where this one is root,
with an empty home and a PATH without any compiler. pip installs the wheel and what it depends on from a folder that
was downloaded before, so that the time from the wheel to the first distributed step is known apart from the
network's; a training runs on two ranks, once as it is and once more for what is kept between runs; then pip
uninstalls it, and nothing of it may be left.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.15.1", "2.18.1", "2.21.0")
_PACKAGES = ("whale", "whale_ops", "cost_model", "whale_tensorflow")
_NOBODY = 65534
_COMPILERS = ("gcc", "g++", "cc", "c++", "cpp", "clang", "ld", "as", "mpicc", "mpic++", "mpicxx", "nvcc")
_SCRIPT = """
import time
import tensorflow as tf
import whale as wh

wh.init()
weight = tf.Variable(tf.ones((4, 2)))

@wh.function
def train_step(x):
    loss = tf.reduce_mean(tf.matmul(x, weight) ** 2)
    weight.assign_sub(0.1 * tf.gradients(loss, weight)[0])
    return loss

losses = [float(train_step(tf.ones((6, 4)))) for _ in range(3)]
if wh.rank() == 0:
    print("ranks", wh.size(), "losses", losses, "TensorFlow", tf.__version__)
"""
_LOSSES = [16.0, 5.76, 2.0736]


def _processor_s() -> float:
    """The processor time of all commands that have ended, and of what they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Failed(Exception):
    """A stage that did not do what it should, with what it said."""


@dataclass(slots=True)
class Newcomer:
    """Somebody with a folder of their own, who runs commands without this machine's environment.

    Attributes:
        folder: theirs; the home, an empty one, is in it.
        user: their number; None: this process's.
        taken_s: seconds, and processor time, of each stage, in order.
    """

    folder: Path
    user: int | None
    taken_s: dict[str, tuple[float, float]] = field(default_factory=dict)

    def run(self, stage: str, *command: str) -> str:
        """Runs a command as a stage of its own and returns what it printed.

        Raises:
            Failed: its exit code was not 0.
        """
        names = {
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "PATH": str(self.folder / "bin"),
        }
        kept = {name: text for name, text in os.environ.items() if name.startswith(("PIP_", "LANG", "SSL_", "http"))}
        start_s, used_s = time.monotonic(), _processor_s()
        done = subprocess.run(
            command,
            cwd=self.folder / "home",
            env=kept | names | {"TF_CPP_MIN_LOG_LEVEL": "2"},
            capture_output=True,
            text=True,
            check=False,
            user=self.user,
            group=self.user,
            extra_groups=None if self.user is None else [],
        )
        used_s = _processor_s() - used_s
        self.taken_s[stage] = time.monotonic() - start_s, used_s
        if done.returncode:
            raise Failed(f"{stage}: {' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout


def meet(folder: Path, user: int | None) -> Newcomer:
    """Makes a newcomer's folder: home, temporary files, and programs of this machine but for compilers."""
    for name in ("home", "tmp", "bin"):
        (folder / name).mkdir()
    for place in ("/usr/local/bin", "/usr/bin", "/bin"):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            compiles = program.name.rpartition("-")[2] in _COMPILERS or program.name.startswith(("g++", "gcc", "clang"))
            link = folder / "bin" / program.name
            if not compiles and not link.is_symlink() and not program.name.startswith(("python", "pip")):
                link.symlink_to(program)
    if user is not None:
        for path in (folder, *(folder / name for name in ("home", "tmp", "bin"))):
            os.chown(path, user, user)
    return Newcomer(folder, user)


def find_python(wanted: str | None, user: int | None) -> str:
    """Returns a Python that the newcomer may run and make environments with."""
    places = [wanted] if wanted else [getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3"]
    for place in places:
        try:
            done = subprocess.run(
                [place, "-c", "import ensurepip, venv"],
                cwd="/",
                capture_output=True,
                check=False,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        except OSError:
            continue
        if done.returncode == 0:
            return place
    sys.exit(f"no Python that another user may run and that has venv: {', '.join(places)}; name one by --python")


def try_wheel(wheel: Path, version: str, python: str, user: int | None) -> dict[str, tuple[float, float]]:
    """Installs, runs and uninstalls the wheel beside one TensorFlow; returns what each stage took.

    Raises:
        Failed: says at what.
    """
    with tempfile.TemporaryDirectory(prefix="newcomer_") as scratch:
        newcomer = meet(Path(scratch), user)
        one = newcomer.folder / wheel.name
        shutil.copy(wheel, one)
        one.chmod(0o644)
        if shutil.which("g++", path=str(newcomer.folder / "bin")) or shutil.which(
            "cc", path=str(newcomer.folder / "bin")
        ):
            raise Failed("a compiler is on the newcomer's PATH")
        new = newcomer.folder / "environment"
        bin_folder = new / "bin"
        newcomer.run("environment", python, "-m", "venv", str(new))
        pip = (str(bin_folder / "python"), "-m", "pip", "--disable-pip-version-check", "-q")
        packages = (str(one), f"tensorflow-cpu=={version}")
        newcomer.run("download", *pip, "download", "-d", str(newcomer.folder / "down"), *packages)
        offline = ("--no-index", "--find-links", str(newcomer.folder / "down"))
        newcomer.run("install", *pip, "install", *offline, f"tensorflow-cpu=={version}")
        with_tensorflow = _list_files(new)
        newcomer.run("install the wheel", *pip, "install", *offline, str(one))
        whale = str(bin_folder / "whale")
        script = newcomer.folder / "home" / "train.py"
        script.write_text(_SCRIPT)
        _require_losses(newcomer.run("first run", whale, "run", "-np", "2", "train.py"), version)
        _require_losses(newcomer.run("second run", whale, "run", "-np", "2", "train.py"), version)
        newcomer.run("doctor", whale, "doctor", "--quick")
        newcomer.run("uninstall", *pip, "uninstall", "-y", "whale-tensorflow")
        left = {path for path in _list_files(new) - with_tensorflow if path.parts[:1] and _is_ours(path)}
        if left:
            raise Failed(f"uninstalled, and still there: {sorted(map(str, left))[:10]}")
        return newcomer.taken_s


def _require_losses(said: str, version: str) -> None:
    expected = f"ranks 2 losses {_LOSSES}"
    found = next((line for line in said.splitlines() if "losses" in line), said)
    words = found.partition("losses ")[2].partition(" TensorFlow ")
    losses = [float(word) for word in words[0].strip("[] ").split(",") if word]
    if "ranks 2 " not in found or words[2].strip() != version or len(losses) != len(_LOSSES):
        raise Failed(f"expected {expected} under TensorFlow {version}, found {found}")
    if max(abs(one - other) for one, other in zip(losses, _LOSSES)) > 1e-5:
        raise Failed(f"expected {expected}, found {found}")


def _list_files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def _is_ours(path: Path) -> bool:
    return any(part in _PACKAGES or part.startswith("whale") or part == "epl-launch" for part in path.parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the wheel beside each TensorFlow, and prints the seconds of each stage."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description="Installs and runs the wheel.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--tensorflow", nargs="+", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--python", help="what makes the environments")
    given = parser.parse_args(arguments)
    user = _NOBODY if os.getuid() == 0 else None
    python = find_python(given.python, user)
    code = 0
    for version in given.tensorflow:
        try:
            taken_s = try_wheel(given.wheel.resolve(), version, python, user)
        except Failed as wrong:
            print(f"TensorFlow {version}: {wrong}", flush=True)
            code = 1
            continue
        print(f"TensorFlow {version}: seconds, and of processor time")
        for stage, (seconds, used_s) in taken_s.items():
            print(f"    {stage:<20} {seconds:6.1f} {used_s:6.1f}")
        to_step = [taken_s[stage] for stage in ("environment", "install", "install the wheel", "first run")]
        print(
            f"    {'beside the download':<20} {sum(s for s, _ in to_step):6.1f} {sum(s for _, s in to_step):6.1f}",
            flush=True,
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
