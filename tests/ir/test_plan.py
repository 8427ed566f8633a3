"""Plans as data: JSON both ways, versions, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from tests.ir.strategies import plans
from tests.programs import mlp, planned
from whale.ir.layout import P_SUM, B, shard
from whale.ir.plan import Plan, PlanRecord, Reshard, file_text, load_plan, plan_from_json, record_from_text, strategy_of
from whale.ir.plan_text import format_plan
from whale.ir.program import Ref


@settings(max_examples=150)
@given(plans)
def test_json_round_trip(plan: Plan) -> None:
    assert plan_from_json(plan.to_json()) == plan


def test_a_saved_plan_is_the_plan(tmp_path: Path) -> None:
    plan = planned(mlp(), 5, 3)
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == replace(plan, strategy=strategy_of(plan))
    assert loaded.reshard_of == plan.reshard_of and loaded.groups == plan.groups


def test_saving_twice_gives_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        planned(mlp(), 4, 4).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_unknown_fields_are_ignored() -> None:
    plan = planned(mlp(), 4, 4)
    data = msgspec.json.decode(plan.to_json())
    data["added_in_a_later_minor_version"] = {"x": [1]}
    assert plan_from_json(msgspec.json.encode(data)) == plan


def test_a_file_says_the_strategy_that_a_program_carries_out() -> None:
    record = planned(mlp(), 5, 3).record()
    (stage,) = record.strategy.stages
    assert (record.planner, record.batch, stage.ranks, stage.replicas) == ("scopes", 8, 2, 2)
    assert record.strategy.shares == (5, 3) and record.strategy.micro_batches == 1
    assert planned(mlp(), 4, 4).record().strategy.stages[0].parts[0].rows == 4


def _record() -> dict[str, Any]:
    return msgspec.json.decode(file_text(planned(mlp(), 4, 4).record()))


def test_another_version_is_refused() -> None:
    data = {**_record(), "format_version": "2.0"}
    with pytest.raises(ValueError, match=r"format_version 2\.0; this version of Whale reads .whale-plan. of 1\.x"):
        record_from_text(msgspec.json.encode(data), PlanRecord)
    newer = {**_record(), "format_version": "1.9", "more": 1}
    assert record_from_text(msgspec.json.encode(newer), PlanRecord).plan is not None


@pytest.mark.parametrize(
    "change", ["no json", "no version", "field missing", "wrong type", "bad placement", "bad number"]
)
def test_what_is_no_plan_is_refused_with_a_sentence(change: str) -> None:
    data = _record()
    if change == "no version":
        del data["format_version"]
    elif change == "field missing":
        del data["program"]["fingerprint"]
    elif change == "wrong type":
        data["program"]["size"] = "two"
    elif change == "bad placement":
        data["program"]["returned"][""] = ["S0"]
    elif change == "bad number":
        data["program"]["graphs"][""]["relu"] = 10_000
    text = b"not json at all" if change == "no json" else msgspec.json.encode(data)
    with pytest.raises(ValueError, match="plan"):
        _ = record_from_text(text, PlanRecord).plan


def test_derived_numbers() -> None:
    rows = [Reshard("", Ref("a", i), P_SUM, B, f"k{i}", 10 * i, group) for i, group in enumerate([0, -1, 0, 1])]
    plan = Plan("p", "f", 2, reshards=tuple(rows), split_flops=3, total_flops=4)
    assert plan.logical_bytes == 60
    assert plan.groups == {0: (rows[0], rows[2]), 1: (rows[3],)}
    assert plan.reshard_of["", Ref("a", 1), B] is rows[1]
    assert plan.split_flops_fraction == 0.75
    assert Plan("p", "f", 2).split_flops_fraction == 1.0
    assert ("", Ref("a", 1), shard(0, (1, 1))) not in plan.reshard_of


def test_a_notebook_shows_what_whale_plan_prints() -> None:
    plan = Plan("step <1>", "", 2, ("a & b", "c"))
    shown = plan._repr_html_()  # type: ignore[attr-defined]
    assert shown.startswith("<pre") and "Plan for step &lt;1&gt;: 2 ranks: 2 replicas (a &amp; b, c)" in shown
    assert len(shown.splitlines()) == len(format_plan(plan).splitlines()) + 1
