"""The library for GPUs: with the host as GPU, and on a machine with GPUs with these (docs/gpu.md).

On a GPU machine: ``python -m pytest -rs tests/whale_ops/gpu/test_cuda.py``. No TensorFlow and no MPI is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import whale_ops
from tests.draws import one_of
from tests.host_gpu.build import HostCuda, build_host_cuda
from whale.errors import CommError
from whale_ops import device_code, device_library

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Ranks:
    """Processes of cuda_rank.py: with what, and where."""

    library: Path
    image: Path
    transport: str
    size: int
    gpus: int = 1
    variables: Sequence[Mapping[str, str]] = ()  # of each rank
    under: Sequence[str] = ()  # what runs it: compute-sanitizer

    @contextlib.contextmanager
    def started(self, mode: str = "", most_s: float = 30.0) -> Iterator[list[subprocess.Popen[str]]]:
        """The processes, which do not outlive the scope."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(self.size)]
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank, (_, theirs) in enumerate(pairs):
                worker = [sys.executable, "-m", "tests.whale_ops.gpu.cuda_rank"]
                numbers = [str(n) for n in (rank, self.size, rank % self.gpus, theirs.fileno())]
                process = subprocess.Popen(
                    [*self.under, *worker, str(self.library), str(self.image), self.transport, *numbers, mode],
                    cwd=ROOT,
                    env={**os.environ, **(self.variables[rank] if self.variables else {})},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    pass_fds=[theirs.fileno()],
                )
                processes.append(process)
                theirs.close()
            threading.Thread(target=relay, args=([ours for ours, _ in pairs], most_s), daemon=True).start()
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def run(self, mode: str = "", limit_s: float = 300.0) -> list[str]:
        """Returns what the ranks print."""
        with self.started(mode) as processes:
            return [process.communicate(timeout=limit_s)[0] for process in processes]

    def check(self) -> None:
        """Every kind of exchange is right on all of them."""
        assert self.run() == [f"rank {rank}: all right\n" for rank in range(self.size)]


def relay(ends: list[socket.socket], most_s: float) -> None:
    """Sends every rank what all ranks have sent, in rank order, until one of them is gone, or silent while others wait.

    Whale's own exchange takes this place in a run: it ends waiting as soon as it misses a rank.
    """
    with contextlib.suppress(OSError):
        while True:
            parts = []
            for end in ends:
                end.settimeout(most_s if parts else None)
                part = end.recv(1 << 16)  # ranks send small things, and wait for the answer
                if not part:
                    break
                parts.append(part)
            if len(parts) < len(ends):
                break
            for end in ends:
                end.sendall(b"".join(parts))
    for end in ends:
        end.close()


@pytest.fixture(scope="module")
def host() -> HostCuda:
    return build_host_cuda()


@pytest.fixture(scope="module")
def gpus() -> int:
    """Returns the number of GPUs."""
    count = ctypes.c_int(0)
    if ctypes.CDLL(str(device_library.PATH)).whale_cuda_devices(ctypes.byref(count)) != 0 or count.value == 0:
        pytest.skip("no GPU here: kernels and transports ran with the host as GPU only")
    return count.value


@pytest.fixture(scope="module")
def image(gpus: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture = device_library.find_architecture(device_library.PATH, 0)
    code = device_code.compile_kernels(device_code.choose([*device_code.find_nvrtcs()], architecture), architecture)
    path = tmp_path_factory.mktemp("code") / "kernels"
    path.write_bytes(code)
    return path


def on_host(host: HostCuda, transport: str, size: int) -> Ranks:
    return Ranks(device_library.PATH, host.image, transport, size, variables=[host.variables()] * size)


def test_the_core_loads_it() -> None:
    count = ctypes.c_int(0)
    if ctypes.CDLL(str(device_library.PATH)).whale_cuda_devices(ctypes.byref(count)) == 0:
        assert whale_ops.count_devices(device_library.PATH) == count.value
    else:
        with pytest.raises(CommError, match=r"NVIDIA's driver was not found: libcuda.so.1|cuInit failed"):
            whale_ops.count_devices(device_library.PATH)


@pytest.mark.parametrize("size", one_of(3, [2, 1, 3]))
def test_ranks_exchange_through_memory_that_all_have_mapped(host: HostCuda, size: int) -> None:
    on_host(host, "cuda-ipc", size).check()


def test_a_rank_that_is_gone_is_an_error_on_the_others(host: HostCuda) -> None:
    with on_host(host, "cuda-ipc", 2).started("lost") as (first, second):
        assert second.stdout is not None and "ready" in second.stdout.readline()
        second.kill()
        assert "could not meet" in first.communicate(timeout=60)[0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_share_a_gpu_exchange_through_its_memory(gpus: int, image: Path, size: int) -> None:
    Ranks(device_library.PATH, image, "cuda-ipc", size).check()


def test_ranks_with_a_gpu_each_exchange_through_nccl(gpus: int, image: Path) -> None:
    if device_library.find_nccl() is None:
        pytest.skip("no NCCL here: pip install nvidia-nccl-cu12")
    Ranks(device_library.PATH, image, "nccl", min(gpus, 4), gpus).check()


def test_without_a_driver_it_says_what_to_do() -> None:
    command = "from whale_ops import device_library as d; print(d.find_architecture(d.PATH, 0))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        pytest.skip("there is a GPU here")
    assert "CommError" in done.stderr and "nvidia-smi" in done.stderr
