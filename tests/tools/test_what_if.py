"""A choice that a person fixes for a script's plan, beside the plan that it has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import whale as wh
from whale.errors import PlanError
from whale.ir.layout import Shard
from whale.planner.graph_search.plan_prediction import Planned
from whale.tools import dry_run
from whale.tools.what_if import compare, exchanges, read_what_if, with_choice

SCRIPT = """
import contextlib
import tensorflow as tf
import whale as wh

tf.keras.backend.clear_session()
wh.init()
one, two = tf.Variable(tf.ones((64, 96)), name="one"), tf.Variable(tf.ones((96, 400)), name="two")

@wh.function
def step(x):
    with tf.GradientTape() as tape:
        hidden = tf.nn.relu(tf.matmul(x, one, name="first"))
        with SCOPE:
            logits = tf.matmul(hidden, two, name="second")
            loss = tf.reduce_mean(tf.nn.log_softmax(logits)[:, 0])
    for v, g in zip((one, two), tape.gradient(loss, (one, two))):
        v.assign_sub(0.1 * g)
    return loss

step(tf.ones((8, 64)))
"""


def planned(folder: Path, scope: str = "contextlib.nullcontext()") -> Planned:
    (folder / "s.py").write_text(SCRIPT.replace("SCOPE", scope))
    return dry_run.first_step(str(folder / "s.py"), (), 4)


def split_variables(found: Planned) -> set[str]:
    plan = found.plan.inner or found.plan
    names = {v.node: v.name.partition(":")[0] for v in found.program.variables}
    return {names[node] for node, p in plan.variables.items() if isinstance(p, Shard)}


def test_planning_a_script_leaves_the_process_as_it_was(ranks: Callable[..., None], tmp_path: Path) -> None:
    before = list(sys.argv), list(sys.path)
    planned(tmp_path)
    assert (sys.argv, sys.path) == before
    ranks(2)
    assert wh.size() == 2


@pytest.mark.parametrize("ways", [2, 4])
def test_one_layer_is_divided_and_the_rest_stays(tmp_path: Path, ways: int) -> None:
    free = planned(tmp_path)
    assert not split_variables(free)
    other = with_choice(free, read_what_if(f"second.split={ways}"))
    assert split_variables(other) == {"two"}
    assert exchanges(other) != exchanges(free)
    line = compare(free, read_what_if(f"second.split={ways}"), None)
    assert "moved a step" in line and "no predicted time" in line


def test_what_a_scope_divides_is_held_whole(tmp_path: Path) -> None:
    free = planned(tmp_path, "wh.split()")
    assert split_variables(free) == {"two"}
    whole = with_choice(free, read_what_if("sec*.split=1"))
    assert not split_variables(whole)
    assert whole.plan.logical_bytes > free.plan.logical_bytes


def test_what_cannot_be_says_why(tmp_path: Path) -> None:
    free = planned(tmp_path)
    assert "infeasible: 4 ranks are not divisible by 3" in compare(free, read_what_if("second.split=3"), None)
    with pytest.raises(PlanError, match="no operation of that name has a weight") as error:
        compare(free, read_what_if("relu.split=2"), None)
    assert "first" in str(error.value) and "second" in str(error.value)
    for text in ("stages=2", "second.split=0", "second=2"):
        with pytest.raises(PlanError, match="cannot be fixed"):
            read_what_if(text)
