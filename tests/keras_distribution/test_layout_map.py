"""Losses, weights and predictions are those of one process, and every rank holds of a weight what the map says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from tests.forkserver import plain_python, warm_python
from tests.keras_fit.table import ROOT, environment
from tests.saved_values import difference

SCRIPT = str(ROOT / "tests/keras_distribution/on_ranks.py")
HUB = pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="keras_hub is not installed")


@pytest.mark.parametrize(
    "name, axes",
    [
        ("fully_sharded", "2x1"),
        pytest.param("transformer", "2x2", marks=pytest.mark.long),
        pytest.param("gemma", "1x2", marks=HUB),
        pytest.param("llama", "1x4", marks=HUB),
    ],
)
def test_a_layout_map(name: str, axes: str, tmp_path: Path) -> None:
    batch, model = (int(n) for n in axes.split("x"))
    run = [warm_python(), "-m", "whale", "run", "-np", str(batch * model)]
    for command in ([plain_python(), SCRIPT, name, "plain"], [*run, SCRIPT, name, axes]):
        done = subprocess.run([*command, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert ("no variable fits the LayoutMap's 'up/kernels'; there are up/kernel, " in done.stderr) == (
        name == "transformer"
    )
    saved = [tmp_path / f"{name}_{axes}_{rank}" for rank in range(batch * model)]
    gap = difference(tmp_path / f"{name}_plain_0.npz", [path.with_suffix(".npz") for path in saved])
    assert not gap.problem
    # Backbones of keras_hub compute rotations, scores and normalisations in float32, whatever their dtype.
    assert gap.largest <= (1e-5 if name in ("gemma", "llama") else 1e-10), gap
    for path in saved:
        lie = json.loads(path.with_suffix(".json").read_text())
        assert lie
        for variable, one in lie.items():
            sizes = {"batch": batch, "model": model}
            divided = [(dim, axis) for dim, axis in enumerate(one["wanted"]) if axis and sizes[axis] > 1]
            if not divided:
                assert one["found"] is None, (variable, one)
                continue
            part = list(one["shape"])
            for dim, axis in divided:
                part[dim] //= sizes[axis]
            assert one["found"] == part, (variable, one)


def test_a_mesh_of_other_devices_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import keras, whale as wh
wh.init()
api = keras.distribution
mesh = api.DeviceMesh((1, 4), ("batch", "model"), [f"cpu:{i}" for i in range(4)])
api.set_distribution(api.ModelParallel(layout_map=api.LayoutMap(mesh), batch_dim_name="batch"))
""")
    command = [warm_python(), "-m", "whale", "run", "-np", "2", str(script)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "the device mesh does not fit this run" in done.stderr
    assert "start as many ranks as the mesh has devices" in done.stderr


def test_a_layout_that_the_plan_does_not_follow_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import numpy as np, whale as wh
wh.init({"communication.in_process_ranks": 2})
import keras
layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((1, 2), ["batch", "model"]))
layouts["a/kernel"] = (None, "model")
keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts))
inputs = keras.layers.Input((6,))
with wh.stage():
    x = keras.layers.Dense(8, name="a")(inputs)
with wh.stage():
    x = keras.layers.Dense(8, name="b")(x)
model = keras.Model(inputs, x)
model.compile(optimizer="sgd", loss="mse")
model.fit(np.ones((8, 6)), np.ones((8, 8)), verbose=0)
""")
    done = subprocess.run([warm_python(), str(script)], env=environment(), capture_output=True, text=True, timeout=300)
    assert (
        "a variable cannot have the layout that the script sets" in done.stderr and "leave stages out" in done.stderr
    ), done.stderr
