"""The host waits for the ends of gradients' exchanges, and for none on the critical path of a step."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.forkserver import warm_python
from tests.host_gpu.host_waits import count_waits, losses_alone
from tests.launcher.helpers import Launcher
from whale_ops import build


@pytest.mark.parametrize(
    ("layers", "mesh", "backend"),
    [
        (1, "tensor=2", "nccl"),
        pytest.param(8, "data=2,tensor=2", "nccl", marks=pytest.mark.long),
        pytest.param(8, "data=2,tensor=2", "cuda-ipc", marks=pytest.mark.long),
    ],
)
def test_streams_wait_on_the_critical_path_and_the_host_for_gradients(
    tmp_path: Path, layers: int, mesh: str, backend: str
) -> None:
    if shutil.which(build.find_compiler_command()[0]) is None:
        pytest.skip("no C++ compiler: the host's GPUs are not compiled here")
    ranks = count_waits(Launcher(tmp_path, warm_python()), tmp_path, layers, mesh, backend)
    wanted = losses_alone(layers)
    for said in ranks:
        np.testing.assert_allclose(said["losses"], wanted, rtol=1e-12)
        # Of each layer two sums forward and two backward, one of the embedding, three of the loss, one of the head's
        # slope. Behind the last ones backward, gathers for updates, and the sum of the result there are no products.
        assert said["exchanges"]["AllReduce tensor"] >= 4 * layers + 5
        assert said["waited for"] == sum(said["not in stream"].values())
        assert said["in stream"] == sum(said["exchanges"].values()) - said["waited for"]
        assert said["in stream"] >= 4 * layers + 4 and said["through the host"] == []
        if "data" in mesh:  # else gradients go along the same axis
            assert said["not in stream"]["AllReduce tensor"] <= 3
            assert said["not in stream"]["AllReduce data"] <= 2, "a bucket of gradients, and the loss"
        assert said["host waits for streams"] == 0
