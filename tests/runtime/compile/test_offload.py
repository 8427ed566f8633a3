"""What lies in the host's memory, beside an accelerator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import tensorflow as tf

import whale as wh
from whale.errors import ConfigError


def test_runs_are_as_on_one_device_and_copies_as_predicted() -> None:
    command = [sys.executable, "-m", "tests.offload", "alone", "pipeline, zero 1", "weights", "in a branch, zero 3"]
    command += ["--optimizers", "adam"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("as predicted") == 4, done.stdout + done.stderr


def test_nothing_is_held_elsewhere_where_the_device_is_the_host(ranks: Callable[..., None]) -> None:
    ranks(1, **{"offload.level": "optimizer"})
    weight = tf.Variable([1.0])
    step = wh.function(lambda x: weight.assign_sub(x))
    with pytest.raises(ConfigError, match="the device is the host"):
        step(tf.constant([0.5]))
    assert float(weight[0]) == 1.0
