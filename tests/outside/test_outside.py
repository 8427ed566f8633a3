"""The runner for programs of others: what it changes in them, notes of them, and says of those that differ."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.outside.recording import is_of_whale
from tests.outside.run import with_steps_of_whale
from tests.outside.table import (
    COLUMNS,
    UNSTABLE,
    Result,
    compare,
    find_alone,
    format_row,
    merge_lines,
    read_program,
    read_results,
    save_results,
)

PROGRAM = '''"""A step of its own; its weights differ by {difference} under Whale"""
# source: nowhere
# environment: A_B=1
import sys
import keras, numpy as np, tensorflow as tf
layer = keras.layers.Dense(2)
optimizer = keras.optimizers.Adam(0.1)
count = tf.Variable(0)
@tf.function
def train(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(layer(x) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables))
    return {{"loss": loss}}
if "whale" not in sys.modules:
    keras.optimizers.Optimizer(0.1)  # as saving makes one, on the first rank only
else:
    layer.build((None, 3))
    layer.kernel.assign(layer.kernel + {difference})
for n in (4, 4, 3):
    train(tf.constant(np.random.normal(size=(n, 3)).astype("float32")))
    count.assign_add(1)
'''


def test_a_program_is_read_by_its_head(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(PROGRAM.format(difference=0.0))
    program = read_program(path)
    assert (program.name, program.source, program.environment) == ("one", "nowhere", (("A_B", "1"),))
    assert program.unusual.startswith("A step of its own")
    assert not program.rounded
    assert with_steps_of_whale("@tf.function\nf = tf.function(g); tf.functions") == (
        "@wh.function\nf = wh.function(g); tf.functions"
    )


def test_what_whale_measures_is_no_step_of_the_program() -> None:
    own, timed = tf.function(lambda: 1.0), tf.function(lambda: 1.0)
    timed.python_function.__module__ = "whale.runtime.compile.microbenchmark"
    assert (is_of_whale(own), is_of_whale(timed)) == (False, True)


def test_a_row_says_what_differs_and_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(PROGRAM.format(difference=0.0))
    found = [
        Result("replica", 1e-15, first_s=2.0, plain_first_s=1.0),
        Result("zero", 0.5),
        Result("three", problem="whale.errors.PlanError: it cannot be"),
        Result("auto_parallel", problem="Segmentation fault"),
    ]
    assert "| unstable |" in format_row(read_program(path), [Result("three", problem=f"{UNSTABLE}, by 5e-01: fit 1")])
    row = format_row(read_program(path), found)
    assert row.count("1e-15") == row.count("**5e-01**") == row.count("refused") == row.count("**failed**") == 1
    assert row.endswith("| 1.0 | 2.0 | 2.0 |\n")


def test_results_of_a_program_that_was_changed_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(PROGRAM.format(difference=0.0))
    save_results(read_program(path), [Result("zero", 0.5)], tmp_path / "kept")
    assert read_results(read_program(path), tmp_path / "kept") == [Result("zero", 0.5)]
    later = path.stat().st_mtime + 10
    os.utime(path, (later, later))
    assert read_results(read_program(path), tmp_path / "kept") == []


def test_rows_of_programs_that_are_not_in_the_folder_stay() -> None:
    before = f"# Programs\n\n{COLUMNS}\n|---|\n| a | old |\n| c | old |\n\n* a, zero: old\n* b, zero: old\n"
    rows = merge_lines(before, "| ", "| c | new |\n| b | new |\n", {"b", "c"})
    assert rows.splitlines() == ["| a | old |", "| b | new |", "| c | new |"]
    assert merge_lines(before, "* ", "", {"b", "c"}) == "* a, zero: old\n"
    assert merge_lines("", "| ", "| b | new |\n", {"b"}) == "| b | new |\n"


@pytest.mark.parametrize("difference", [0.0, 1e-6])
def test_a_program_that_differs_is_seen(tmp_path: Path, difference: float) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(difference=difference))
    program = read_program(path)
    assert find_alone(program, tmp_path, tmp_path / "kept") == ""
    assert len(list((tmp_path / "kept" / "alone").iterdir())) == 2
    noted = np.load(tmp_path / "plain-rank0.npz").files
    assert [f"train {i} [0]" for i in (1, 2, 3)] == [name for name in noted if name.startswith("train")]
    assert any("Adam" in name for name in noted)
    assert any("(count)" in name for name in noted)
    result = compare(program, "three", tmp_path)
    assert result.problem == ""
    assert result.is_equal == (not difference), result
    assert result.first_s > 0 < result.plain_first_s
