"""Questions to a described plan: why not otherwise, and what if something were otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from cost_model.cluster import cluster_file
from whale.errors import PlanError, WhaleError
from whale.planner import ask, replan
from whale.planner.analytic_search.simplicity import is_simpler, measure_complexity
from whale.planner.report.planfile import Alternative, PlanFile
from whale.planner.why import answer

WHERE = cluster_file.parse(
    "name: two\nnetworks: {f: {type: infiniband-hdr-200}}\nhosts:\n"
    "- {name: new, devices: [{type: a100-sxm-40gb, count: 2}], networks: {f: {nics: 1}}}\n"
    "- {name: old, devices: [{type: t4, count: 2}], networks: {f: {nics: 1}}}\n"
)
BUDGET_S = 0.3


@pytest.fixture(scope="module")
def plan() -> PlanFile:
    model, _ = ask.describe("gpt:layers=4,hidden=2048,heads=16,sequence=1024,vocabulary=30720")
    return ask.plan(WHERE, 32, model, limits=ask.limits([], BUDGET_S))


def test_each_axis_is_answered_by_its_difference_or_why_it_cannot_be(plan: PlanFile) -> None:
    slower = answer(plan, "stages=4", BUDGET_S)
    assert slower.startswith("stages=4: 4 pipeline") and "+" in slower and "ms (" in slower
    assert "infeasible: 16 heads are not divisible by 3" in answer(plan, "tensor=3", BUDGET_S)
    assert "infeasible: 4 layers are not enough for 8 stages" in answer(plan, "stages=8", BUDGET_S)


def test_what_is_simpler_is_said_with_what_it_costs(plan: PlanFile) -> None:
    four = ask.plan(WHERE, 32, plan.transformer, limits=ask.limits(["stages=4", "tensor=1"], BUDGET_S))
    two = ask.plan(
        WHERE, 32, plan.transformer, limits=ask.limits(["stages=2", "tensor=1", "data=1", "chunks=1"], BUDGET_S)
    )
    assert is_simpler(measure_complexity(two.strategy), measure_complexity(four.strategy))
    slower = Alternative(two.strategy, slower_s=0.03 * four.step_s)
    words = answer(msgspec.structs.replace(four, alternatives=(slower,)), "simpler", BUDGET_S)
    assert words.startswith("simpler: 2 pipeline x ") and words.endswith("(+3.00%)")
    faster = Alternative(four.strategy, slower_s=-1e-3 * two.step_s)
    words = answer(msgspec.structs.replace(two, alternatives=(faster,)), "simpler", BUDGET_S)
    assert words.startswith("not as simple, which has to gain 0.2%: 4 pipeline x ") and "(-0.10%)" in words
    assert words.endswith("simpler: nothing that fits was found") and faster.reason.startswith("faster by ")


def test_a_change_that_is_faster_than_the_plan_is_said_to_be(plan: PlanFile) -> None:
    slow = ask.plan(WHERE, 32, plan.transformer, limits=ask.limits(["stages=4", "micro_batches=4"], BUDGET_S))
    said = answer(slow, "micro_batches=32", BUDGET_S)
    assert said.startswith("micro_batches=32: faster than the plan; `whale plan --set 'micro_batches=32'` plans so; ")
    assert ": -" in said and "faster" not in answer(plan, "stages=4", BUDGET_S)
    assert "faster" not in answer(slow, "batch=64", BUDGET_S)  # that is another question


def test_figures_of_a_network_that_is_replaced_are_not_kept(plan: PlanFile) -> None:
    text = cluster_file.to_yaml(WHERE).replace("t4", "a100-sxm-40gb")
    text = text.replace("infiniband-hdr-200", "infiniband-hdr-200\n    gb_per_s: 1")
    slow = ask.plan(cluster_file.parse(text), 512, plan.transformer, limits=ask.limits([], BUDGET_S))
    assert "communication -" in answer(slow, "f=infiniband-hdr-200", BUDGET_S)


def test_stages_and_kinds_of_devices(plan: PlanFile) -> None:
    assert "layers" in answer(plan, "stage=0", BUDGET_S) and "slowest" in answer(plan, "stage=0", BUDGET_S)
    lines = answer(plan, "device=t4", BUDGET_S).splitlines()
    assert (
        lines[0].endswith("of 2 are used")
        and "without t4: " in lines[1]
        and "t4 alone: " in lines[2]
        and "+" in lines[2]
    )


def test_what_if_the_batch_the_hosts_or_the_network_were_others(plan: PlanFile) -> None:
    assert "rows/s instead of" in answer(plan, "batch=64", BUDGET_S)
    more = answer(plan, "new=8", BUDGET_S)
    assert more.startswith("new=8: ") and ": -" in more and "compute -" in more
    assert answer(plan, "f=ethernet-10g", BUDGET_S).startswith("f=ethernet-10g: ")


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("colour=4", "there are new, old, f"),
        ("stage=99", "there is no such stage"),
        ("device=h100", "no such device"),
        ("f=ethernet-1", "ethernet-10g"),
        ("tensor=", "cannot be answered"),
    ],
)
def test_what_is_no_question(plan: PlanFile, question: str, words: str) -> None:
    with pytest.raises(WhaleError, match=words) as error:
        answer(plan, question, BUDGET_S)
    assert isinstance(error.value, PlanError) or "ethernet" in words


def _cluster(hosts: int) -> str:
    return (
        "name: c\nnetworks: {f: {type: infiniband-hdr-200}}\nhosts:\n"
        f"- {{name: a, count: {hosts}, devices: [{{type: a100-sxm-40gb, count: 2}}], networks: {{f: {{nics: 1}}}}}}\n"
    )


def test_a_changed_cluster_is_answered_by_what_moves_and_when_it_pays(tmp_path: Path) -> None:
    model, _ = ask.describe("gpt:layers=8,hidden=2048,heads=16,sequence=1024,vocabulary=30720")
    two = ask.plan(cluster_file.parse(_cluster(2)), 32, model, limits=ask.limits([], BUDGET_S))
    (tmp_path / "more.yaml").write_text(_cluster(4))
    (tmp_path / "less.yaml").write_text(_cluster(1))
    more = answer(two, f"cluster={tmp_path / 'more.yaml'}", BUDGET_S).splitlines()
    assert [line.split()[0] for line in more] == ["plan", "best", "move", "pays"]
    assert "between hosts and devices" in more[2] and "checkpoint" not in more[2]
    assert re.search(r"pays +after [\d,]+ steps", more[3])
    less = answer(two, f"cluster={tmp_path / 'less.yaml'}", BUDGET_S).splitlines()
    assert "does not fit there" in less[0] and less[3] == "pays       at once: the plan cannot go on as it is"


def test_what_moves_is_what_a_device_lacks() -> None:
    """Two replicas with sharded state become four: each lacks the state it takes over, new ones the weights too."""
    model, _ = ask.describe("gpt:layers=2,hidden=256,heads=4,sequence=128,vocabulary=1024")
    fixed = ["stages=1", "tensor=1", "zero=1", "micro_batches=1"]
    two = ask.plan(cluster_file.parse(_cluster(1)), 8, model, limits=ask.limits([*fixed, "data=2"], BUDGET_S))
    four = ask.plan(cluster_file.parse(_cluster(2)), 8, model, limits=ask.limits([*fixed, "data=4"], BUDGET_S))
    found = replan.moves(two, four)
    both = float(model.parameters)
    assert found.lost_bytes == 0
    # The first device keeps the quarter of the state that it had half of, the second one gets another quarter.
    assert found.moved_bytes == pytest.approx(both * (2 * 2 + 12 * 0.75), rel=0.02)
    assert replan.moves(four, four).moved_bytes == 0
    gone = replan.moves(four, two)
    assert gone.lost_bytes == pytest.approx(both * 12 * 0.5, rel=0.02)  # halves of the state were on the host that left


def test_groups_that_each_hold_the_state_move_all_of_it_to_a_new_group() -> None:
    """Four replicas whose state is sharded within each host, after two on one host: the new host lacks all of it."""
    model, _ = ask.describe("gpt:layers=2,hidden=256,heads=4,sequence=128,vocabulary=1024")
    fixed = ["stages=1", "tensor=1", "zero=1", "micro_batches=1"]
    two = ask.plan(cluster_file.parse(_cluster(1)), 8, model, limits=ask.limits([*fixed, "data=2"], BUDGET_S))
    four = ask.plan(cluster_file.parse(_cluster(2)), 8, model, limits=ask.limits([*fixed, "data=4"], BUDGET_S))
    grouped = msgspec.structs.replace(four, strategy=msgspec.structs.replace(four.strategy, shard_ranks=2))
    found = replan.moves(two, grouped)
    assert found.moved_bytes == pytest.approx(model.parameters * (2 * 2 + 12), rel=0.02)
    assert replan.moves(grouped, two).lost_bytes == 0  # the host that stays has all of the state


def test_experts_move_by_the_ranks_that_divide_them() -> None:
    """Experts over two of four replicas after four of four: half of what a device holds is new to it."""
    model, _ = ask.describe("moe:layers=2,hidden=256,heads=4,sequence=128,vocabulary=1024,experts=4,top=1")
    fixed = ["stages=1", "tensor=1", "zero=0", "micro_batches=1", "data=4"]
    where = cluster_file.parse(_cluster(2))
    four = ask.plan(where, 8, model, limits=ask.limits([*fixed, "experts=4"], BUDGET_S))
    two = ask.plan(where, 8, model, limits=ask.limits([*fixed, "experts=2"], BUDGET_S))
    assert replan.moves(four, two).moved_bytes > 0
    assert replan.moves(two, four).moved_bytes < replan.moves(four, two).moved_bytes
