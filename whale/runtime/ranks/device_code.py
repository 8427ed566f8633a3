"""Compiles the kernels for a rank's GPU when a run first has that kind of GPU, and keeps the machine code."""

from __future__ import annotations

from pathlib import Path

from whale.errors import CommError
from whale.log import log
from whale.runtime.ranks.cache_files import CacheFolder, DamagedFileError
from whale_ops import device_code, device_library, gpu_driver


def load_kernels(library: Path, ordinal: int, folder: Path | None) -> None:
    """Loads the kernels onto a GPU.

    Args:
      library: the library for GPUs.
      folder: where machine code is kept; None: nowhere.

    Raises:
      CommError: the GPU cannot be asked, no compiler for it is found, or the driver refuses what it has made.
    """
    architecture = device_library.find_architecture(library, ordinal)
    driver = gpu_driver.look()
    newest = driver.cuda[0] if driver is not None and not driver.failure else None
    nvrtc = device_code.choose([*device_code.find_nvrtcs()], architecture, newest)
    device_library.load_kernels(library, ordinal, load_code(nvrtc, architecture, folder))


def load_code(nvrtc: device_code.Nvrtc, architecture: int, folder: Path | None) -> bytes:
    """Returns machine code for GPUs of an architecture: kept from the same sources and compiler, or compiled now."""
    files = None if folder is None else CacheFolder(folder)
    version = ".".join(map(str, nvrtc.version))
    name = f"{nvrtc.find_target(architecture)}-nvrtc-{version}-{device_code.compute_source_digest()}.kernels"
    try:
        if files is not None and (kept := files.get(name)) is not None:
            return kept
    except DamagedFileError:
        log.warning("the GPU kernels that were kept are damaged, and are compiled anew")
    except OSError:
        pass  # writing says why
    code = device_code.compile_kernels(nvrtc, architecture)
    try:
        if files is not None:
            files.put(name, code)
    except OSError as error:
        log.warning(f"GPU kernels are not kept for later runs ({error}); plan_cache names another folder")
    return code


def find_missing(library: Path, backend: str, ordinal: int, folder: Path | None) -> str:
    """Prepares a GPU for a backend. Returns what is missing for it; "" is nothing."""
    try:
        if backend == "nccl":
            device_library.load_nccl()
        if backend != "pinned":  # which only copies
            load_kernels(library, ordinal, folder)
    except CommError as error:
        return " ".join(str(error).split())
    return ""
