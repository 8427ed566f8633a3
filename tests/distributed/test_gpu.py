"""Programs on GPUs that add up their gradients themselves: only where there is a GPU, nvcc and (for NCCL) two GPUs.

pip install nvidia-nccl-cu12
python -m pytest -rs tests/whale_ops/test_cuda.py tests/distributed/test_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.distributed.test_cases import SCRIPT
from tests.launcher.helpers import Launcher
from tests.oracle.execute import load
from tests.oracle.metric import difference, limit
from tests.oracle.pool import Pool, flavours
from whale_ops import build_cuda


@pytest.fixture(scope="module")
def gpus() -> int:
    """How many GPUs there are, with the library built for them."""
    import tensorflow as tf

    found = len(tf.config.list_physical_devices("GPU"))  # takes none of their memory
    if found == 0:
        pytest.skip("TensorFlow sees no GPU here: no program has run with GPUs that communicate")
    if build_cuda.find_nvcc() is None:
        pytest.skip("no nvcc on PATH: the CUDA library is not compiled here")
    build_cuda.build()
    return found


@pytest.mark.parametrize("backend", ["cuda-ipc", "nccl"])
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
    wanted = pool.reference(flavours()[0], case, "float64", optimizer)
    launcher.environment["WHALE_COMMUNICATION_BACKEND"] = backend
    done = launcher.run(
        "-np", str(size), SCRIPT, case, "float64", optimizer, shares, str(tmp_path), "replica", timeout_s=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [load(tmp_path / f"{rank}.npz") for rank in range(size)]
    worst = difference(load(wanted["path"]), results[0], wanted["floor"])
    assert worst.error <= limit("float64", 0.0), worst
    for other in results[1:]:
        assert all(np.array_equal(value, results[0][name]) for name, value in other.items())
