"""The library for GPUs: with the host as GPU, and on a machine with GPUs with these (docs/gpu.md).

On a GPU machine: ``python -m pytest -rs tests/whale_ops/gpu/test_cuda.py``. No TensorFlow and no MPI is needed.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

import whale_ops
from tests.draws import one_of
from tests.host_gpu.build import HostCuda, build_host_cuda
from tests.whale_ops.gpu.cuda_ranks import ROOT, Ranks
from whale.errors import CommError
from whale_ops import device_code, device_library


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


def test_a_transport_that_gpus_do_not_have_is_refused(host: HostCuda) -> None:
    with on_host(host, "ipc", 1).started("short") as (alone,):
        assert "not through 'ipc'" in alone.communicate(timeout=60)[0]


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
