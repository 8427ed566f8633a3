"""Calls that are made again when ranks are gone, and configurations of those that are left."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from whale.config import Config, Mesh
from whale.errors import PlanError
from whale.ir.layout import shard
from whale.ir.mesh import make_one_axis_tiles
from whale.partition.variable_use import VariableUse
from whale.runtime.elastic.call_replay import CallLog
from whale.runtime.elastic.requirements import (
    count_hosts_left,
    find_fitting_changes,
    has_divided_variables,
    refuse_plan,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("given", "size", "changes"),
    [
        ({"mesh": Mesh(data=2, tensor=2)}, 2, {"mesh": Mesh(tensor=2)}),
        ({"mesh": Mesh(stage=2, data=4)}, 6, {"mesh": Mesh(stage=2, data=3)}),
        ({"mesh": Mesh(data=2, tensor=2)}, 3, {"mesh": Mesh()}),
        ({"mesh": Mesh(expert=4)}, 3, {"mesh": Mesh(expert=3)}),
        ({"mesh": Mesh(tensor=2)}, 3, {"mesh": Mesh(tensor=3)}),
        ({}, 3, {}),
    ],
)
def test_what_of_a_configuration_is_for_the_ranks_that_are_left(given: dict, size: int, changes: dict) -> None:
    assert find_fitting_changes(Config(given), size) == changes


def test_hosts_of_those_that_are_left() -> None:
    assert count_hosts_left((2, 1, 2), (0, 3, 4)) == (1, 2)
    assert count_hosts_left((), (0, 1)) == ()


def test_parts_that_one_rank_alone_has_need_copies() -> None:
    everywhere = VariableUse(frozenset(range(4)), True)
    halves = VariableUse(frozenset(range(4)), True, tiles=make_one_axis_tiles(shard(0, (3, 3))))
    quarters = VariableUse(frozenset(range(4)), True, tiles=make_one_axis_tiles(shard(0, (2, 2, 2, 2))))
    stage = VariableUse(frozenset({1}), True)
    assert [has_divided_variables({"v": use}, 4) for use in (everywhere, halves, quarters, stage)] == [
        False,
        True,
        True,
        True,
    ]
    for use in (everywhere, halves):
        refuse_plan({"v": use}, {}, 4, copies=False)
    for use in (quarters, stage):
        refuse_plan({"v": use}, {}, 4, copies=True)
        with pytest.raises(PlanError, match="lost with the only rank that holds it"):
            refuse_plan({"v": use}, {"v": "w"}, 4, copies=False)


class _Script:
    """A script whose calls take steps: each adds its batch to a sum, and the script doubles a rate after each."""

    def __init__(self) -> None:
        self.calls = CallLog(lambda value: value)
        self.rate, self.total = tf.Variable(1.0), 0.0
        self.seen: list[float] = []

    def take(self, args: Any, kwargs: Any) -> float:
        batch = self.calls.draw_batch(lambda: float(len(self.seen) + 1))
        self.seen.append(batch)
        self.total += float(self.rate) * batch
        self.calls.at.steps += 1
        return self.total

    def call(self) -> None:
        self.calls.begin()
        self.calls.redo()
        self.take((), {})
        self.calls.record_step(self.take, (), {})
        self.calls.at.calls += 1


def test_a_step_that_was_taken_again_is_still_an_earlier_call_s_when_it_goes_once_more() -> None:
    script = _Script()
    script.call()
    script.calls.begin()  # after the call, as speeds are looked at
    for _ in range(2):
        script.calls.go_back(0, list)
        assert script.calls.undone is not None and script.calls.at.calls == 0
        script.calls.begin()
        script.calls.redo()
        assert script.calls.at.calls == script.calls.at.steps == 1
    assert script.seen == [1.0] * 3


def test_a_step_of_an_earlier_call_is_taken_again_before_the_next_one() -> None:
    script = _Script()
    script.call()
    before = script.total
    script.call()
    script.calls.begin()  # the third call, in which it hears that somebody is gone
    script.calls.go_back(1, lambda: [(script.rate, tf.constant(3.0))])
    script.total = before
    assert (script.calls.at.steps, script.calls.at.calls) == (1, 1)
    script.calls.redo()
    assert script.seen == [1.0, 2.0, 2.0]  # with the batch that it had drawn
    assert (script.total, float(script.rate)) == (3.0, 3.0)  # the script's value is there after it, not before
    assert (script.calls.at.steps, script.calls.at.calls, script.calls.undone) == (2, 2, None)
    script.calls.redo()
    assert script.seen == [1.0, 2.0, 2.0]


def test_a_step_of_the_same_call_is_simply_taken_again() -> None:
    script = _Script()
    script.call()
    script.calls.begin()
    script.take((), {})
    script.calls.go_back(1, list)
    assert script.calls.undone is None and script.calls.at.steps == 1
