"""Calls of Keras that one rank makes alone: an error that names the call, its line, and why all have to make it."""

from __future__ import annotations

import re

import pytest

from tests.draws import one_of
from tests.launcher.helpers import Launcher

MODEL = """
import numpy as np, keras, whale as wh
wh.init()
keras.utils.set_random_seed(1)
x, y = np.random.default_rng(0).normal(size=(32, 4)), np.arange(32.0)
layers = [keras.layers.Input((4,)), keras.layers.Dense(4, name="first"), keras.layers.Dense(1)]
"""


def said_by_one_rank(launcher: Launcher, text: str) -> str:
    done = launcher.run("-np", "2", launcher.script(MODEL + text), timeout_s=300)
    assert done.returncode != 0
    assert "went on" not in done.stdout
    return done.stderr


def test_a_model_that_lies_split_is_saved_by_one_rank(launcher: Launcher) -> None:
    said = said_by_one_rank(
        launcher,
        """
with wh.split():
    model = keras.Sequential(layers)
model.compile("sgd", "mse")
model.fit(x, y, verbose=0)
if wh.rank() == 0:
    model.save("model.keras")
    print("went on")
""",
    )
    line = MODEL.count("\n") + 7
    assert f"`save_model` of the model 'sequential' at script.py:{line}, which every rank has to call" in said, said
    assert "the variable 'sequential/first/kernel' is sharded over the ranks" in said, said


TRAINED = """
model = keras.Sequential(layers)
model.compile("sgd", "mse")
{callback}
model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[callback] if wh.rank() == {rank} else [])
print("went on")
"""
LINE = MODEL.count("\n") + 5


@pytest.mark.parametrize("rank", one_of(2, [0, 1]))
def test_a_callback_ends_the_training_on_one_rank(launcher: Launcher, rank: int) -> None:
    callback = "callback = keras.callbacks.EarlyStopping('loss', patience=0, min_delta=1e9)"
    said = said_by_one_rank(launcher, TRAINED.format(callback=callback, rank=rank))
    place = f"rank {1 - rank} is still in `fit` of the model 'sequential' at script.py:{LINE}, at step 5"
    assert f"CommError: {place}, while another rank is elsewhere: maybe only one rank has a callback" in said, said
    assert "give every rank the same callbacks" in said, said


def test_a_callback_evaluates_on_one_rank(launcher: Launcher) -> None:
    callback = "callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.evaluate(x, y))"
    said = said_by_one_rank(launcher, TRAINED.format(callback=callback, rank=0))
    place = rf"rank [01] is still in `fit` of the model 'sequential' at script\.py:{LINE}, at step [23]"
    assert re.search(f"CommError: {place}, while another rank is elsewhere: maybe only one rank has a", said), said
    assert f"`evaluate` of the model 'sequential' at script.py:{LINE - 1}, inside of `fit` after 2 steps" in said, said


def test_a_model_predicts_on_one_rank_while_the_other_goes_on(launcher: Launcher) -> None:
    said = said_by_one_rank(
        launcher,
        """
model = keras.Sequential(layers)
model.compile("sgd", "mse")
if wh.rank() == 0:
    model.predict(x)
model.evaluate(x, y)
print("went on")
""",
    )
    assert "CommError: the ranks call different things" in said, said
    assert "rank 0: `predict` of the model 'sequential' at script.py:" in said, said
    assert "rank 1: `evaluate` of the model 'sequential' at script.py:" in said, said
