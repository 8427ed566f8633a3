"""Programs on GPUs, and the same on GPUs that are the host's (tests/host_gpu).

On GPUs: only where there is a GPU, and for NCCL one for each rank.

pip install nvidia-nccl-cu12
python -m pytest -rs tests/whale_ops/gpu/test_cuda.py tests/distributed/test_gpu.py
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.against_one_device import check_processes
from tests.gpu import variables_of
from tests.host_gpu.build import HostGpu, build_host_cuda, build_plugin
from tests.launcher.helpers import ROOT, Launcher
from tests.oracle.pool import Pool
from whale_ops import build, device_library

ON_HOST_GPUS = str(ROOT / "tests/host_gpu/on_host_gpus.py")


@dataclass(frozen=True)
class Run:
    """A case of the zoo on ranks (see case_on_ranks.py)."""

    case: str
    optimizer: str
    shares: str
    scope: str = "replica"
    micro_batches: int = 1

    @property
    def size(self) -> int:
        return len(self.shares.split(","))

    def check(self, launcher: Launcher, pool: Pool, folder: Path, backend: str, under: Sequence[str] = ()) -> str:
        """Computes what one device does; what the run said."""
        launcher.environment["WHALE_COMMUNICATION_BACKEND"] = backend
        launcher.environment["WHALE_PIPELINE_MICRO_BATCHES"] = str(self.micro_batches)
        launcher.environment["COLUMNS"] = "200"  # keys are in one piece
        what = self.case, self.optimizer, self.shares, self.scope
        said = check_processes(launcher, pool, folder, *what, under=("-v", *under), timeout_s=300)
        if backend != "whale":
            assert re.search(r"\bdevice/\w+", said), f"the devices have started nothing: {said}"
        return said


RUNS = {
    "unequal": Run("mlp_metrics", "sgd", "5,3"),
    "convolutions": Run("convnet", "adam", "4,4"),
    "session without rows": Run("tf1_mlp", "adam", "8,0"),
    "zero 1": Run("tf1_mlp", "adam", "2,6", "zero:1"),
    "zero 3": Run("mlp", "adam", "5,3", "zero:3"),
    "stages": Run("tf1_mlp", "adam", "even,even", "stage:2", micro_batches=2),
    "groups": Run("convnet", "adam", "even,even,even,even", "split:2"),
    "replicas of stages": Run("tf1_mlp", "adam", "even,even,even,even", "stage:2", micro_batches=2),
}


@pytest.fixture(scope="module")
def gpus() -> int:
    """Returns the number of GPUs."""
    import tensorflow as tf

    found = len(tf.config.list_physical_devices("GPU"))  # takes none of their memory
    if found == 0:
        pytest.skip("TensorFlow sees no GPU here: no program has run with GPUs that communicate")
    return found


@pytest.mark.parametrize("backend", ["cuda-ipc", "nccl", "pinned", "whale"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_what_gpus_exchange_is_what_one_device_computes(
    launcher: Launcher, pool: Pool, tmp_path: Path, gpus: int, backend: str, run: Run
) -> None:
    if backend == "nccl" and gpus < run.size:
        pytest.skip(f"NCCL wants a GPU for each rank, and there is {gpus}")
    if backend == "nccl" and device_library.find_nccl() is None:
        pytest.skip("no NCCL here: pip install nvidia-nccl-cu12")
    # Ranks of other tests of this folder see no GPU.
    del launcher.environment["CUDA_VISIBLE_DEVICES"]
    launcher.environment |= {k: v for k, v in os.environ.items() if k == "CUDA_VISIBLE_DEVICES"} | variables_of(backend)
    run.check(launcher, pool, tmp_path, backend)


@pytest.fixture
def on_host_gpus(launcher: Launcher) -> Launcher:
    """Ranks of the launcher have two GPUs that are the host's, unequal ones."""
    if shutil.which(build.find_compiler_command()[0]) is None:
        pytest.skip("no C++ compiler: the host's GPUs are not compiled here")
    build_plugin()
    del launcher.environment["CUDA_VISIBLE_DEVICES"]
    launcher.environment |= build_host_cuda().variables(HostGpu(1 << 30, name="A"), HostGpu(600 << 20, 2.0, name="B"))
    return launcher


# Each takes some seconds.
SHORT = {("zero 3", "cuda-ipc"), ("stages", "pinned")}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=() if (name, backend) in SHORT else pytest.mark.long)
        for name in RUNS
        for backend in ("cuda-ipc", "pinned", "nccl", "whale")
    ],
)
def test_what_gpus_of_the_host_compute_is_what_one_device_computes(
    on_host_gpus: Launcher, pool: Pool, tmp_path: Path, name: str, backend: str
) -> None:
    """With "pinned" every second rank has no GPU.

    But for groups: copies that a GPU and a processor update each by itself are compared bit by bit, and Adam's differ.
    """
    if backend == "nccl":  # a GPU for each rank, with room for what NCCL is predicted to take
        gpus = [HostGpu(2 << 30, 1.0 + rank, name=f"GPU {rank}") for rank in range(4)]
        on_host_gpus.environment |= build_host_cuda().variables(*gpus)
    without = "1,3" if backend == "pinned" and name != "groups" else "none"
    said = RUNS[name].check(on_host_gpus, pool, tmp_path, backend, (ON_HOST_GPUS, without))
    assert ("ranks without a GPU compute on their processors: 1" in said) == (without != "none")
