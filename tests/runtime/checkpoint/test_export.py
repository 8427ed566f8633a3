"""wh.export: what a process without Whale serves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.checkpoints.model import INPUTS, Model, batch
from tests.forkserver import plain_python
from whale.runtime.checkpoint.export import _make_module
from whale.runtime.variables.checkpoint_regions import find_variable, is_split

Start = Callable[..., None]
SERVE = """
import sys
import numpy as np, tensorflow as tf
x = np.load("x.npy")
for name in sys.argv[1:]:
    served = tf.saved_model.load(name).signatures["serving_default"]
    (value,) = served(tf.constant(x)).values()
    np.save(f"{name}.npy", value.numpy())
assert "whale" not in sys.modules
"""


def predictor(first: Any, second: Any) -> Any:
    @wh.function
    def hidden(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(first(x))

    @wh.function
    def predict(x: tf.Tensor) -> tf.Tensor:
        return second(hidden(x))

    return predict


def test_what_is_exported_serves_without_whale(ranks: Start, tmp_path: Path) -> None:
    x = batch(0)[0]
    wanted: dict[str, np.ndarray] = {}
    for name, split, config in [
        ("split", wh.split, {}),
        ("zero", None, {"memory.zero": 1, "memory.zero_min_bytes": 0}),
    ]:
        ranks(2, **config)
        model = Model(wh.function, split) if split else Model(wh.function)
        for number in range(3):
            model.step(*batch(number))
        first, second = model.layers
        keras = tf.keras.Sequential([tf.keras.layers.Input((INPUTS,), dtype="float64"), first, second])

        predict = predictor(first, second)
        wanted[name] = np.array(predict(x))
        assert any(is_split(find_variable(v)) for v in (*model.weights, *model.optimizer.variables))
        for _ in range(2):  # the second replaces the first
            wh.export(predict, tmp_path / name, tf.TensorSpec([None, INPUTS], tf.float64))
        whole = [tf.convert_to_tensor(w).numpy() for w in model.weights]
        wanted[f"{name}_model"] = (x @ whole[0] + whole[1]) @ whole[2] + whole[3]
        wh.export(keras, tmp_path / f"{name}_model")
        losses = float(model.step(*batch(4)))  # training goes on
        assert np.isfinite(losses)
        wh.shutdown()
    np.save(tmp_path / "x.npy", x)
    assert {p.name for p in tmp_path.iterdir()} == {*wanted, "x.npy"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([plain_python(), "-c", SERVE, *wanted], check=True, cwd=tmp_path, env=environment)
    for name, values in wanted.items():
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), values, rtol=1e-6, atol=1e-12, err_msg=name)


def test_ranks_gather_variables_in_one_order() -> None:
    """A function's own order is that of addresses, which are others in each process."""
    weights = [tf.Variable(float(i)) for i in range(24)]
    module = _make_module(lambda x: tf.add_n([x * w for w in weights]), [tf.TensorSpec([])])
    assert [v is w for v, w in zip(module.used, weights, strict=True)] == [True] * 24


def test_mistakes(ranks: Start, tmp_path: Path) -> None:
    ranks(1)
    with pytest.raises(wh.ProgramError, match="for each argument of a function"):
        wh.export(wh.function(lambda x: x), tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(wh.CheckpointError, match="cannot be exported"):
        wh.export(wh.function(lambda x: x), tmp_path / "file" / "a", tf.TensorSpec([2]))
