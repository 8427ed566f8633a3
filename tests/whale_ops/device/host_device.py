"""Compiles the device whose memory is the host's."""

from __future__ import annotations

import subprocess
from pathlib import Path

from whale_ops import build

ROOT = Path(__file__).resolve().parents[3]


def build_host_device(folder: Path) -> Path:
    """Compiles host_device.cc; the library's path."""
    output = folder / "libhost_device.so"
    digest = f'-DWHALE_CORE_DIGEST="{build.core_digest()}"'
    flags = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", digest, f"-I{ROOT}"]
    core = [f"-L{build.IN_PLACE}", f"-l:{build.CORE_NAME}", f"-Wl,-rpath,{build.IN_PLACE}"]
    source = ROOT / "tests/whale_ops/device/host_device.cc"
    subprocess.run([*build.find_compiler(), *flags, str(source), "-o", str(output), *core], check=True)
    return output
