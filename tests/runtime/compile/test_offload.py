"""What lies in the host's memory, beside an accelerator."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from inspect import cleandoc

import pytest
import tensorflow as tf

import whale as wh
from tests.forkserver import warm_python
from whale.errors import ConfigError


def test_runs_are_as_on_one_device_and_copies_as_predicted() -> None:
    command = [warm_python(), "-m", "tests.offload", "alone", "pipeline, zero 1", "weights", "in a branch, zero 3"]
    command += ["--optimizers", "adam"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("as predicted") == 4, done.stdout + done.stderr


@pytest.mark.skipif(tf.__version__ < "2.16", reason="lazy optimizers are those of Keras 3")
def test_of_a_table_the_rows_in_use_are_copied() -> None:
    command = [warm_python(), "-m", "tests.offload", "tables", "tables, columns", "tables, rows", "tables, hot"]
    command += ["tables, keras", "tables, keras, replica"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("as predicted") == 12, done.stdout + done.stderr


TABLE = """
import numpy as np, tensorflow as tf, whale as wh
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
wh.init({"communication.in_process_ranks": 1, "memory.offload": "tables", **CONFIG})
with tf.device("CPU:1"):
    table = tf.Variable(np.ones([9, 2]), name="table")
    weight = tf.Variable(np.eye(2) * [[1.0, 3.0]], name="weight")
ids = tf.constant([1, 2, 2, 5])
"""
REFUSED = """
try:
    wh.function(step)(ids)
except wh.WhaleError as error:
    print(error)
"""


def printed(code: str, **config: object) -> str:
    """What a program prints that has a table of nine rows, before what is logged."""
    keys = {name.replace("__", "."): value for name, value in config.items()}
    whole = f"CONFIG = {keys}\n{TABLE}{cleandoc(code)}"
    done = subprocess.run([warm_python(), "-c", whole], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_table_whose_update_changes_every_row_is_refused() -> None:
    code = """
        def step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, ids) ** 2)
            table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
            return loss
    """
    text = printed(cleandoc(code) + REFUSED)
    assert "changes all of table" in text and "wh.optimizers.lazy" in text


@pytest.mark.skipif(tf.__version__ < "2.16", reason="tf.keras is Keras 3")
def test_keras_own_optimizers_change_every_row_of_its_embedding() -> None:
    code = """
        tf.keras.backend.set_floatx("float64")
        with tf.device("CPU:1"):
            layer = tf.keras.layers.Embedding(9, 2)
            layer.build()
            optimizer = tf.keras.optimizers.Adam(0.1)
            optimizer.build([layer.embeddings.value])

        def step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids) ** 2)
            weights = [layer.embeddings.value]
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return loss
    """
    text = printed(cleandoc(code) + REFUSED)
    assert "changes all of embedding" in text and "wh.optimizers.lazy" in text and "Adagrad" in text, text


def test_a_lookup_in_a_value_sees_it_as_it_was_read() -> None:
    code = """
        def step(ids):
            value = tf.convert_to_tensor(table)
            table.scatter_sub(tf.IndexedSlices(tf.ones([4, 2], tf.float64), ids))
            rows = tf.gather(value, ids)
            weight.assign_sub(tf.transpose(rows[:2]) @ rows[:2])
            return rows

        np.testing.assert_array_equal(wh.function(step)(ids), np.ones([4, 2]))
        np.testing.assert_array_equal(tf.gather(table, [1, 2, 5, 6])[:, 0], [0.0, -1.0, 0.0, 1.0])
        print(*wh.memory_report().copied)
    """
    assert printed(code).splitlines()[0] == f"0 {4 * 2 * 8}"  # the ids lie where the caller has them


def test_of_a_micro_batch_the_lookup_alone_is_computed_by_the_host() -> None:
    code = """
        def step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.sin(tf.gather(table, ids) @ weight))
            weight.assign_sub(tape.gradient(loss, weight))
            return loss

        wh.function(step)(ids)
        report = wh.memory_report()
        print(*report.copied, *report.copied_each_step["step"])
    """
    ids, rows = 4 * 4, 4 * 2 * 8  # no weight, and no gradient
    for ranks in (1, 2):
        text = printed(code, communication__in_process_ranks=ranks, pipeline__micro_batches=2)
        assert text.splitlines()[0] == f"{ids} {rows} {ids} {rows}", text


def test_it_is_said_what_needs_all_of_a_table() -> None:
    code = """
        def step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.gather(table, ids) @ weight) @ tf.transpose(table))
            weight.assign_sub(tape.gradient(loss, weight))
            return loss

        wh.function(step)(ids)
        print(wh.memory_report().on_host_bytes)
    """
    text = printed(code)
    assert (
        text.startswith("0\n")
        and "reads all rows of tables, so memory.offload" in text
        and "table, for transpose" in text
    ), text
    text = printed(code.replace("tf.gather(table", "tf.gather(tf.convert_to_tensor(table)"))
    assert text.startswith("0\n") and "table, for transpose" in text, text


def test_what_ran_before_a_table_moved_to_the_host_sees_what_training_makes_of_it() -> None:
    code = """
        def norm(x):
            return tf.reduce_sum(tf.square(tf.convert_to_tensor(table))) + tf.reduce_sum(x @ weight)

        def step(ids):
            rows = tf.gather(table, ids) @ weight
            table.scatter_sub(tf.IndexedSlices(0.1 * rows, ids))
            return tf.reduce_sum(rows)

        x, whole = tf.zeros([4, 2], tf.float64), wh.function(norm)
        assert whole(x) == norm(x)
        wh.function(step)(ids)
        assert wh.memory_report().on_host_bytes and norm(x) < 18.0
        np.testing.assert_allclose(whole(x), norm(x), rtol=1e-14)
    """
    printed(code)
    printed(code, communication__in_process_ranks=2)


def test_nothing_is_held_elsewhere_where_the_device_is_the_host(ranks: Callable[..., None]) -> None:
    ranks(1, **{"memory.offload": "optimizer"})
    weight = tf.Variable([1.0])
    step = wh.function(lambda x: weight.assign_sub(x))
    with pytest.raises(ConfigError, match="device is the host"):
        step(tf.constant([0.5]))
    assert float(weight[0]) == 1.0
