"""A script's saved plan is checked against its program and a cluster, without the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.programs import mlp, planned
from tests.runtime.compile.test_auto import double
from whale.cli import main
from whale.errors import PlanError
from whale.ir.layout import B, Strategy
from whale.ir.plan import Plan, Reshard, StageGroup, load_plan
from whale.ir.plan_text import list_changed_layouts
from whale.ir.program import Node, Program, sort_nodes
from whale.partition import verify_saved_plan
from whale.partition.spmd import partition_for_rank
from whale.passes.plan_builder import expand
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.plan_prediction import rank_programs
from whale.tools import dry_run
from whale.tools.run_as_main import locate, make_relative

__all__ = ["double"]

SCRIPT = """
import tensorflow as tf
import whale as wh
from tests.runtime.compile.test_auto import Deep
tf.keras.backend.clear_session()
wh.init({config})
deep = Deep(wh.function)
deep.step(*deep.batch(0))
"""
CLUSTER = """
name: small
networks: {fabric: {type: infiniband-hdr-200}}
hosts: [{name: h, count: COUNT, devices: [{type: t4, count: 1, memory_gb: GB}], networks: {fabric: {nics: 1}}}]
"""


def made(folder: Path, config: Mapping[str, Any]) -> Path:
    (folder / "s.py").write_text(SCRIPT.replace("{config}", repr(config)))
    dry_run.main(str(folder / "s.py"), (), 2, str(folder / "plan.json"))
    return folder / "plan.json"


def clusters(folder: Path, name: str, count: int, gb: float) -> str:
    (folder / name).write_text(CLUSTER.replace("COUNT", str(count)).replace("GB", f"{gb:.9f}"))
    return str(folder / name)


def test_a_plan_is_checked_against_script_and_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, {"memory.zero": 1})
    capsys.readouterr()
    assert main(["check", str(path), "--cluster", clusters(tmp_path, "good.yaml", 2, 8)]) == 0
    assert capsys.readouterr().out.startswith("good: ")
    assert main(["check", str(path), "--cluster", clusters(tmp_path, "small.yaml", 2, 1e-5)]) == 1
    assert "rank 1 needs" in (text := capsys.readouterr().out) and "its device has 9.8 KiB" in text
    assert main(["check", str(path), "--cluster", clusters(tmp_path, "one.yaml", 1, 8)]) == 1
    assert "2 ranks, and the cluster small only 1 devices" in capsys.readouterr().out
    plan = load_plan(path)
    node = next(n for n, s in plan.strategies[""].items() if "MatMul" in n and str(s.outputs[0]).startswith("S(0)"))
    wrong = {**plan.strategies[""], node: Strategy((B, B), plan.strategies[""][node].outputs, "wrong")}
    replace(plan, strategies={**plan.strategies, "": wrong}).save(path)
    assert main(["check", str(path)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "the plan is not legal" in text and node in text


def test_a_plan_that_does_not_fit_an_accelerator_names_the_hosts_memory(tmp_path: Path) -> None:
    plan = load_plan(made(tmp_path, {}))
    needed = max(map(sum, zip(*plan.memory.values())))
    on = dry_run.PredictionTarget(None, clusters(tmp_path, "small.yaml", 2, (needed - 1) / 1e9))
    with pytest.raises(PlanError) as error:
        dry_run.main(str(tmp_path / "s.py"), (), 2, prediction=on)
    assert "memory.offload=optimizer (" in str(error.value)


def test_exchanges_that_nobody_answers_are_found() -> None:
    program = mlp(8, 4, 4, 2)
    plan = planned(program, 4, 4)
    expanded = expand(program, plan.expanded, PlanSettings(size=2))
    first, second = (partition_for_rank(expanded, plan, rank, "c", None) for rank in range(2))
    assert verify_saved_plan.check_exchanges([first, second]) == []
    sums = [n for n in second.nodes if n.op == "WhaleAllReduce"]
    without = second.replace_nodes(tuple(n for n in second.nodes if n is not sums[0]))
    assert "do not take part" in verify_saved_plan.check_exchanges([first, without])[0]
    other = tuple(replace(n, op="WhaleAllGather") if n is sums[0] else n for n in second.nodes)
    assert "rank 1 WhaleAllGather" in verify_saved_plan.check_exchanges([first, second.replace_nodes(other)])[0]


def pipeline(tmp_path: Path) -> list[Program]:
    """What two ranks run of a pipeline of two stages."""
    path = made(tmp_path, {"mesh.auto_parallel": True, "pipeline.stages": 2})
    plan = load_plan(path)
    assert len(plan.stage_groups) == 2
    assert plan.script == ("s.py",)  # from the plan's folder, with which it may move
    found = rank_programs(dry_run.first_step(str(tmp_path / "s.py"), (), 2, str(path)))
    assert verify_saved_plan.check_exchanges(found) == verify_saved_plan.check_waits(found) == []
    return found


def test_the_script_is_found_from_the_plans_folder() -> None:
    assert make_relative(("/a/b/train.py", "-x"), "/a/plans/p.json") == ("../b/train.py", "-x")
    assert locate(("../b/train.py", "-x"), "/new/plans/p.json") == ("/new/b/train.py", "-x")
    assert make_relative(("/a/train.py",), "/tmp/p.json") == ("/a/train.py",) == locate(("/a/train.py",), "/tmp/p.json")
    assert locate((), "p.json") == ()


def exchanges(program: Program, op: str) -> list[Node]:
    return [n for n in program.nodes if n.op == op]


def after(program: Program, late: str, early: str) -> Program:
    """The program with an exchange that waits for another one."""
    nodes = {n.name: replace(n, controls=(*n.controls, early)) if n.name == late else n for n in program.nodes}
    return program.replace_nodes(sort_nodes(nodes))


def test_sends_without_receives_and_ranks_that_wait_for_each_other_are_found(tmp_path: Path) -> None:
    first, second = pipeline(tmp_path)
    sent = exchanges(first, "WhaleSend")[0]
    lost = next(n for n in exchanges(second, "WhaleRecv") if n.attrs["key"] == sent.attrs["key"])
    deaf = replace(lost, op="Const", inputs=(), attrs={"value": np.zeros(lost.outputs[0].shape or (), np.float32)})
    found = verify_saved_plan.check_exchanges(
        [first, second.replace_nodes(tuple(deaf if n is lost else n for n in second.nodes))]
    )
    assert len(found) == 1 and found[0].startswith(f"rank 0 sends {sent.attrs['key']} (")
    assert found[0].endswith("to rank 1, which does not receive it")
    mute = first.replace_nodes(tuple(n for n in first.nodes if n is not sent))
    assert "which does not send it" in verify_saved_plan.check_exchanges([mute, second])[0]
    send, receive = exchanges(first, "WhaleSend")[0].name, exchanges(first, "WhaleRecv")[0].name
    found = verify_saved_plan.check_waits(
        [after(first, send, receive), second]
    )  # its gradient comes of what it is to send
    assert len(found) == 1 and f"rank 0 begins {send} only after {receive}" in found[0] and "rank 1 begins" in found[0]


def test_sums_that_ranks_begin_in_opposite_orders_are_found() -> None:
    program = mlp(8, 4, 4, 2)
    plan = planned(program, 4, 4, group_bytes=0)
    expanded = expand(program, plan.expanded, PlanSettings(size=2))
    ranks = [partition_for_rank(expanded, plan, rank, "c", None) for rank in range(2)]
    one, other = (n.name for n in exchanges(ranks[0], "WhaleAllReduce")[:2])
    assert verify_saved_plan.check_waits([after(ranks[0], one, other), ranks[1]]) == []
    assert (
        "rank 1 begins" in verify_saved_plan.check_waits([after(ranks[0], one, other), after(ranks[1], other, one)])[0]
    )


def test_stages_have_each_rank_once() -> None:
    twice = (StageGroup("a", (0, 1), ("s0",)), StageGroup("b", (0, 1), ("s1",)))
    plan = replace(planned(mlp(8, 4, 4, 2), 4, 1), stage_groups=twice)
    assert verify_saved_plan.check_stage_groups(plan) == [
        "the stages have the ranks [0, 0, 1, 1], not each of 0 to 3 once"
    ]
    plan = replace(plan, stage_groups=(StageGroup("a", (0, 1), ("s0",)), StageGroup("b", (2, 3), ("s1",), 1)))
    assert verify_saved_plan.check_stage_groups(plan) == [
        "the stage group b has 2 ranks, and its plan (number 1 of 1, from 0) is for 0"
    ]


def test_there_are_no_more_micro_batches_than_rows() -> None:
    """Of 4 rows with 16 features."""
    program = mlp(4, 16, 4, 2)
    plan = planned(program, 2, 2)
    assert verify_saved_plan.check_sizes(program, replace(plan, micro_batches=4)) == []
    found = verify_saved_plan.check_sizes(program, replace(plan, micro_batches=5))
    assert found == ["it has 5 micro-batches, and the inputs have at most 4 rows"]


def test_plans_are_compared_along_all_axes_of_their_meshes() -> None:
    plan = planned(mlp(8, 4, 4, 2), 4, 4)
    (gone, *others) = (r for r in plan.reshards if r.bytes)
    above = replace(plan, reshards=())

    def with_innermost(reshards: tuple[Reshard, ...]) -> Plan:
        return replace(above, inner=replace(above, inner=replace(plan, reshards=reshards)))

    three, other = with_innermost((gone, *others)), with_innermost(tuple(others))
    assert list_changed_layouts(three, three) == []
    assert any(f"no longer: {gone.ref}" in line for line in list_changed_layouts(three, other))
    assert any("2 groups of 2 groups of 2 -> none" in line for line in list_changed_layouts(three, above))
