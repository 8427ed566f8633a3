"""Checks GPUs: what the driver reports, how ranks can exchange tensors between them, and what is missing for that."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Iterator
from pathlib import Path

import whale_ops
from whale.doctor.finding import Finding, read_output
from whale.errors import CommError, WhaleError
from whale.ir.plan_text import format_bytes
from whale.launcher.mpirun import find_mpirun
from whale_ops import build, device_code, device_library, gpu_driver

_LEAST_USED_BYTES = 1 << 30  # a desktop on a screen uses less
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def look(driver: gpu_driver.Driver | None) -> Iterator[Finding]:
    """Yields the findings about GPUs; a single one if there are none."""
    yield check_gpus(driver)
    if driver is None or not driver.gpus:
        return
    yield from check_instances(driver)
    yield from check_memory(driver)
    yield check_peers(driver)
    yield check_library(driver)
    yield check_kernels(driver)
    yield check_nccl()
    yield from check_mpi()


def check_gpus(driver: gpu_driver.Driver | None) -> Finding:
    """Reports NVIDIA GPUs and their driver. Whether TensorFlow can use them shows only in a run."""
    listed = shutil.which("nvidia-smi") is not None
    if driver is None and not listed:
        return Finding("GPUs", "none", "no driver of NVIDIA")
    if driver is None or not driver.gpus:
        said = "no libcuda.so.1" if driver is None else driver.failure or "it lists none"
        action = "see what `nvidia-smi` says; a container needs the NVIDIA runtime (docker run --gpus all)"
        return Finding("GPUs", "warning", f"the driver does not answer: {said}", action)
    first = driver.gpus[0]
    more = "" if all((g.name, g.memory_bytes) == (first.name, first.memory_bytes) for g in driver.gpus) else ", others"
    version = read_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if listed else None
    driver_text = f"driver {version.splitlines()[0]}, " if version else ""
    capabilities = ", ".join(sorted({f"{g.capability}.{g.minor}" for g in driver.gpus}))
    text = f"{len(driver.gpus)}: {first.name}, {format_bytes(first.memory_bytes)}{more}, "
    text += f"compute capability {capabilities}; {driver_text}"
    return Finding("GPUs", "ok", f"{text}CUDA up to {driver.cuda[0]}.{driver.cuda[1]}")


def check_instances(driver: gpu_driver.Driver) -> Iterator[Finding]:
    """Reports parts of GPUs (MIG): a process sees only one of them, and only the "pinned" backend works between
    them.
    """
    parts = [gpu.name for gpu in driver.gpus if " MIG " in f"{gpu.name} "]
    if parts:
        action = 'set communication.backend to "pinned" (or "whale") where ranks compute on parts of one GPU'
        text = f"{parts[0]}: parts of one GPU can use neither NCCL nor cuda-ipc between them"
        yield Finding("GPUs' instances (MIG)", "warning", text, action)


def check_memory(driver: gpu_driver.Driver) -> Iterator[Finding]:
    """Reports GPUs on which other programs use memory; steps are planned for the rest."""
    used = [(place, gpu_driver.count_used_bytes(gpu)) for place, gpu in enumerate(driver.gpus)]
    said = [f"{format_bytes(size)} of GPU {place}" for place, size in used if size >= _LEAST_USED_BYTES]
    if said:
        action = "end the programs that `nvidia-smi` lists, or leave these GPUs out (CUDA_VISIBLE_DEVICES)"
        yield Finding("GPUs' memory", "warning", f"other programs use {', '.join(said)}", action)


def check_peers(driver: gpu_driver.Driver) -> Finding:
    """Reports which GPUs can read each other's memory."""
    count = len(driver.gpus)
    if count == 1:
        return Finding("GPUs' peer access", "none", "one GPU: ranks that share it exchange through cuda-ipc")
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    without = [f"{a}-{b}" for a, b in pairs if not (driver.gpus[a].peers[b] and driver.gpus[b].peers[a])]
    if not without:
        return Finding("GPUs' peer access", "ok", "all read each other's memory")
    action = 'use communication.backend "nccl", or "pinned"; in a virtual machine check its PCIe settings (ACS, IOMMU)'
    text = f"none between {', '.join(without)}: they exchange through the host's memory (slow), and cannot use cuda-ipc"
    return Finding("GPUs' peer access", "warning", text, action)


def check_library(driver: gpu_driver.Driver) -> Finding:
    """Checks that the library for exchanges between GPUs is built from the installed sources, and works with this
    driver.
    """
    path = device_library.PATH
    builds = "python -m whale_ops.build"
    if not path.exists():
        text = f"{path.name} is not built, so GPUs exchange through the host's memory"
        return Finding("GPUs' exchanges", "warning", text, f"run {builds}")
    if build.compute_core_digest().encode() not in path.read_bytes():
        return Finding("GPUs' exchanges", "problem", f"{path.name} was built from other sources", f"run {builds}")
    try:
        count = whale_ops.count_devices(path)
    except CommError as error:
        action = "see what `nvidia-smi` says; driver 525 or newer is needed"
        return Finding("GPUs' exchanges", "problem", f"{path.name}: {error.message}", action)
    return Finding("GPUs' exchanges", "ok", f"{path.name}, GPUs: {count}")


def check_kernels(driver: gpu_driver.Driver) -> Finding:
    """Checks that there is an NVRTC that can compile Whale's kernels for each GPU."""
    found, used = [*device_code.find_nvrtcs()], []
    for gpu in driver.gpus:
        try:
            used.append(device_code.choose(found, gpu.architecture, driver.cuda[0]))
        except CommError as error:
            return Finding("GPUs' kernels", "warning", f"{gpu.name}: {error.message}", error.action)
    return Finding("GPUs' kernels", "ok", ", ".join(sorted({str(one) for one in used})))


def check_nccl() -> Finding:
    """Reports the installed NCCL, or that there is none."""
    for name in _NCCL_PACKAGES:
        try:
            return Finding("NCCL", "ok", f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if (found := device_library.find_nccl()) is not None:
        return Finding("NCCL", "ok", found)
    return Finding("NCCL", "warning", "not installed", "pip install nvidia-nccl-cu12")


def check_mpi() -> Iterator[Finding]:
    """Reports whether MPI was built with CUDA support, which Whale does not need."""
    try:
        program = Path(find_mpirun())
    except WhaleError:
        return  # `software.check_mpi` reports this
    info = read_output([str(program.with_name("ompi_info")), "--parsable", "--all"])
    if info is None:
        return
    aware = "mpi_built_with_cuda_support:value:true" in info
    yield Finding(
        "MPI and GPUs", "ok", f"built with{'' if aware else 'out'} CUDA; not needed: MPI is used for host memory only"
    )
