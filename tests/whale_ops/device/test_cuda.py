"""The CUDA library: it compiles where nvcc is found, and on a machine with a GPU its sums are right (docs/gpu.md).

On a GPU machine: ``python -m pytest -rs tests/whale_ops/device/test_cuda.py``. No TensorFlow and no MPI is needed.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import whale_ops
from whale.errors import CommError
from whale_ops import build, build_cuda

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_cuda.IN_PLACE / build_cuda.NAME
    if build_cuda.has_compilers():
        return build_cuda.build(tmp_path_factory.mktemp("cuda"))
    if build_cuda.fits(built):
        return built  # elsewhere, as of a bundle
    pytest.skip("no nvcc on PATH: the CUDA library is not compiled here")


def devices(library: Path) -> int:
    count = ctypes.c_int(0)
    build_cuda.load_nccl()
    loaded = ctypes.CDLL(str(library))
    return count.value if loaded.whale_cuda_devices(ctypes.byref(count)) == 0 else 0


def relay(ends: list[socket.socket]) -> None:
    """Sends every rank what all ranks have sent, in rank order, until one of them is gone."""
    while True:
        parts = []
        for end in ends:
            part = end.recv(1 << 16)  # ranks send small things, and wait for the answer
            if not part:
                return
            parts.append(part)
        for end in ends:
            end.sendall(b"".join(parts))


def run(library: Path, transport: str, ranks: int, gpus: int, *more: str) -> list[str]:
    """What the ranks print, each a process with a GPU."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(ranks)]
    processes = []
    for rank, (_, theirs) in enumerate(pairs):
        worker = [sys.executable, "-m", "tests.whale_ops.device.cuda_rank", str(library), transport]
        numbers = [str(n) for n in (rank, ranks, rank % gpus, theirs.fileno())]
        process = subprocess.Popen(
            [*worker, *numbers, *more],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[theirs.fileno()],
        )
        processes.append(process)
        theirs.close()
    threading.Thread(target=relay, args=([ours for ours, _ in pairs],), daemon=True).start()
    try:
        return [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def check(library: Path, transport: str, ranks: int, gpus: int) -> None:
    assert run(library, transport, ranks, gpus) == [f"rank {rank}: all right\n" for rank in range(ranks)]


def test_it_compiles_and_loads(library: Path) -> None:
    assert ctypes.CDLL(str(library)).whale_cuda_run


def test_the_core_loads_it(library: Path) -> None:
    if not (build.IN_PLACE / build.CORE_NAME).exists():
        pytest.skip("the core is not built: python -m whale_ops.build")
    found = devices(library)
    if found > 0:
        assert whale_ops.count_devices(library) == found
    else:
        with pytest.raises(CommError, match="cudaGetDeviceCount failed"):  # it has been loaded, and finds no driver
            whale_ops.count_devices(library)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_that_share_a_gpu_exchange_through_its_memory(library: Path, ranks: int) -> None:
    gpus = devices(library)
    if gpus == 0:
        pytest.skip("no GPU here: the kernels and the CUDA IPC transport were compiled and not run")
    check(library, "cuda-ipc", ranks, 1)


def test_ranks_with_a_gpu_each_exchange_through_nccl(library: Path) -> None:
    gpus = devices(library)
    if gpus == 0:
        pytest.skip("no GPU here: the NCCL transport was compiled and not run")
    if not build_cuda.has_nccl(library):
        pytest.skip("the library was built without NCCL: pip install nvidia-nccl-cu12")
    check(library, "nccl", min(gpus, 4), gpus)
