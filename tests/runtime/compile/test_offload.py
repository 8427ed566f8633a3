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


@pytest.mark.skipif(tf.__version__ < "2.16", reason="lazy optimizers are those of Keras 3")
def test_of_a_table_the_rows_in_use_are_copied() -> None:
    command = [sys.executable, "-m", "tests.offload", "tables", "tables, columns", "tables, rows", "tables, hot"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("as predicted") == 8, done.stdout + done.stderr


def test_a_table_whose_update_changes_every_row_is_refused() -> None:
    code = """if True:
        import tensorflow as tf, whale as wh
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        wh.init({"offload.level": "tables"})
        table = tf.Variable(tf.ones([9, 2]), name="table")

        def step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, ids) ** 2)
            table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
            return loss

        try:
            wh.function(step)(tf.constant([1, 2]))
        except wh.WhaleError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "changes all of table" in done.stdout and "wh.optimizers.lazy" in done.stdout, done.stdout + done.stderr


def test_nothing_is_held_elsewhere_where_the_device_is_the_host(ranks: Callable[..., None]) -> None:
    ranks(1, **{"offload.level": "optimizer"})
    weight = tf.Variable([1.0])
    step = wh.function(lambda x: weight.assign_sub(x))
    with pytest.raises(ConfigError, match="the device is the host"):
        step(tf.constant([0.5]))
    assert float(weight[0]) == 1.0
