"""``fit`` over batches of many sizes, of which each rank reads its rows, while a shared program takes them whole."""

from __future__ import annotations

from tests.launcher.helpers import Launcher, run_alone
from whale.runtime.input.traces import OWN_PLANS

FIT = """
import sys
import keras, numpy as np, tensorflow as tf
if "plain" not in sys.argv:
    import whale as wh
    wh.init({"batch.norm_statistics": "batch", "batch.random": "global"})
keras.config.set_floatx("float64")
keras.utils.set_random_seed(5)
draw = np.random.default_rng(0)
batches = [(x := draw.normal(size=(n, 3)), x.sum(1)) for n in (6, 4, 5, 7, 3, 2)]
spec = tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec([None], tf.float64)
data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
data = data.apply(tf.data.experimental.assert_cardinality(6))
layers = keras.layers
model = keras.Sequential([layers.Dense(4, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
history = model.fit(data, epochs=3, verbose=0).history
print("SAID", *(f"{v:.10f}" for values in history.values() for v in values))
if "plain" not in sys.argv:
    from whale.runtime.context import require_current
    print("PROGRAMS", require_current("").programs)
"""


def test_fit_gathers_the_rows_that_ranks_read_for_a_shared_program(launcher: Launcher) -> None:
    script = launcher.script(FIT)
    plain = run_alone(launcher, script)
    done = launcher.run("-np", "2", script)
    assert done.returncode == 0, done.stderr
    said = [line.partition("SAID ")[2] for line in done.stdout.splitlines() if "SAID " in line]
    assert said == [plain.strip().removeprefix("SAID ")] * 2
    assert done.stdout.count(f"PROGRAMS {OWN_PLANS + 1}") == 2, done.stdout
