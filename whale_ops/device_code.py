"""Compiles Whale's GPU kernels (gpu/kernels.cu) for one GPU at run time by NVRTC, without nvcc or CUDA's headers.

NVRTC is the compiler library that ``tensorflow[and-cuda]`` installs as the package ``nvidia-cuda-nvrtc-cu12``. It is
looked for among the libraries that this process has loaded, in NVIDIA's packages of this environment, and on the
dynamic loader's path.

Decision: 0135.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whale.errors import CommError

FOLDER = Path(__file__).absolute().parent / "gpu"
SOURCE, HEADER = FOLDER / "kernels.cu", FOLDER / "kernel_arguments.h"
_MAJORS = (13, 12)  # of the libraries that the loader is asked for
_LIBRARY = re.compile(r"libnvrtc\.so(\.\d+)*")


@dataclass(frozen=True)
class Nvrtc:
    """Describes an NVRTC library.

    Attributes:
        path: its path or name.
        version: e.g. (12, 9).
        architectures: compute capabilities times ten for which it generates machine code: 75, 80, ..., 120.
    """

    path: str
    version: tuple[int, int]
    architectures: tuple[int, ...]

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"

    def find_target(self, architecture: int) -> str | None:
        """Returns the architecture to compile for: "sm_86", or "compute_90" for a newer GPU; None if the GPU is too
        old.

        Machine code (sm) runs on later minor versions of its major architecture. For a newer major version, PTX
        (compute) is generated, which the driver compiles.

        Args:
            architecture: the GPU's compute capability times ten.
        """
        older = [known for known in self.architectures if known <= architecture]
        if not older:
            return None
        return f"{'sm' if max(older) // 10 == architecture // 10 else 'compute'}_{max(older)}"


def open_nvrtc(path: str) -> Nvrtc | None:
    """Opens the NVRTC with a path or library name; None if it does not exist or does not load."""
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) != 0:
        return None
    if library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) != 0:
        return None
    architectures = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(architectures)
    return Nvrtc(path, (major.value, minor.value), tuple(architectures))


def find_nvrtcs() -> Iterator[Nvrtc]:
    """Yields the NVRTC libraries that exist: loaded by this process, then in this environment's packages, then the
    loader's.
    """
    seen = set()
    for path in (*_list_loaded(), *_list_packaged(), *(f"libnvrtc.so.{major}" for major in _MAJORS)):
        found = open_nvrtc(path)
        if found is not None and found.version not in seen:
            seen.add(found.version)
            yield found


def _list_loaded() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libnvrtc.so" in line}
    return sorted(path for path in paths if _LIBRARY.fullmatch(Path(path).name))


def find_package_folders(name: str) -> list[Path]:
    """Returns the folders that match a name or pattern (``cuda_nvrtc/lib``) in NVIDIA's packages of this
    environment.
    """
    found = importlib.util.find_spec("nvidia")
    roots = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    return [folder for root in roots for folder in sorted(root.glob(name)) if folder.is_dir()]


def _list_packaged() -> list[str]:
    files = [file for folder in find_package_folders("*/lib") for file in sorted(folder.glob("libnvrtc.so*"))]
    return [str(file) for file in files if _LIBRARY.fullmatch(file.name)]


def choose(found: Sequence[Nvrtc], architecture: int, driver: int | None = None) -> Nvrtc:
    """Returns the first NVRTC whose code runs on a GPU; those that generate machine code are preferred to those with
    PTX.

    Args:
        found: the libraries to choose from.
        architecture: the GPU's compute capability times ten (86 for 8.6).
        driver: major number of the newest CUDA version that the driver supports; None: not checked.

    Raises:
        CommError: none fits.
    """
    fitting = [one for one in found if driver is None or one.version[0] <= driver]
    for kind in ("sm", "compute"):
        for one in fitting:
            if (one.find_target(architecture) or "").startswith(kind):
                return one
    # 12.9 is the last one that knows capabilities before 7.5.
    package = "nvidia-cuda-nvrtc-cu12==12.9.*" if driver in (None, 12) or architecture < 75 else "nvidia-cuda-nvrtc"
    raise CommError(
        "no compiler for the kernels of this GPU was found",
        given=", ".join(map(str, found)) or "no libnvrtc.so, loaded, in NVIDIA's packages, or on the loader's path",
        expected=f"NVRTC that knows compute capability {architecture // 10}.{architecture % 10}"
        + ("" if driver is None else f", of CUDA {driver} or older, as the driver"),
        action=f"pip install '{package}' (tensorflow[and-cuda] brings one)",
    )


def compute_source_digest() -> str:
    """Returns a digest of the kernels' sources, by which compiled code is cached."""
    return hashlib.sha256(SOURCE.read_bytes() + HEADER.read_bytes()).hexdigest()[:16]


def compile_kernels(nvrtc: Nvrtc, architecture: int) -> bytes:
    """Compiles the kernels to machine code of a GPU, or to PTX (zero-terminated) if `Nvrtc.find_target` is
    "compute_...".

    Raises:
        CommError: they do not compile; the error contains the compiler's log.
    """
    library, program, size = ctypes.CDLL(nvrtc.path), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    target = nvrtc.find_target(architecture)
    options = [f"--gpu-architecture={target}".encode(), b"--std=c++17"]

    def check(code: int, call: str) -> None:
        if code == 0:
            return
        log = b""
        if program and library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0:
            text = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, text)
            log = text.value
        raise CommError(
            "the kernels for GPUs do not compile",
            given=f"{nvrtc}, {b' '.join(options).decode()}",
            expected=f"{call} without an error",
            compiler=f"{library.nvrtcGetErrorString(code).decode()}\n{log.decode()[-2000:].strip()}",
            action="read the compiler's first error; another version: pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'",
        )

    header = (ctypes.c_char_p * 1)(HEADER.read_bytes())
    name = (ctypes.c_char_p * 1)(b"whale_ops/gpu/kernel_arguments.h")
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), SOURCE.read_bytes(), b"whale_ops/gpu/kernels.cu", 1, header, name
    )
    check(created, "nvrtcCreateProgram")
    try:
        given = (ctypes.c_char_p * len(options))(*options)
        check(library.nvrtcCompileProgram(program, len(options), given), "nvrtcCompileProgram")
        kind = "PTX" if str(target).startswith("compute") else "CUBIN"
        check(getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)), f"nvrtcGet{kind}Size")
        code = ctypes.create_string_buffer(size.value)
        check(getattr(library, f"nvrtcGet{kind}")(program, code), f"nvrtcGet{kind}")
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
