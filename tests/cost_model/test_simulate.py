"""Schedules against their formulas, and the simulator against hand-made timelines."""

from __future__ import annotations

import itertools
import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.simulator import Tasks, least_end_s, memory_curve, pipeline_tasks, simulate
from whale.errors import PlanError
from whale.ir.pipeline_schedule import compute_bubble_fraction, count_live_micro_batches, make_schedule
from whale_ops.pipeline import play_pipeline


def play(name: str, stages: int, chunks: int, micro_batches: int) -> tuple[Tasks, float]:
    """The pipeline with forward passes of 1 s, backward passes of 2 s and free sends."""
    orders = make_schedule(name, stages, chunks, micro_batches)
    number = {}
    for stage, order in enumerate(orders):
        for chunk, micro_batch, backward in order:
            number[chunk * stages + stage, micro_batch, backward] = len(number)
    tasks, last = Tasks(), stages * chunks - 1
    for stage, order in enumerate(orders):
        for chunk, micro_batch, backward in order:
            part = chunk * stages + stage
            after: tuple[int, ...] = ()
            if backward:
                after = (number[(part, micro_batch, False) if part == last else (part + 1, micro_batch, True)],)
            elif part:
                after = (number[part - 1, micro_batch, False],)
            tasks.add(stage, 2.0 if backward else 1.0, after, -1.0 if backward else 1.0)
    return tasks, simulate(tasks).total_s


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
def test_the_bubble_is_that_of_the_formula(name: str, stages: int, chunks: int, groups: int) -> None:
    chunks = 1 if name == "gpipe" or stages == 1 else chunks
    micro_batches = stages * groups
    tasks, total_s = play(name, stages, chunks, micro_batches)
    busy_s = 3.0 * chunks * micro_batches
    assert total_s == pytest.approx(busy_s * (1 + compute_bubble_fraction(stages, chunks, micro_batches)))
    for stage in range(stages):
        curve = memory_curve(tasks, simulate(tasks), [stage])
        assert curve[-1][1] == 0 and all(level >= 0 for _, level in curve)
        order = make_schedule(name, stages, chunks, micro_batches)[stage]
        assert sorted(order) == sorted(set(order)) and len(order) == 2 * chunks * micro_batches
        assert max(level for _, level in curve) == count_live_micro_batches(order)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=7), st.integers(1, 80))
def test_ends_of_one_f_one_b_are_those_of_its_tasks(times: list[tuple[float, float]], micro_batches: int) -> None:
    stages = len(times)
    ahead, back = [[f] for f, _ in times], [[b] for _, b in times]
    tasks = pipeline_tasks(make_schedule("1f1b", stages, 1, micro_batches), ahead, back, [[0.0]] * stages)
    timeline = simulate(tasks)
    ends = [max(e for e, on in zip(timeline.end_s, tasks.resource) if on == s) for s in range(stages)]
    assert play_pipeline(ahead, back, micro_batches) == pytest.approx(ends, 1e-12)


def test_streams_overlap_and_a_shared_link_takes_turns() -> None:
    tasks = Tasks()
    first, second = tasks.add(0, 2.0), tasks.add(1, 1.0)
    sends = [tasks.add(9, 3.0, (first,)), tasks.add(9, 3.0, (second,))]
    end = tasks.add(0, 1.0, (sends[0],))
    timeline = simulate(tasks, shared=frozenset({9}))
    # The second rank is ready first: its message goes from 1 to 4, the other one from 4 to 7.
    assert [timeline.start_s[send] for send in sends] == [4.0, 1.0]
    assert timeline.end_s[end] == timeline.total_s == 8.0
    assert timeline.busy_s == {0: 3.0, 1: 1.0, 9: 6.0}


def test_tasks_that_wait_for_each_other_are_an_error() -> None:
    tasks = Tasks()
    tasks.add(0, 1.0, (1,))
    tasks.add(0, 1.0, (0,))
    for shared in (frozenset(), frozenset({7})):
        with pytest.raises(PlanError, match="task 0 of 2 never starts"):
            simulate(tasks, shared)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.lists(st.integers(0, 30), max_size=3)), max_size=30))
def test_streams_alone_give_the_same_timeline_in_any_order_of_events(given_tasks) -> None:
    tasks = Tasks()
    for number, (resource, seconds, after) in enumerate(given_tasks):
        tasks.add(resource, float(seconds), tuple({one % number for one in after} if number else ()))
    assert simulate(tasks) == simulate(tasks, shared=frozenset({99}))


@pytest.mark.parametrize("alike", [True, False])
def test_ends_of_long_pipelines_are_those_of_their_tasks(alike: bool) -> None:
    """Plays all stages and micro-batches of which more or fewer are left over after the last whole group."""
    r = random.Random(alike)
    for stages, micro_batches in itertools.product((2, 3, 5, 8, 12), range(60, 150, 7)):
        ahead = [[1.0 if alike else r.uniform(0.5, 1.5)] for _ in range(stages)]
        back = [[2.0 if alike else r.uniform(1.0, 3.0)] for _ in range(stages)]
        orders = make_schedule("1f1b", stages, 1, micro_batches)
        timeline = simulate(pipeline_tasks(orders, ahead, back, [[0.0]] * stages))
        ends = [timeline.end_s[length - 1] for length in accumulate(map(len, orders))]
        assert play_pipeline(ahead, back, micro_batches) == pytest.approx(ends, 1e-12), (stages, micro_batches)


@pytest.mark.parametrize(
    "stages, chunks, micro_batches", [(2, 2, 1), (3, 2, 5), (4, 3, 4), (3, 2, 7), (2, 3, 60), (4, 2, 100), (3, 4, 75)]
)
@pytest.mark.parametrize("alike", [True, False])
def test_ends_of_interleaved_stages_are_those_of_their_tasks(
    stages: int, chunks: int, micro_batches: int, alike: bool
) -> None:
    """Also where only some groups of micro-batches are simulated, because all move alike."""
    r = random.Random(stages + micro_batches)
    ahead = [[1.0 if alike else r.uniform(0.5, 1.5)] * chunks for _ in range(stages)]
    back = [[2 * seconds for seconds in own] for own in ahead]
    orders = make_schedule("1f1b", stages, chunks, micro_batches)
    # Others of the shape, of which not all keep step.
    others = [[[seconds * r.uniform(0.5, 1.5) for seconds in own] for own in ahead] for _ in range(3)]
    for forward_s, backward_s in ((ahead, back), *zip(others, others)):
        timeline = simulate(pipeline_tasks(orders, forward_s, backward_s, [[0.0] * chunks] * stages))
        ends = [timeline.end_s[length - 1] for length in accumulate(map(len, orders))]
        assert play_pipeline(forward_s, backward_s, micro_batches) == pytest.approx(ends, 1e-12)
        assert least_end_s(forward_s, backward_s, micro_batches) <= ends[0] * (1 + 1e-12)


def test_a_bound_of_a_pipeline_is_that_of_a_stage_that_waits() -> None:
    """Tests that it is exact of equal stages; else it is the slowest stage's work and what this waits for."""
    r = random.Random(0)
    for _ in range(50):
        stages, micro_batches = r.randint(1, 6), r.randint(1, 12)
        ahead = [[r.uniform(0.5, 1.5)] for _ in range(stages)]
        back = [[r.uniform(1.0, 3.0)] for _ in range(stages)]
        ends = play_pipeline(ahead, back, micro_batches)
        assert least_end_s(ahead, back, micro_batches) <= ends[0] * (1 + 1e-12)
        ends = play_pipeline(ahead[:1] * stages, back[:1] * stages, micro_batches)
        least_s = least_end_s(ahead[:1] * stages, back[:1] * stages, micro_batches)
        assert least_s == pytest.approx(ends[0])


def test_long_pipelines_are_not_simulated_to_the_end() -> None:
    """A hundred thousand micro-batches take no longer than some hundreds, once the stages keep step."""
    ahead, back = [[1.0], [1.5], [1.0]], [[2.0], [3.0], [2.0]]
    ends = play_pipeline(ahead, back, 100_000)
    few = play_pipeline(ahead, back, 100)
    assert [a - b for a, b in zip(ends, few)] == pytest.approx([4.5 * 99_900] * 3)
