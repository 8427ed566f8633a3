"""Compiles the stand-ins for NVIDIA's driver and for the kernels' machine code: CUDA whose GPU is the host."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from whale_ops import build

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests/whale_ops/gpu/cuda_as_host"


@dataclass(frozen=True)
class HostCuda:
    """A folder with libcuda.so.1, and a file with what it takes for the kernels' machine code."""

    folder: Path
    image: Path

    @property
    def variables(self) -> dict[str, str]:
        """Under these a process has a GPU."""
        return {"LD_LIBRARY_PATH": str(self.folder), "FAKE_GPUS": str(8 << 30)}


def build_driver(folder: Path) -> Path:
    """Compiles driver.cpp; the library's path."""
    output = folder / "libcuda.so.1"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=default", "-Wall"]
    command = [*build.find_compiler(), *flags, str(FOLDER / "driver.cpp"), "-o", str(output), "-ldl"]
    subprocess.run(command, check=True)
    return output


def build_host_cuda(folder: Path) -> HostCuda:
    """Compiles both."""
    build_driver(folder)
    kernels, image = folder / "libhost_kernels.so", folder / "image"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", f"-I{ROOT}"]
    core = [f"-L{build.IN_PLACE}", f"-l:{build.CORE_NAME}", f"-Wl,-rpath,{build.IN_PLACE}"]
    command = [*build.find_compiler(), *flags, str(FOLDER / "kernels.cpp"), "-o", str(kernels), *core]
    subprocess.run(command, check=True)
    image.write_bytes(f"HOST:{kernels}".encode() + b"\0")
    return HostCuda(folder, image)
