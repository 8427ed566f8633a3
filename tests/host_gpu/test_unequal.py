"""Programs on two unequal GPUs that are the host's: 1 to 4 in speed, and one has a third of the other's memory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np

from tests.forkserver import plain_python, warm_python
from tests.host_gpu.build import ROOT, HostGpu
from tests.host_gpu.test_host_gpus import environment
from tests.launcher.helpers import Launcher

MIB = 1 << 20
GPUS = HostGpu(725 * MIB, name="large"), HostGpu(400 * MIB, slowness=4.0, name="small")
LIMITS_BYTES = 500 * MIB, 175 * MIB  # without what TensorFlow leaves to CUDA
SCRIPT = str(ROOT / "tests/host_gpu/unequal.py")


def test_plans_use_both_and_each_has_its_own_limit(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, warm_python())
    launcher.environment = {**launcher.environment, **environment(*GPUS)}
    launcher.environment.update(PYTHONPATH=str(ROOT), WHALE_MESH_PLAN_CACHE="")
    alone = {**launcher.environment, "HOST_GPUS": ""}
    subprocess.run([plain_python(), SCRIPT, str(tmp_path)], env=alone, cwd=ROOT, check=True)
    wanted = json.loads((tmp_path / "alone.json").read_text())
    on_gpus = str(ROOT / "tests/host_gpu/on_host_gpus.py"), "none"
    done = launcher.run("-np", "2", *on_gpus, SCRIPT, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    large, small = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for name, losses in wanted.items():
        for said in (large, small):
            np.testing.assert_allclose(said[name], losses, rtol=1e-10, err_msg=name)
    # The large one takes a share that the small one could not, and is not refused.
    assert LIMITS_BYTES[1] < large["peak_bytes"] <= LIMITS_BYTES[0] and small["peak_bytes"] <= LIMITS_BYTES[1]
    for refused in (large["refused"], small["refused"]):
        assert "device: rank 1\n" in refused and "memory of the GPU, small, without 225.0 MiB" in refused
    assert len(large["shares"]) == 2, large
    many, few = large["shares"]
    assert many > few > 0, large  # 4 to 1 on idle cores; what is measured beside other tests is nearer to 1
    assert not launcher.left_behind()
