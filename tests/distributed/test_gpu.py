"""Programs on GPUs that add up their gradients themselves: only where there is a GPU, nvcc and (for NCCL) two GPUs.

pip install nvidia-nccl-cu12
python -m pytest -rs tests/whale_ops/device/test_cuda.py tests/distributed/test_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.against_one_device import check_backend
from tests.launcher.helpers import Launcher
from tests.oracle.pool import Pool
from whale_ops import build_cuda


@pytest.fixture(scope="module")
def gpus() -> int:
    """How many GPUs there are, with the library built for them."""
    import tensorflow as tf

    found = len(tf.config.list_physical_devices("GPU"))  # takes none of their memory
    if found == 0:
        pytest.skip("TensorFlow sees no GPU here: no program has run with GPUs that communicate")
    if build_cuda.has_compilers():
        build_cuda.build()
    elif not build_cuda.fits(build_cuda.IN_PLACE / build_cuda.NAME):
        pytest.skip("no nvcc on PATH: the CUDA library is not compiled here")
    return found


@pytest.mark.parametrize("backend", ["cuda-ipc", "nccl", "pinned"])
@pytest.mark.parametrize(
    ("case", "optimizer", "shares"),
    [("mlp_metrics", "sgd", "5,3"), ("convnet", "adam", "4,4"), ("tf1_mlp", "adam", "8,0")],
)
def test_gradients_from_gpu_to_gpu_are_those_of_one_device(
    launcher: Launcher, pool: Pool, tmp_path: Path, gpus: int, backend: str, case: str, optimizer: str, shares: str
) -> None:
    size = len(shares.split(","))
    if backend == "nccl" and gpus < size:
        pytest.skip(f"NCCL wants a GPU for each rank, and there is {gpus}")
    check_backend(launcher, pool, tmp_path, backend, case, optimizer, shares, timeout_s=300)
