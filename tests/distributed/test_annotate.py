"""A script whose model comes from a library is parallelised by a file, between processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher.helpers import Launcher

SCRIPT = """
import numpy as np, keras, whale as wh

x = np.random.default_rng(0).random((16, 6)).astype("float32")

def losses():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(n, "tanh", name=f"block_{i}") for i, n in enumerate((8, 8, 1))]
    model = keras.Sequential([keras.layers.Input((6,)), *layers])
    model.compile("adam", "mse")
    return model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

expected = losses()
wh.init()
np.testing.assert_allclose(losses(), expected, rtol=1e-5)
print("rank", wh.rank(), "equal")
"""


@pytest.mark.long
def test_a_script_under_a_file_of_scopes(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "scopes.json"
    file.write_text(json.dumps({"block_[01]": {"stage": 0}, "block_2": {"stage": 1}, "block_1/kernel": {"split": {}}}))
    script = launcher.script(SCRIPT)
    done = launcher.run("-np", "2", "--annotate", str(file), script, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} equal" in done.stdout for rank in range(2)), done.stdout
    file.write_text(json.dumps({"blok_0": {"split": {}}}))
    done = launcher.run("-np", "2", "--annotate", str(file), script, timeout_s=600)
    assert done.returncode != 0
    assert "an annotation matches no layer and no variable" in done.stdout + done.stderr
    assert "such as block_0" in done.stdout + done.stderr
