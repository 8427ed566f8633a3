"""Schedules: complete, in the order of their dependencies, free of deadlocks, and as long as their formulas say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.errors import PlanError
from whale.ir.pipeline_schedule import (
    PhaseKind,
    Schedule,
    compute_bubble_s,
    count_credits,
    count_live_micro_batches,
    format_schedule,
    iterate_dependencies,
    make_schedule,
    parse_schedule,
    play,
)

GOLDEN = {
    ("gpipe", 2, 1, 3): "0  F0 F1 F2 B2 B1 B0\n1  F0 F1 F2 B2 B1 B0\n",
    ("1f1b", 3, 1, 4): ("0  F0 F1 F2 B0 F3 B1 B2 B3\n1  F0 F1 B0 F2 B1 F3 B2 B3\n2  F0 B0 F1 B1 F2 B2 F3 B3\n"),
    ("1f1b", 2, 2, 2): "0  F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1\n1  F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1\n",
    ("zb-h1", 2, 1, 3): "0  F0 F1 B0 W0 F2 B1 W1 B2 W2\n1  F0 B0 F1 B1 W0 F2 B2 W1 W2\n",
}

some = st.one_of(
    st.tuples(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(1, 7), st.just(1), st.integers(1, 14)),
    st.tuples(st.just("1f1b"), st.integers(2, 6), st.integers(2, 4), st.integers(1, 20)),
)


@pytest.mark.parametrize("of", GOLDEN, ids=lambda of: "-".join(map(str, of)))
def test_as_text(of: tuple[str, int, int, int]) -> None:
    assert format_schedule(make_schedule(*of)) == GOLDEN[of]


@given(some)
def test_every_phase_once_and_in_an_order_that_ends(of: tuple[str, int, int, int]) -> None:
    name, stages, chunks, micro_batches = of
    rows = make_schedule(*of)
    kinds = 3 if name == "zb-h1" else 2
    assert len(rows) == stages
    for row in rows:
        wanted = {(c, m, PhaseKind(k)) for c in range(chunks) for m in range(micro_batches) for k in range(kinds)}
        assert set(row) == wanted and len(row) == len(wanted)
    end = play(rows)  # raises where phases wait for each other
    assert all(end[earlier] < end[later] for earlier, later in iterate_dependencies(rows))
    assert parse_schedule(format_schedule(rows)) == rows


@given(some, st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3))
def test_with_its_credits_it_ends_whatever_the_passes_take(of: tuple[str, int, int, int], s: list[float]) -> None:
    rows = make_schedule(*of)
    granted = count_credits(rows)
    play(rows, *s, credits=granted)
    # As in the run that they are counted in nobody waits longer than without limits.
    assert play(rows, credits=granted) == play(rows)


def test_without_room_on_an_edge_nothing_ends() -> None:
    rows = make_schedule("1f1b", 3, 1, 4)
    with pytest.raises(PlanError, match="wait for each other"):
        play(rows, credits=dict.fromkeys(count_credits(rows), 0))


@given(some)
def test_the_bubble_is_that_of_the_formula(of: tuple[str, int, int, int]) -> None:
    name, stages, chunks, micro_batches = of
    if (name == "zb-h1" or chunks > 1) and micro_batches < stages:
        return  # the formula is of a pipeline that is full
    forward_s, backward_s, weights_s = 1.0, 2.0, 1.0
    split = name == "zb-h1"
    end = play(make_schedule(*of), forward_s, backward_s - weights_s if split else backward_s, weights_s)
    bubble = compute_bubble_s(
        name, stages, chunks, chunks * forward_s, chunks * backward_s, weights_s if split else 0.0
    )
    busy_s = chunks * micro_batches * (forward_s + backward_s)
    assert max(end.values()) == pytest.approx(busy_s + bubble)


def test_live_micro_batches() -> None:
    def live(rows: Schedule) -> list[int]:
        return list(map(count_live_micro_batches, rows))

    assert live(make_schedule("1f1b", 4, 1, 8)) == [4, 3, 2, 1]
    assert live(make_schedule("gpipe", 4, 1, 8)) == [8] * 4
    assert live(make_schedule("zb-h1", 4, 1, 8)) == [4] * 4  # the memory of 1F1B's first stage
    # Narayanan et al., SC 2021, section 2.2: interleaving holds (p - 1) / (p v) more.
    assert count_live_micro_batches(make_schedule("1f1b", 4, 2, 8)[0]) == 11


def test_zero_bubble_is_shorter_than_one_f_one_b() -> None:
    for stages in (2, 3, 4, 8):
        shorter = max(play(make_schedule("zb-h1", stages, 1, 2 * stages), 1.0, 1.0, 1.0).values())
        assert shorter < max(play(make_schedule("1f1b", stages, 1, 2 * stages), 1.0, 2.0).values())


def test_schedules_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="GPipe has one chunk"):
        make_schedule("gpipe", 4, 2, 8)
    with pytest.raises(PlanError, match="no such pipeline schedule"):
        make_schedule("fifo", 4, 1, 8)
    with pytest.raises(PlanError, match="at least one stage"):
        make_schedule("1f1b", 0, 1, 8)
    with pytest.raises(ValueError, match="'X0' is not a phase"):
        parse_schedule("0  X0")
