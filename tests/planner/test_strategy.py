"""Strategies: what they say in a line, what a file of one may not say, and the words of a program's settings."""

from __future__ import annotations

from typing import get_args

import pytest

from whale.ir.strategy import MOST_MICRO_BATCHES, DeviceGroup, Offload, ParallelStrategy, Recompute, Stage
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.predict import complete, recompute_of
from whale.planner.graph_search.strategies import divide_over_all

TWO = (Stage(((0, 3),), (DeviceGroup(0, 2, 2, 4),)), Stage(((3, 4),), (DeviceGroup(1, 1, 4, 2),), "full"))


def test_a_strategy_says_itself_in_a_line() -> None:
    found = ParallelStrategy(TWO, 8, sequence_parallel=True, zero=1, offload="optimizer")
    assert found.format_summary() == (
        "2 pipeline x 2-4 data x 1-2 tensor on 8 devices, 8 micro-batches of 2-4 rows, full recompute in stage 1, "
        "sequence parallel, ZeRO 1, state offloaded"
    )
    assert (
        divide_over_all("every rank alone", 4, replicated=True).format_summary()
        == "4 devices that all compute everything"
    )
    split = divide_over_all("", 4, 2, split=("head",), shares=(3, 3, 1, 1))
    assert split.format_summary() == "1 pipeline x 2 data x 2 tensor on 4 devices, rows 3+3+1+1, tensors from head on"
    assert [(low, high) for _, low, high in ParallelStrategy(TWO).ordered_layers] == [(0, 3), (3, 4)]


@pytest.mark.parametrize(
    "wrong",
    [
        ParallelStrategy(()),
        ParallelStrategy((Stage(parts=()),)),
        ParallelStrategy((Stage(parts=(DeviceGroup(0, 0),)),)),
        ParallelStrategy((Stage(parts=(DeviceGroup(rows=-1),)),)),
        ParallelStrategy(micro_batches=MOST_MICRO_BATCHES + 1),
        ParallelStrategy((TWO[0], Stage(((3, 4), (5, 6)), TWO[1].parts))),
    ],
)
def test_what_no_strategy_has_is_said(wrong: ParallelStrategy) -> None:
    assert wrong.find_problem() and not ParallelStrategy(TWO, 8).find_problem()


def test_what_a_strategy_leaves_to_settings_is_written_down_in_its_own_words() -> None:
    plain = divide_over_all("data parallel", 2)
    assert complete(plain, PlanSettings(size=2)).format_summary().endswith("on 2 devices, 1 micro-batch")
    for recompute in set(get_args(Recompute)) - {"selective", "full"}:  # which a program's settings do not know
        for offload in get_args(Offload):
            settings = PlanSettings(size=2).but(
                memory__recompute="" if recompute == "none" else recompute,
                memory__offload="" if offload == "none" else offload,
                zero__level=3,
                time__micro_batches=2,
            )
            found = complete(plain, settings)
            assert (found.recompute, found.offload, found.zero, found.micro_batches) == (recompute, offload, 3, 2)
            assert recompute_of(found) == settings.memory.recompute
    for recompute in ("selective", "full"):
        assert recompute_of(divide_over_all("", 2, recompute=recompute)) == "auto"
        assert complete(divide_over_all("", 2, recompute=recompute), settings).recompute == recompute
