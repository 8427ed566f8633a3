"""Checks that all ranks have drawn what the first rank draws while it writes a model."""

from __future__ import annotations

from tests.launcher.helpers import Launcher

SCRIPT = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import numpy as np, tensorflow as tf, tf_keras as keras, whale as wh
wh.init()

class Noise(keras.layers.Layer):
    def call(self, x):  # a seed of NumPy's generator for each trace, of which a SavedModel is made
        return x + keras.backend.random_normal(tf.shape(x))

model = keras.Sequential([keras.layers.Input((2,)), Noise(), keras.layers.Dense(1)])
before = np.random.get_state()[2]
model.save("model", save_format="tf")
drew = wh.rank() > 0 or np.random.get_state()[2] != before
print(drew, model.predict(np.ones((4, 2)), verbose=0).tolist(), np.random.uniform())
"""


def test_a_save_that_draws_leaves_ranks_alike(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(SCRIPT), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.partition("] ")[2] for line in done.stdout.splitlines() if "] True" in line]
    assert len(said) == 2 and said[0] == said[1], done.stdout
