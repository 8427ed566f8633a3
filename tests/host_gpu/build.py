"""Compiles the host's GPUs, once for the same sources: into build/host_gpu of the checkout."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from whale_ops import build

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/host_gpu"
_BUILT = ROOT / "build/host_gpu"
_FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-pthread", f"-I{ROOT}")
_DRIVER, _IMAGE, _NCCL = "libcuda.so.1", "image", "libnccl.so.2"
_MANAGEMENT = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class HostGpu:
    """A GPU that is the host's.

    Attributes:
        memory_bytes: all that it has; an allocation beyond it fails.
        slowness: its kernels take so many times as long as on the host.
        late_us: a kernel takes up to so much longer, and what else is queued on its streams waits as long.
        name: what its driver calls it.
        used_bytes: of its memory, by programs of others.
    """

    memory_bytes: int = 1 << 30
    slowness: float = 1.0
    late_us: int = 200
    name: str = "NVIDIA Something"
    used_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.memory_bytes}:{self.slowness:g}:{self.late_us}:{self.name}:{self.used_bytes}"


@dataclass(frozen=True, slots=True)
class HostCuda:
    """A folder with libcuda.so.1 and libnvidia-ml.so.1, a file with what the driver takes for the kernels' machine
    code, and NCCL on it.
    """

    folder: Path
    image: Path
    nccl: Path

    @property
    def driver(self) -> Path:
        return self.folder / _DRIVER

    def variables(self, *gpus: HostGpu) -> dict[str, str]:
        """Returns variables under which a process's driver finds these GPUs, or one of 8 GiB."""
        found = gpus or (HostGpu(8 << 30, late_us=60),)
        return {
            "LD_LIBRARY_PATH": f"{self.folder}:{self.nccl.parent}",
            "HOST_GPUS": ",".join(map(str, found)),
            # What NCCL would take of a GPU's memory is counted, and tests have small ones.
            "NCCL_MAX_NCHANNELS": "1",
            "NCCL_BUFFSIZE": "65536",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(found)))),  # other tests of a process hide all GPUs
        }


@functools.cache
def build_host_cuda() -> HostCuda:
    """Compiles the driver, the kernels and NCCL."""
    driver = build_driver()
    folder = driver.parent
    if not (folder / _MANAGEMENT).exists():
        with contextlib.suppress(FileExistsError):  # another test has just made it
            (folder / _MANAGEMENT).symlink_to(_DRIVER)
    core = (f"-L{build.IN_PLACE}", f"-l:{build.CORE_NAME}", f"-Wl,-rpath,{build.IN_PLACE}")
    headers = [*build.list_core_headers(), *sorted((ROOT / "whale_ops/gpu").glob("kernel*"))]
    kernels = _build("libhost_kernels.so", ["kernels.cc"], core, headers)
    image = kernels.with_name(_IMAGE)
    if not image.exists():
        image.write_bytes(f"HOST:{kernels}".encode() + b"\0")
    on_streams = (*core, str(driver), f"-Wl,-rpath,{folder},-soname,{_NCCL}")
    nccl = _build(_NCCL, ["nccl.cc"], on_streams, [*build.list_core_headers(), FOLDER / "streams.h"])
    return HostCuda(folder, image, nccl)


@functools.cache
def build_driver() -> Path:
    """Compiles the driver; the library's path."""
    return _build(_DRIVER, ["streams.cc", "driver.cc"], ("-ldl", f"-Wl,-soname,{_DRIVER}"), [FOLDER / "streams.h"])


@functools.cache
def build_driver_by_path() -> Path:
    """Compiles the driver without a name by which other libraries of the process find it: NVRTC would call what it has
    not.
    """
    return _build("libhost_driver.so", ["streams.cc", "driver.cc"], ("-ldl",), [FOLDER / "streams.h"])


@functools.cache
def build_plugin() -> Path:
    """Compiles TensorFlow's devices; the library's path."""
    version = build.find_tensorflow_version()
    folder, library = build.find_tensorflow().folder, build.FRAMEWORK_LIBRARY
    cuda = build_driver()
    flags = (
        "-D_GLIBCXX_USE_CXX11_ABI=1",
        "-DEIGEN_MAX_ALIGN_BYTES=64",
        f"-isystem{folder / 'include'}",
        *(f"-L{folder}", f"-l:{library}", str(cuda), f"-Wl,-rpath,{cuda.parent}", "-Wl,--no-undefined"),
    )
    name = f"libhost_gpu.{build.find_minor_version(version)}.so"
    return _build(name, ["plugin.cc", "late_kernels.cc", "cudnn_rnn.cc"], flags, sorted(FOLDER.glob("*.h")))


def list_kernels() -> Path:
    """Returns the list of kernels for GPUs of this environment's TensorFlow, or of the next one that has a list."""
    minor = build.find_minor_version(build.find_tensorflow_version())
    lists = sorted(FOLDER.glob("kernels-*.txt"), key=lambda path: [*map(int, path.stem.partition("-")[2].split("."))])
    return next((one for one in lists if one.stem == f"kernels-{minor}"), lists[-1])


def _build(name: str, sources: Sequence[str], flags: Sequence[str], headers: Iterable[Path]) -> Path:
    """Compiles a library in a folder that is named by all that it is made of."""
    compiler = build.find_compiler()
    paths = [FOLDER / source for source in sources]
    texts = [repr((build.read_compiler_version(compiler), _FLAGS, flags)).encode()]
    digest = hashlib.sha256(b"\0".join([*texts, *(path.read_bytes() for path in [*paths, *headers])])).hexdigest()[:16]
    folder = _BUILT / f"{name}-{digest}"
    if not (folder / name).exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        with open(_BUILT / f"{name}.lock", "w") as lock:  # another test may build it at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / name).exists():
                for stale in _BUILT.glob(f"{name}-*"):
                    shutil.rmtree(stale)
                folder.mkdir()
                new = folder / f"{name}.new"
                # Libraries come behind what uses them.
                subprocess.run([*compiler, *_FLAGS, *map(str, paths), *flags, "-o", str(new)], check=True)
                new.replace(folder / name)
    return folder / name
