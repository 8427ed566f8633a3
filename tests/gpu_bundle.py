"""What a machine with GPUs and without a network needs for ``make gpu``, packed on one that has a network.

``make gpu-bundle`` packs into build/gpu-bundle: wheels/ with all that pip would install there, lib/ with the built
libraries, bundle.json with what there is, by its SHA-256. ``make gpu`` on the other machine checks and uses it.

    python -m tests.gpu_bundle list   --wheels REQUIREMENT ... [--alone REQUIREMENT ...] [--extras NAME ...]
    python -m tests.gpu_bundle pack   FOLDER (the same)
    python -m tests.gpu_bundle unpack FOLDER

`list` asks pip which wheels there would be, and loads none. Wheels are those of this Python, or of ``--python 3.12``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whale_ops import build

PROJECT = "whale-tensorflow"
CARD = "bundle.json"


def project_requirements(extras: Sequence[str]) -> list[str]:
    """What the installed project's metadata ask for, with some of its extras."""
    found = []
    for line in importlib.metadata.requires(PROJECT) or ():
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if extra is None or extra[1] in extras:
            found.append(requirement)
    return found


def _pip(python: str, *arguments: str) -> str:
    """What pip prints.

    Raises:
      SystemExit: it fails.
    """
    asked = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    asked += ["--only-binary=:all:", "--python-version", python]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"pip found no wheels for all of it:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def wheels_of(python: str, together: Sequence[str], alone: Sequence[str]) -> list[str]:
    """File names of the wheels that pip would load, and loads not.

    Args:
      python: version of the Python that they are for.
      together: requirements that are resolved with each other, and with what they need.
      alone: those that come without what they need.
    """
    found = set()
    for requirements, more in ((together, ()), (alone, ("--no-deps",))):
        if not requirements:
            continue
        with tempfile.TemporaryDirectory() as folder:
            report = ["--dry-run", "--ignore-installed", "--quiet", "--target", folder, "--report", f"{folder}/report"]
            _pip(python, "install", *report, *more, *requirements)
            for one in json.loads(Path(folder, "report").read_text())["install"]:
                found.add(str(one["download_info"]["url"]).rpartition("/")[2])
    return sorted(found)


def pack(
    folder: Path, python: str, together: Sequence[str], alone: Sequence[str], libraries: Path = build.IN_PLACE
) -> dict[str, Any]:
    """Loads the wheels, copies the libraries, and writes the card, which is returned."""
    shutil.rmtree(folder, ignore_errors=True)
    for requirements, more in ((together, ()), (alone, ("--no-deps",))):
        if requirements:
            _pip(python, "download", "--quiet", "--dest", str(folder / "wheels"), *more, *requirements)
    (folder / "lib").mkdir()
    for path in sorted(libraries.iterdir()):
        if path.suffix in (".so", ".json"):
            shutil.copy2(path, folder / "lib")
    files = {str(p.relative_to(folder)): _sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    card = {"python": python, "core": build.compute_core_digest(), "files": files}
    (folder / CARD).write_text(json.dumps(card, indent=1))
    return card


def unpack(folder: Path, libraries: Path = build.IN_PLACE) -> None:
    """Checks that all has come through, and puts the libraries in their place.

    Raises:
      SystemExit: a file is missing or another one, or the bundle is for another Python or other sources.
    """
    card = json.loads((folder / CARD).read_text())
    here = ".".join(map(str, sys.version_info[:2]))
    if card["python"] != here:
        raise SystemExit(
            f"{folder} has wheels for Python {card['python']}, and this is {here}: make gpu-bundle GPU_PYTHON={here}"
        )
    if card["core"] != build.compute_core_digest():
        raise SystemExit(f"{folder} was packed from other sources: copy the whole checkout that it was packed in")
    for name, digest in card["files"].items():
        if not (folder / name).exists() or _sha256(folder / name) != digest:
            raise SystemExit(f"{folder / name} is missing or damaged: copy {folder} again")
    libraries.mkdir(parents=True, exist_ok=True)
    for path in (folder / "lib").iterdir():
        temporary = libraries / f".{path.name}.new"
        shutil.copy2(path, temporary)
        temporary.replace(libraries / path.name)  # a process that has the old one mapped keeps it


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_bundle")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("list", "pack"):
        command = commands.add_parser(name)
        if name == "pack":
            command.add_argument("folder", type=Path)
        command.add_argument("--wheels", nargs="+", required=True, metavar="REQUIREMENT")
        command.add_argument("--alone", nargs="*", default=[], metavar="REQUIREMENT", help="without what they need")
        command.add_argument("--extras", nargs="*", default=[], help=f"of {PROJECT}")
        command.add_argument("--python", default=".".join(map(str, sys.version_info[:2])))
    commands.add_parser("unpack").add_argument("folder", type=Path)
    asked = parser.parse_args()
    if asked.command == "unpack":
        unpack(asked.folder)
        print(f"{asked.folder}: all there; libraries in {build.IN_PLACE.name}/, pip takes wheels from it")
        return
    together = [*asked.wheels, *project_requirements(asked.extras)]
    if asked.command == "list":
        found = wheels_of(asked.python, together, asked.alone)
        print("\n".join([*found, f"{len(found)} wheels for Python {asked.python}"]))
        return
    if not (build.IN_PLACE / build.CUDA_NAME).exists():
        raise SystemExit(f"{build.CUDA_NAME} is not built: python -m whale_ops.build")
    card = pack(asked.folder, asked.python, together, asked.alone)
    size_gb = sum(p.stat().st_size for p in asked.folder.rglob("*")) / 1e9
    print(f"{asked.folder}: {len(card['files'])} files, {size_gb:.1f} GB; copy this checkout with it, then: make gpu")


if __name__ == "__main__":
    main()
