"""Estimators, which TensorFlow has up to 2.15: trained, evaluated and exported over two ranks as by one process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import plain_python

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow_estimator") is None, reason="this TensorFlow has none"),
]

SCRIPT = """
import glob, json, os, sys
import numpy as np, tensorflow as tf
folder, spread, dies = sys.argv[1], sys.argv[2] == "spread", sys.argv[3:] == ["dies"]
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})
if spread:
    import whale as wh
    wh.init()
else:
    del os.environ["TF_CONFIG"]
v1 = tf.compat.v1
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(48, 4)), rng.normal(size=(48, 1))

def input_fn():
    return tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).repeat(3).batch(12)

def eval_fn():
    return tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).batch(10)

def model_fn(features, labels, mode):
    weight = v1.get_variable("weight", [4, 1], tf.float64, v1.constant_initializer(0.3))
    out = tf.tanh(features["x"] @ weight)
    exports = {"serving_default": tf.estimator.export.PredictOutput({"out": out})}
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"out": out}, export_outputs=exports)
    loss = tf.reduce_mean(tf.square(out - labels))
    metrics = {"mae": v1.metrics.mean_absolute_error(labels, out)}
    train_op = v1.train.AdamOptimizer(0.1).minimize(loss, v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)

class Dies(v1.train.SessionRunHook):
    runs = 0

    def after_run(self, context, values):
        self.runs += 1
        if self.runs == 6 and wh.rank() == 1:
            os._exit(9)

def serving():
    x = v1.placeholder(tf.float64, [None, 4])
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})

config = tf.estimator.RunConfig(folder, save_checkpoints_steps=4, keep_checkpoint_max=2)
estimator = tf.estimator.Estimator(model_fn, config=config)
if not spread:  # as one that died at the sixth step, and went on from the fourth
    estimator.train(input_fn, max_steps=4)
train = tf.estimator.TrainSpec(input_fn, max_steps=12, hooks=[Dies()] if dies else [])
final = tf.estimator.FinalExporter("final", serving)
result, exports = tf.estimator.train_and_evaluate(
    estimator, train, tf.estimator.EvalSpec(eval_fn, None, throttle_secs=0, exporters=[final])
)
found = {name: float(value) for name, value in result.items()}
found["predicted"] = [float(p["out"][0]) for p in estimator.predict(lambda: tf.data.Dataset.from_tensors({"x": X}))][:3]
found["exports"] = sum(path is not None for path in exports)
found["events"] = len(glob.glob(folder + "/events*"))
found["checkpoints"] = sorted(map(os.path.basename, glob.glob(folder + "/model.ckpt-*.index")))
print("found", json.dumps(found), flush=True)
"""


def test_train_and_evaluate_and_go_on_after_a_fault(launcher: Any, tmp_path: Path) -> None:
    script = launcher.script(SCRIPT)

    def alone(*arguments: str) -> str:
        command = [plain_python(), script, str(tmp_path / "alone"), "alone", *arguments]
        done = subprocess.run(
            command, env=launcher.environment, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout

    alone("dies")
    wanted = json.loads(alone().partition("found ")[2])
    died = launcher.run("-np", "2", script, str(tmp_path / "spread"), "spread", "dies")
    assert died.returncode != 0
    assert "rank 1 failed: exit code 9" in died.stderr
    done = launcher.run("-np", "2", script, str(tmp_path / "spread"), "spread")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RunConfig ignores TF_CONFIG" in done.stderr
    lines = [line.partition("found ")[2] for line in done.stdout.splitlines() if "found {" in line]
    assert len(lines) == 2
    for line in lines:
        found = json.loads(line)
        for name in ("predicted", "loss", "mae"):
            assert found.pop(name) == pytest.approx(wanted[name], rel=1e-6 if name == "mae" else 1e-10), name
        assert found.pop("events") == 2  # one of each run
        assert found == {name: wanted[name] for name in ("global_step", "exports", "checkpoints")}
