"""Prepares the library for GPUs, libwhale_cuda.so (``gpu/``), at run time: loads NCCL, and the GPU kernels' code.

The library is built with the others (build.py) by the C++ compiler alone; it loads NVIDIA's driver when it is first
asked for a GPU. Its kernels are compiled for the GPU of this machine (device_code.py).
"""

from __future__ import annotations

import ctypes
import os

from whale.errors import CommError
from whale_ops import build
from whale_ops.device_code import find_package_folders

PATH = build.IN_PLACE / build.CUDA_NAME
_NCCL = "libnccl.so.2"


def find_nccl() -> str | None:
    """Returns the path of NCCL in NVIDIA's packages of this environment, or its name if the loader finds it, or
    None.
    """
    for folder in find_package_folders("nccl/lib"):
        if (folder / _NCCL).exists():
            return str(folder / _NCCL)
    try:
        ctypes.CDLL(_NCCL)
    except OSError:
        return None
    return _NCCL


def load_nccl() -> None:
    """Loads NCCL into this process, where libwhale_cuda.so then finds it.

    Raises:
        CommError: there is none, or it does not load.
    """
    found, reason = find_nccl(), f"no {_NCCL} in NVIDIA's packages, or on the loader's path"
    if found is not None:
        try:
            ctypes.CDLL(found, ctypes.RTLD_GLOBAL)
            return
        except OSError as error:
            reason = str(error)
    raise CommError(
        "NCCL was not found",
        given=reason,
        expected="NCCL 2.14 or newer, for the driver's CUDA",
        action="pip install nvidia-nccl-cu12 (nvidia-nccl-cu13 for CUDA 13)",
    )


def find_architecture(library: str | os.PathLike[str], ordinal: int) -> int:
    """Returns a GPU's compute capability times ten, e.g. 90 for an H100.

    Args:
        library: path of libwhale_cuda.so.
        ordinal: number of the GPU.

    Raises:
        CommError: the library does not load, or there is no such GPU.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    loaded = _load_library(library)
    _check(loaded, loaded.whale_cuda_capability(ordinal, ctypes.byref(major), ctypes.byref(minor)))
    return 10 * major.value + minor.value


def load_kernels(library: str | os.PathLike[str], ordinal: int, image: bytes) -> None:
    """Loads the compiled kernels (`device_code.compile_kernels`) into a GPU, once per process.

    Raises:
        CommError: the driver refuses them.
    """
    loaded = _load_library(library)
    _check(loaded, loaded.whale_cuda_load_kernels(ordinal, image))


def _load_library(library: str | os.PathLike[str]) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise CommError(
            "the library for GPUs does not load",
            given=str(error),
            expected=build.CUDA_NAME,
            action="run python -m whale_ops.build",
        ) from error
    loaded.whale_cuda_last_error.restype = ctypes.c_char_p
    return loaded


def _check(library: ctypes.CDLL, code: int) -> None:
    if code != 0:
        raise CommError(
            "a GPU cannot be used for exchanges",
            given=library.whale_cuda_last_error().decode(errors="replace"),
            expected="an NVIDIA driver of version 525 or newer, and a GPU of compute capability 6.0 or newer",
            action="see what `nvidia-smi` and `whale doctor` say",
        )
