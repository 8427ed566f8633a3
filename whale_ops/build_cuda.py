"""Compiles the CUDA library: ``python -m whale_ops.build_cuda``, or ``build(folder)``.

libwhale_cuda.so has kernels that pack, scale, cast and add, and exchanges of device memory through NCCL or CUDA IPC
(whale_ops/cuda). The core loads it when communication.backend asks for it: see docs/gpu.md. The compiler is $NVCC,
nvcc on PATH, or that of the packages ``nvidia-cuda-nvcc`` and ``nvidia-cuda-cccl`` of this environment; NCCL is its
package ``nvidia-nccl-cu12`` (or -cu13), and without it the library has CUDA IPC only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from whale.errors import CommError
from whale_ops.build import IN_PLACE, PACKAGE, compiler_command, core_digest

NAME = "libwhale_cuda.so"
_NCCL = "libnccl.so.2"
# Machine code for the A100, and what the driver makes machine code of for every later GPU.
_FLAGS = ["-std=c++17", "-O3", "-shared", "-gencode", "arch=compute_80,code=[sm_80,compute_80]"]
_HOST_FLAGS = "-fPIC,-fvisibility=hidden,-Wall"


def find_nvcc() -> str | None:
    """The CUDA compiler, or None."""
    packaged = [folder / "bin" / "nvcc" for folder in _package("cu13")]
    names = [os.environ["NVCC"]] if "NVCC" in os.environ else ["nvcc", *map(str, packaged)]
    return next(filter(None, map(shutil.which, names)), None)


def _package(name: str) -> list[Path]:
    """Folders of one of NVIDIA's packages in this environment."""
    found = importlib.util.find_spec(f"nvidia.{name}") if importlib.util.find_spec("nvidia") else None
    return [Path(folder) for folder in found.submodule_search_locations or ()] if found else []


def _nccl() -> Path | None:
    return next((folder for folder in _package("nccl") if (folder / "include" / "nccl.h").exists()), None)


def fits(library: Path) -> bool:
    """Whether a library is there, built from these sources."""
    return library.exists() and core_digest().encode() in library.read_bytes()


def has_nccl(library: Path) -> bool:
    """Whether a library of the device was built with NCCL."""
    return b"libnccl.so" in library.read_bytes()


def load_nccl() -> None:
    """Loads this environment's NCCL, if it has one: a library that was built in another one finds it then."""
    if (folder := _nccl()) is not None:
        ctypes.CDLL(str(folder / "lib" / _NCCL), ctypes.RTLD_GLOBAL)


def has_compilers() -> bool:
    """Whether the library can be built here."""
    return find_nvcc() is not None and shutil.which(compiler_command()[0]) is not None


def build(output_dir: str | os.PathLike[str] = IN_PLACE) -> Path:
    """Compiles the library into `output_dir`; returns its path.

    Raises:
        CommError: no nvcc, or the compiler's error.
    """
    nvcc, nccl = find_nvcc(), _nccl()
    if nvcc is None:
        raise CommError(
            "no CUDA compiler was found",
            given=os.environ.get("NVCC", "no nvcc on PATH"),
            expected="nvcc of CUDA 12 or newer",
            action="pip install nvidia-cuda-nvcc nvidia-cuda-cccl, install the CUDA toolkit, or name its nvcc by $NVCC",
        )
    output = Path(output_dir) / NAME
    output.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(path for path in (PACKAGE / "cuda").rglob("*") if path.suffix in (".cu", ".cc"))
    command = [nvcc, *_FLAGS, "-Xcompiler", _HOST_FLAGS, f'-DWHALE_CORE_DIGEST="{core_digest()}"', "--threads", "2"]
    command += ["-Xcompiler", f"-iquote,{PACKAGE.parent}"]
    command += ["-o", str(output), *map(str, sources)]
    if nccl is None:
        print("whale_ops: no NCCL found (the package nvidia-nccl-cu12): built with CUDA IPC only", file=sys.stderr)
    else:
        library = nccl / "lib"
        command += ["-I", str(nccl / "include"), "-L", str(library), f"-l:{_NCCL}"]
        command += ["-Xlinker", f"-rpath={library}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise CommError(
            "the CUDA library does not compile",
            given=" ".join(command),
            expected="exit code 0",
            compiler="\n" + result.stderr.strip(),
            action="read the compiler's first error",
        )
    return output


if __name__ == "__main__":
    try:
        print(f"whale_ops: built {os.path.relpath(build())}")
    except CommError as error:
        sys.exit(f"whale_ops: {error}")
