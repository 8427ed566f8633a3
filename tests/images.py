"""Carries out the Dockerfiles' steps without Docker: ``python -m tests.images [Dockerfile.cpu ...]``, as root.

Each stage of a Dockerfile is carried out in a root of its own: an overlay over this machine's root, in a mount
namespace, so that what a step installs or removes is gone afterwards. This machine stands for the base image (it has
to be a Debian or Ubuntu, with a Python of the image's version on PATH or under ~/.pyenv), which is what remains
untried. Then the image's own command runs, `whale doctor --quick`, and a training on two ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "deploy"
_NETWORK_VARIABLES = ("PIP_", "SSL_", "http", "HTTP", "no_proxy", "NO_PROXY")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KNOWN = ("FROM", "RUN", "ENV", "COPY", "WORKDIR", "ENTRYPOINT", "CMD")


@dataclass(slots=True)
class Stage:
    """A stage of an image: its base, its name, and its instructions as (word, text)."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def read_stages(text: str) -> list[Stage]:
    """Reads a Dockerfile, of the instructions that this project's have.

    Raises:
        ValueError: it has another one.
    """
    stages: list[Stage] = []
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, lines.splitlines())):
        word, _, rest = line.partition(" ")
        if word not in _KNOWN:
            raise ValueError(f"an instruction that is not carried out here: {line}")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base.strip(), name.strip()))
        else:
            stages[-1].steps.append((word, rest.strip()))
    return stages


class Root:
    """A root folder over this machine's own, whose changes stay in a folder; commands run in it by chroot.

    Attributes:
        path: where it is seen; environment: what its commands get.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self.path = folder / "root"
        self.environment = {name: text for name, text in os.environ.items() if name.startswith(_NETWORK_VARIABLES)}
        self.environment |= {"PATH": f"{python}:{_SYSTEM_PATH}", "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
        self.work = "/"
        for name in ("root", "upper", "overlay"):
            (folder / name).mkdir(parents=True)
        self._mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={folder}/upper,workdir={folder}/overlay")
        for name in ("proc", "sys", "dev"):
            self._mount("--rbind", f"/{name}", at=name)
        self._mount("-t", "tmpfs", "tmpfs", at="dev/shm")
        self._mount("-t", "tmpfs", "tmpfs", at="tmp")

    def _mount(self, *arguments: str, at: str = "") -> None:
        subprocess.run(["mount", *arguments, str(self.path / at)], check=True)

    def run(self, command: Sequence[str]) -> str:
        """Runs a command; what it says is shown where it fails.

        Raises:
            SystemExit: its exit code was not 0.
        """
        line = ["chroot", str(self.path), "sh", "-c", 'cd "$0" && exec "$@"', self.work, *command]
        done = subprocess.run(line, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout


def carry_out(path: Path, folder: Path) -> None:
    """Carries out all stages of a Dockerfile, then what its image is for."""
    roots: dict[str, Root] = {}
    entry: list[str] = []
    command: list[str] = []
    for number, stage in enumerate(read_stages(path.read_text())):
        root = roots[stage.name or str(number)] = Root(folder / str(number), find_python(stage.base))
        for word, text in stage.steps:
            start_s = time.monotonic()
            if word == "RUN":
                root.run(["sh", "-c", text])
            elif word == "ENV":
                name, _, value = text.partition("=")
                root.environment[name] = value.replace(f"${name}", root.environment.get(name, ""))
            elif word == "WORKDIR":
                root.work = text
                (root.path / text.strip("/")).mkdir(parents=True, exist_ok=True)
            elif word == "COPY":
                copy(text, root, roots)
            else:
                entry, command = (json.loads(text), command) if word == "ENTRYPOINT" else (entry, json.loads(text))
            print(f"{path.name}: {word} {text[:90]} [{time.monotonic() - start_s:.0f} s]", flush=True)
    print(root.run([*entry, *command, "--quick"]), flush=True)
    shutil.copy(ROOT / "examples" / "hello.py", root.path / "work" / "train.py")
    said = root.run([*entry, "run", "-np", "2", "train.py"])
    print(said, flush=True)
    if "2 processes: accuracy " not in said:
        sys.exit(f"{path.name}: no training of two processes")


def copy(text: str, root: Root, roots: dict[str, Root]) -> None:
    """Copies from another stage, or the repository's files from here."""
    source, _, target = text.rpartition(" ")
    if source.startswith("--from="):
        stage, _, place = source.removeprefix("--from=").partition(" ")
        shutil.copytree(roots[stage].path / place.strip("/"), root.path / target.strip("/"), symlinks=True)
        return
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        copied = root.path / target.strip("/") / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copied)


def find_python(base: str) -> str:
    """Returns the folder of a Python of the image's version; the system's where the image has none of its own."""
    version = re.match(r"python:(3\.\d+)", base)
    if version is None:
        return "/usr/bin"
    for folder in [*map(Path, os.environ["PATH"].split(":")), *Path.home().glob(f".pyenv/versions/{version[1]}.*/bin")]:
        if (folder / f"python{version[1]}").exists() and (folder / "python").exists():
            return str(folder)
    sys.exit(f"{base}: no Python {version[1]} was found here")


@contextmanager
def own_mounts() -> Iterator[Path]:
    """Gives a folder for roots; where nobody else sees what is mounted, and all of it ends with this process."""
    _unshare_mounts()
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    folder = Path(tempfile.mkdtemp(prefix="images_", dir="/var/tmp"))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-R", "-l", *map(str, folder.glob("*/root"))], check=False)
        shutil.rmtree(folder)


def _unshare_mounts() -> None:
    """Gives this process mounts of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
        sys.exit(f"no mount namespace: {os.strerror(ctypes.get_errno())}; run this as root")


def main() -> None:
    """Carries out the Dockerfiles that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.images", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=[path.name for path in sorted(FOLDER.glob("Dockerfile.*"))])
    for name in parser.parse_args().names:
        with own_mounts() as folder:
            carry_out(FOLDER / name, folder)
        print(f"{name}: carried out")


if __name__ == "__main__":
    main()
