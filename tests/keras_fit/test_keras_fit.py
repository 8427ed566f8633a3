"""A sample of the table, and what Keras users meet beside it. All of it: ``python -m tests.keras_fit``."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.keras_fit.cases import cases_of
from tests.keras_fit.table import compared, plain
from tests.launcher.helpers import Launcher

PLANS = {
    "keras": {
        "replica": [
            "two_inputs_two_outputs",
            "own_steps",
            "dataset",
            "interrupted",
            "several_steps_at_once",
            "wide_rows",
            "kinds_of_shuffles",
        ],
        "zero": ["saved_and_loaded", "steering_callbacks"],
        "stages": ["attention", "saved_and_loaded", "optimizer_options"],
        "split": ["attention", "steering_callbacks"],
        "auto": ["own_steps"],
    },
    "tf_keras": {"replica": ["steering_callbacks", "wide_rows", "kinds_of_shuffles"]},
}


_MARKS = {
    ("keras", "replica"): pytest.mark.core,
    ("keras", "auto"): pytest.mark.long,
    ("keras", "zero"): pytest.mark.long,
    ("keras", "split"): pytest.mark.long,
    ("keras", "stages"): pytest.mark.long,
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with what plain Keras gives, by flavour."""

    @functools.cache
    def folder(flavour: str) -> Path:
        found = tmp_path_factory.mktemp(flavour)
        asked = {case for cases in PLANS[flavour].values() for case in cases}
        plain(flavour, sorted(asked.intersection(cases_of(flavour))), found)
        return found

    return folder


@pytest.mark.parametrize(
    "flavour, plan",
    [
        pytest.param(flavour, plan, marks=_MARKS.get((flavour, plan), []))
        for flavour, plans in PLANS.items()
        for plan in plans
    ],
)
def test_equals_plain_keras(flavour: str, plan: str, references: Callable[[str], Path]) -> None:
    cases = [case for case in PLANS[flavour][plan] if case in cases_of(flavour)]
    rows = compared(flavour, plan, 2, cases, references(flavour))
    assert len(rows) == len(cases)
    assert [row for row in rows if not row.ok] == []


MODEL = """
import numpy as np, keras, whale as wh
wh.init()
keras.utils.set_random_seed(1)
x, y = np.random.default_rng(0).normal(size=(32, 4)), np.arange(32.0)
model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
"""


def test_a_model_that_runs_eagerly_is_refused(launcher: Launcher) -> None:
    done = launcher.run(
        "-np", "2", launcher.script(MODEL + "model.compile('sgd', 'mse', run_eagerly=True)\nmodel.fit(x, y)\n")
    )
    assert done.returncode != 0
    assert "a model that runs eagerly cannot be distributed" in done.stderr
    assert "next: compile the model without run_eagerly" in done.stderr


def test_one_rank_shows_progress_and_what_ends_takes_the_hooks_back(launcher: Launcher) -> None:
    """Before, in and after a run: the same model, whose functions are made anew each time."""
    script = """
import numpy as np, keras
keras.utils.set_random_seed(1)
x, y = np.random.default_rng(0).normal(size=(32, 4)), np.arange(32.0)
model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, y, verbose=0)
import whale as wh
from whale.runtime.context import find_running
wh.init()
model.fit(x, y, verbose=2)
assert find_running().programs == 1
model.train_function = wh.function(model.train_function)  # it is spread already
model.fit(wh.shard(__import__("tensorflow").data.Dataset.from_tensor_slices((x, y)).batch(8)), verbose=0)
model.summary()
model.predict(x, verbose=1)
wh.shutdown()
model.fit(x, y, verbose=0)
print("went on")
"""
    done = launcher.run("-np", "2", launcher.script(script))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count("went on") == 2, said
    assert said.count("s/step - loss") == 1, said
    assert said.count("Total params") == 1, said


def test_a_plan_of_fit_is_made_without_training(launcher: Launcher, tmp_path: Path) -> None:
    csv = tmp_path / "log.csv"
    script = launcher.script(
        MODEL
        + f"""
model.compile("sgd", "mse")
model.fit(x, y, callbacks=[keras.callbacks.CSVLogger({str(csv)!r})])
print("went on")
"""
    )
    command = [launcher.python, "-m", "whale", "plan", "-np", "2", script]
    done = subprocess.run(command, env=launcher.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Plan for train_step: 2 ranks" in done.stdout
    assert "Epoch" not in done.stdout
    assert "went on" not in done.stdout
    assert not csv.exists()
