"""The kernels for GPUs: as host code against NumPy, and as what NVRTC makes of them for each kind of GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.host_gpu.build import ROOT, build_host_cuda
from whale.errors import CommError
from whale_ops import device_code, device_library
from whale_ops.device_code import Nvrtc

# V100, A100 and H100; every other one takes seconds more, and differs in what the compiler makes of the same code.
SHORT, LONG = (70, 90), (60, 75, 80, 86, 89, 100, 120)
OLD = Nvrtc("libnvrtc.so.12", (12, 5), (50, 60, 70, 75, 80, 86, 87, 89, 90))
NEW = Nvrtc("libnvrtc.so.13", (13, 0), (75, 80, 86, 89, 90, 100, 120))


def test_kernels_compute_what_numpy_does() -> None:
    """Through the library, whose driver is the stand-in: pieces and launches are those of GPUs."""
    host = build_host_cuda()
    command = [sys.executable, "-m", "tests.whale_ops.gpu.cuda_kernels", str(device_library.PATH), str(host.image)]
    variables = {**os.environ, **host.variables()}
    done = subprocess.run([*command, "short"], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout == "156 results: all right\n", done.stdout + done.stderr


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    """The newest NVRTC of CUDA 12, which knows every architecture of the tests."""
    for found in device_code.find_nvrtcs():
        if {*SHORT, *LONG} <= {*found.architectures}:
            return found
    pytest.skip("no NVRTC of CUDA 12.9 here: pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'")


@pytest.mark.parametrize("architecture", [*SHORT, *(pytest.param(one, marks=pytest.mark.long) for one in LONG)])
def test_kernels_compile_for_every_gpu(nvrtc: Nvrtc, architecture: int) -> None:
    code = device_code.compile_kernels(nvrtc, architecture)
    assert code.startswith(b"\x7fELF"), "machine code, which no driver compiles again"
    source = (ROOT / "whale_ops/gpu/kernels.cc").read_text()
    assert re.search(r'packs \? "pack_" : "unpack_"', source)
    kinds = ["pack_float32_bfloat16", "unpack_float16_float16", "reduce_prod_float64", "reduce_max_bfloat16"]
    assert all(f"\0{kind}\0".encode() in code or f".text.{kind}\0".encode() in code for kind in kinds)


def test_a_source_with_a_fault_is_told_with_what_the_compiler_says(
    nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "kernels.cu"
    broken.write_text("extern float x = unknown;")
    monkeypatch.setattr(device_code, "SOURCE", broken)
    with pytest.raises(CommError, match=r'(?s)NVRTC 12.*compute_52|identifier "unknown" is undefined'):
        device_code.compile_kernels(nvrtc, 80)


def test_a_gpu_gets_machine_code_of_its_kind_or_of_one_before_it() -> None:
    assert [OLD.find_target(one) for one in (70, 86, 90, 100, 121)] == [
        "sm_70",
        "sm_86",
        "sm_90",
        "compute_90",
        "compute_90",
    ]
    assert [NEW.find_target(one) for one in (60, 70, 88, 103, 121)] == [None, None, "sm_86", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("found", "architecture", "driver", "chosen"),
    [
        ([OLD, NEW], 90, 13, OLD),  # the one that the process has loaded already
        ([NEW, OLD], 90, 12, OLD),  # the driver knows nothing of CUDA 13
        ([NEW, OLD], 70, 13, OLD),  # CUDA 13 has given up the V100
        ([OLD, NEW], 120, 13, NEW),  # machine code before what the driver compiles
        ([OLD], 120, 12, OLD),
    ],
)
def test_the_compiler_that_is_chosen_knows_the_gpu_and_the_driver(
    found: list[Nvrtc], architecture: int, driver: int, chosen: Nvrtc
) -> None:
    assert device_code.choose(found, architecture, driver) == chosen


@pytest.mark.parametrize(
    ("found", "architecture", "driver", "said"),
    [
        ([], 90, 12, ["no libnvrtc.so", "capability 9.0", "pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'"]),
        ([NEW], 90, 12, ["NVRTC 13.0 (libnvrtc.so.13)", "of CUDA 12 or older"]),
        ([NEW], 70, 13, ["capability 7.0", "12.9"]),
        ([], 90, 13, ["pip install 'nvidia-cuda-nvrtc'"]),
    ],
)
def test_without_a_compiler_that_fits_it_says_what_to_install(
    found: list[Nvrtc], architecture: int, driver: int, said: list[str]
) -> None:
    with pytest.raises(CommError) as refused:
        device_code.choose(found, architecture, driver)
    assert all(part in str(refused.value) for part in said), refused.value
