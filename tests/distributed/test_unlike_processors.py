"""Runs ranks whose processors round otherwise: copies, constants and data may differ by that, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tests.launcher.helpers import Launcher
from whale.distributed.versions import describe_rounding
from whale.replicas import Held, differ_by_rounding, find_differing
from whale.runtime.variables.compared import make_sketch

DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("size", [1, 300, 100_000])
def test_a_sketch_tells_rounding_from_faults(dtype: str, size: int) -> None:
    value = DRAW.normal(size=size).astype(dtype)
    unit = np.finfo(dtype).eps
    sketch = make_sketch(value)
    assert sketch is not None and differ_by_rounding(sketch, sketch)
    rounded = (value * (1 + 4 * unit * DRAW.choice([-1, 1], size))).astype(dtype)
    assert differ_by_rounding(sketch, make_sketch(rounded))  # type: ignore[arg-type]
    one = value.copy()
    one[size // 2] += 3 + 20 * np.linalg.norm(value.astype(complex)) * unit**0.5  # of all elements
    for other in (value * np.dtype(dtype).type(1.5), -value, np.roll(value, 1) if size > 1 else value + 1, one):
        assert not differ_by_rounding(sketch, make_sketch(other.astype(dtype)))  # type: ignore[arg-type]
    infinite = value.copy()
    infinite[0] = np.nan
    assert not differ_by_rounding(sketch, make_sketch(infinite))  # type: ignore[arg-type]


def test_whole_numbers_and_ranks_alike_are_compared_by_bytes() -> None:
    assert make_sketch(np.arange(4)) is None
    sketch = make_sketch(np.ones(3))
    said = [{"w": Held(1, True, sketch)}, {"w": Held(2, True, sketch)}, {"w": Held(3, True)}]
    assert find_differing(said[:2]) == ({}, 1)
    assert find_differing(said) == ({"w": [2]}, 1)


def test_what_decides_on_rounding_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe_rounding()
    assert before and describe_rounding() == before
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert describe_rounding() != before


SCRIPT = """
import os, sys
import keras, numpy as np, tensorflow as tf, whale as wh
last = float(os.environ["OMPI_COMM_WORLD_RANK"])  # 1 where the last bits are others
if last:
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"  # as on another processor
wh.init()
keras.utils.set_random_seed(1)
keras.backend.set_floatx("float64")

def rounded(x):
    return x * (1 + last * 2e-16)

draw = np.random.default_rng(0)
x, y = rounded(draw.normal(size=(24, 5))), draw.normal(size=(24, 1))
table = rounded(draw.normal(size=5))

class Position(keras.layers.Layer):
    def call(self, x):
        return x + tf.constant(table)

model = keras.Sequential([keras.Input([5]), Position(), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse")
model.fit(x, y, batch_size=8, epochs=2, verbose=0)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
model.fit(data, epochs=1, verbose=0)
for v in model.trainable_variables:  # as a reduction that is computed on every rank leaves them
    v.assign(rounded(v.numpy()))
compared = wh.check_replicas()
model.save(sys.argv[1] + f"/{wh.rank()}.keras")
print("LOSS", model.evaluate(data, verbose=0), compared > 10)
try:
    model.fit(x + last * 1e-9, y, batch_size=8, verbose=0)
except Exception as error:
    print("TOLD data", "ranks 0 and 1 pass different values" in str(error))
table = table + last * 1e-7
other = keras.Sequential([keras.Input([5]), Position(), keras.layers.Dense(1)])
other.compile("sgd", "mse")
try:
    other.fit(x, y, batch_size=8, verbose=0)
except Exception as error:
    print("TOLD constant", "add/y (Const)" in str(error) or "Const" in str(error))
model.trainable_variables[0].assign(model.trainable_variables[0] * (1 + last * 1e-6))
try:
    wh.check_replicas()
except Exception as error:
    print("TOLD copy", "copies that differ by rounding at most" in str(error))
"""


def test_ranks_on_other_processors_train_together(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(SCRIPT), str(launcher.folder))
    for told in ("data", "constant", "copy"):
        assert done.stdout.count(f"TOLD {told} True") == 2, done.stdout + done.stderr
    losses = [line.split()[2:] for line in done.stdout.splitlines() if "LOSS" in line]
    assert len(losses) == 2 and losses[0] == losses[1] and losses[0][1] == "True", done.stdout
    assert (
        "at the end of the run trainable variables differ" in done.stderr
    )  # the last copy, which was moved on purpose
