"""Described models that are captured: ways to spread them are compared, and what is predicted is what ranks do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant.measure import counted
from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster import cluster_file
from cost_model.cluster.pools import Machines
from cost_model.graph.machine import Rates, cluster_machine
from cost_model.graph.predict import predict_ranks
from cost_model.kernels.gpu_memory import nccl_bytes
from tests.cost_model.test_captured import LAB
from tests.draws import one_of
from whale.cli import main
from whale.errors import PlanError
from whale.ir.strategy import ChosenStrategy, DeviceGroup, ParallelStrategy, Stage
from whale.passes.pass_manager import normalise
from whale.passes.settings import FuseSettings, PlanSettings
from whale.planner import ask
from whale.planner.evaluate import Evaluator, ModelEvaluator, ProgramEvaluator
from whale.planner.graph_search import lower_bounds, predict, search, strategies, team
from whale.planner.graph_search.environment import SearchEnvironment
from whale.planner.graph_search.pipelines import chain
from whale.planner.graph_search.strategies import choices, divide_over_all
from whale.planner.report import planfile
from whale.runtime.context import require_current
from whale.tools import models
from whale.tools import models as f
from whale.tools.models import capture_program, make_step
from whale.tools.plan_model import find_strategy, plan_as, read

DLRM = "dlrm:tables=3,rows=60000,factors=8,batch=64"
CLASSIFIER = "classifier:classes=200000,features=32,inputs=8,batch=64"
UNEQUAL = cluster_file.parse(
    "name: both kinds\nnetworks: {f: {type: infiniband-hdr-200}}\nhosts: "
    "[{name: a, devices: [{type: a100, count: 2}], networks: {f: {nics: 2}}}, "
    "{name: b, devices: [{type: t4}], networks: {f: {nics: 1}}}]"
)
LAYERS = [
    f.Dlrm(tables=3, rows=60000, factors=8, batch=64),
    f.Classifier(classes=200000, features=32, inputs=8, batch=64),
]


def test_tables_that_no_device_holds_lie_in_the_hosts_memory() -> None:
    """Hosts' memory is counted, and asked for where the cluster file does not give it."""
    text = "name: c\nnetworks: {f: {type: ethernet-25g}}\nhosts: [{name: a, memory_gb: %s, networks: {f: {nics: 1}}, "
    text += "devices: [{type: t4, count: 2, memory_gb: 0.2}]}]"
    described = read("dlrm:tables=3,rows=6000000,factors=8,batch=64")
    found, plan = find_strategy(described, cluster_file.parse(text % 64))
    assert found.chosen.strategy.offload == "tables" and plan.offloaded
    assert plan.predicted is not None and max(rank.peak_bytes for rank in plan.predicted.ranks) < 0.2e9
    with pytest.raises(PlanError, match="does not fit"):
        find_strategy(described, cluster_file.parse(text % 0.5))


@pytest.mark.parametrize(
    "text, described", one_of(2, zip((DLRM, CLASSIFIER), LAYERS), several=True), ids=["dlrm", "classifier"]
)
def test_the_large_layer_is_sharded(text: str, described: f.Dlrm | f.Classifier, ranks: Callable[..., None]) -> None:
    assert read(text) == described
    name = "split of 3 tables" if text == DLRM else "split from classes on"
    found, large = find_strategy(described, LAB, 20.0)
    best, lines = found.chosen.strategy, found.lines
    assert best.name in lines[0] and any(name in line for line in lines)
    captured = capture_program(described, mark_gradients=True)
    (choice,) = (one for one in choices(normalise(captured, PlanSettings(size=4)), 4) if one.name == name)
    if text == DLRM:  # so small a batch is not worth it
        large = plan_as(choice, captured, LAB)
    else:
        assert best.name == name
    assert large.ranks == 4 and large.predicted is not None
    # As a step of the same model that ranks run in that way.
    ranks(4)
    require_current("the test").planning.auto = ChosenStrategy(choice)
    step, batch = trained(described)
    step(*batch)
    before = counted()
    step(*batch)
    moved, plan = counted() - before, wh.plan(step, *batch)
    ran = step._step(tuple(batch), {}).compiled
    assert ran.plan.logical_bytes == large.logical_bytes
    assert text == DLRM or large.logical_bytes < plan.logical_bytes / 3  # of a table only rows are exchanged anyway
    # Of a table each rank asks once for an id.
    assert moved <= large.logical_bytes if text == DLRM else moved == large.logical_bytes
    most = predict_ranks(ran.ranks, cluster_machine(LAB)).peak_bytes
    assert max(one.peak_bytes for one in large.predicted.ranks) == pytest.approx(most, rel=0.02)


@pytest.mark.parametrize("family", one_of(2, ["bert", "t5", "vit", "resnet"]))
def test_other_families_are_spread_over_unequal_devices(family: str) -> None:
    sizes = "blocks=1,width=8,image=16" if family == "resnet" else "layers=1,hidden=32,heads=2"
    more = {"vit": ",image=16,patch=8", "resnet": ""}.get(family, ",sequence=8,vocabulary=64")
    described = (
        read(f"{family}:{sizes}{more},batch=12")
        if family != "resnet"
        else f.Resnet(blocks=(1,), width=8, image=16, batch=12)
    )
    found, plan = find_strategy(described, UNEQUAL, 5.0)
    assert found.chosen.strategy.name in found.lines[0] and "both kinds" in found.lines[0]
    assert plan.ranks == 3 and plan.predicted is not None and len(plan.predicted.ranks) == 3


def test_evaluators_answer_in_one_form() -> None:
    described = read("bert:layers=2,hidden=64,heads=2,sequence=16,vocabulary=640,batch=24")
    captured = capture_program(described, mark_gradients=True)
    of_program = ProgramEvaluator(captured, PlanSettings(size=4), LAB)
    transformer, _ = ask.describe("gpt:layers=2,hidden=64,heads=2,sequence=16,vocabulary=640,batch=24")
    machines = Machines(LAB)
    of_model = ModelEvaluator(TransformerModel(transformer, stack("tensorflow-fp32"), machines), machines)
    program = normalise(captured, PlanSettings(size=4))
    size = len(chain(program))
    parts = (DeviceGroup(0, 1, 2, 3),)
    halves = tuple(Stage(((n * size // 2, (n + 1) * size // 2),), parts, None, (n, n + 2)) for n in (0, 1))
    layers = tuple(Stage(((n, n + 1),), parts) for n in (0, 1))
    evaluators: list[tuple[Evaluator, tuple[Stage, ...]]] = [(of_program, halves), (of_model, layers)]
    for evaluator, stages in evaluators:
        found = evaluator.evaluate(ParallelStrategy(stages, 4))
        assert sum(found.parts_s.values()) == pytest.approx(found.step_s) and found.step_s > 0
        assert found.fits and sum(one.count for one in found.ranks) == 4
        assert all(one.peak_bytes <= one.limit_bytes for one in found.ranks)
        less = evaluator.evaluate(ParallelStrategy(stages, 4, zero=1))
        assert max(one.resident_bytes for one in less.ranks) < max(one.resident_bytes for one in found.ranks)


def test_what_fits_nowhere_says_what_would_help() -> None:
    tiny = cluster_file.parse("name: tiny\nhosts: [{name: a, devices: [{type: t4, count: 2}]}]")
    with pytest.raises(PlanError, match=r"(?s)does not fit.*use more ranks"):
        find_strategy(f.Classifier(classes=20_000_000, features=512, batch=64), tiny, 20.0)


def trained(d: Any) -> tuple[Any, list[tf.Tensor]]:
    """A user's step of a description, and a batch."""
    batch = [tf.ones(shape, dtype) for shape, dtype in models.list_inputs(d).values()]
    return wh.function(make_step(d)), batch


def test_the_verb_says_what_each_way_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lab, plan = tmp_path / "lab.yaml", tmp_path / "plan.json"
    lab.write_text("name: lab\nhosts: [{name: a, devices: [{type: t4, count: 2}]}]\n")
    assert main(["plan", "--describe", CLASSIFIER, "--cluster", str(lab), "-o", str(plan)]) == 0
    said = capsys.readouterr().out
    assert "tensors from classes on" in said and "slower by" in said and "cluster    lab: 2 a/t4" in said
    found = planfile.load(plan)
    assert found.planner == "auto_parallel" and found.description == CLASSIFIER and found.strategy.split == ("classes",)
    names = {one.strategy.name for one in found.alternatives}
    assert {"data parallel", "every rank alone"} <= names | {found.strategy.name}
    # Every verb that reads a plan reads this one, which has no script, and captures its step again where it must.
    page, timeline = tmp_path / "page.html", tmp_path / "trace.json"
    for verb in (
        ["show", "-v", str(plan)],
        ["explain", str(plan), "*MatMul*"],
        ["check", str(plan)],
        ["html", str(plan), "-o", str(page)],
        ["trace", str(plan), "-o", str(timeline)],
    ):
        assert main(verb) == 0, verb
    said = capsys.readouterr().out
    assert said.count("plan       1 pipeline x 1 data x 2 tensor on 2 devices") == 1 and "good: 1 pipeline" in said
    assert found.description in page.read_text() or "session" in page.read_text()
    assert {e["pid"] for e in json.loads(timeline.read_text())["traceEvents"] if e["ph"] == "X"} == {0, 1}
    small = tmp_path / "small.yaml"
    small.write_text("name: small\nhosts: [{name: a, devices: [{type: t4, count: 2, memory_gb: 0.001}]}]\n")
    assert main(["check", str(plan), "--cluster", str(small)]) == 1
    assert "too much" in capsys.readouterr().out
    # A plan of a transformer that formulas evaluate, beside it.
    other = tmp_path / "gpt.json"
    model = "gpt:layers=4,hidden=64,heads=4,sequence=32,vocabulary=640,batch=64"
    assert main(["plan", "--describe", model, "--cluster", str(lab), "--budget", "1", "-o", str(other)]) == 0
    capsys.readouterr()
    assert main(["diff", str(other), str(plan)]) == 0
    said = capsys.readouterr().out
    assert f"-> {CLASSIFIER}\n" in said and "tensors from   the first layer on -> classes\n" in said
    assert re.search(r"^Step: .* -> .* \(.*%\)\.$", said, re.MULTILINE) and "compute " in said
    for wrong in ("classifier:classes=0,batch=4", "dlrm:tables=2,batch=4", f"{DLRM},split=1"):
        with pytest.raises(PlanError):
            read(wrong)


def test_ranks_that_do_alike_stand_for_each_other_and_no_way_is_faster_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four = cluster_file.parse(
        "name: four\nnetworks: {f: {type: infiniband-hdr-200}}\nhosts: "
        "[{name: a, devices: [{type: a100, count: 2}], networks: {f: {nics: 2}}}, "
        "{name: b, devices: [{type: t4, count: 2}], networks: {f: {nics: 1}}}]"
    )
    monkeypatch.setattr(strategies, "LEAST_BYTES", 1)
    captured = capture_program(read("bert:layers=1,hidden=64,heads=2,sequence=16,vocabulary=640,batch=24"), True)
    settings = PlanSettings(size=4, fuse=FuseSettings.all_on())
    program = normalise(captured, settings)
    environment = SearchEnvironment.read_cluster(four, program, 4)
    plans = predict.Plans(program, settings, environment)
    looked_at = search._list_looked_at(plans, 0)
    few = [predict.predict(plans, choice) for choice, _ in looked_at]
    assert all(least_s <= way.seconds for way, (_, least_s) in zip(few, looked_at))
    assert any(0 < least_s for choice, least_s in looked_at if choice.is_pipelined)
    assert all(0 < least_s for choice, least_s in looked_at if choice.split)
    replicas = [choice for choice, _ in looked_at if (choice.split and choice.tensor < 4) or len(choice.stages) == 2]
    assert len(replicas) > 3
    assert all(len(predict._simulate(settings, choice, environment)) == 2 for choice in replicas)
    monkeypatch.setattr(predict, "_simulate", lambda *_: range(4))
    for way in few:
        if way.strategy in replicas:
            every = predict.predict(plans, way.strategy)
            # The first of a group makes no zeros where the others begin their part of a sum.
            apart = 1e-9 if way.strategy.is_pipelined else 0.03
            assert way.seconds == pytest.approx(every.seconds, rel=apart)
            assert way.bytes == pytest.approx(every.bytes, rel=apart)
            assert way.lacking_bytes == every.lacking_bytes


@pytest.mark.parametrize("packs", [True, False], ids=["products that pack", "products that do not"])
@pytest.mark.parametrize("model", [CLASSIFIER, "bert:layers=1,hidden=128,heads=4,sequence=32,vocabulary=100,batch=16"])
def test_bounds_of_pipelines_are_near_what_is_predicted_and_below_it(model: str, packs: bool) -> None:
    """Prices operations by few figures of a rank, as a run measures them."""
    settings = PlanSettings(size=2, fuse=FuseSettings.all_on())
    program = normalise(capture_program(read(model), True), settings)
    rates = [Rates(3e10, 8e9, 3e-6, 1e-4, 2e9, "given", exchanges_compute=packs, packs=packs)] * 2
    plans = predict.Plans(program, settings, SearchEnvironment(rates, None, [float("inf")] * 2))
    bounds = [(choice, least_s) for choice, least_s in search._list_looked_at(plans, 0) if choice.is_pipelined]
    found = [least_s / predict.predict(plans, choice).seconds for choice, least_s in bounds]
    assert len(found) > 1 and all(0.7 < one <= 1.0 for one in found), found


def test_ways_that_their_exchanges_rule_out_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges that take the core which computes are known exactly once a way is lowered."""
    monkeypatch.setattr(strategies, "LEAST_BYTES", 1)
    settings = PlanSettings(size=2, fuse=FuseSettings.all_on())
    text = "bert:layers=1,hidden=128,heads=4,sequence=32,vocabulary=100,batch=16"
    program = normalise(capture_program(read(text), True), settings)
    rates = [Rates(3e10, 8e9, 3e-6, 1e-4, 2e9, "given", packs=True)] * 2
    environment = SearchEnvironment(rates, None, [float("inf")] * 2)
    plans = predict.Plans(program, settings, environment)
    ways = [choice for choice, _ in search._list_looked_at(plans, 0) if choice.name in plans.computing_s]
    assert any(way.split for way in ways) and any(way.zero for way in ways)
    for way in ways:
        whole, computing_s = predict.predict(plans, way), plans.computing_s[way.name]
        bounded = predict.predict(plans, way, computing_s, computing_s)
        assert bounded.is_bound and not whole.is_bound
        assert 0.7 * whole.seconds < bounded.seconds <= whole.seconds
    found = search.best_way(program, settings, environment, budget_s=1e3)
    with monkeypatch.context() as without:
        without.setattr(predict, "_exchanges_s", lambda *_: 0.0)
        every = search.best_way(program, settings, environment, budget_s=1e3)
    assert every.chosen == found.chosen and every.made.plan == found.made.plan
    assert len(every.lines) == len(found.lines)


def test_splits_and_stages_of_batch_statistics_are_not_planned_where_they_cannot_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four = cluster_file.parse("name: four\nhosts: [{name: a, devices: [{type: v100, count: 4}]}]")
    monkeypatch.setattr(strategies, "LEAST_BYTES", 1)
    monkeypatch.setattr(
        lower_bounds, "bound_pipelines", lambda *_: lambda _: 0.0
    )  # else they need no plan to be refused
    program = normalise(
        capture_program(f.Resnet(blocks=(1, 1), width=64, image=64, batch=1024), True), PlanSettings(size=4)
    )
    environment = SearchEnvironment.read_cluster(four, program, 4)
    looked_at = search._list_looked_at(predict.Plans(program, PlanSettings(size=4), environment), 0)
    splits = {choice.name: least_s for choice, least_s in looked_at if choice.split}
    planned: dict[str, float] = {}
    predict_way = team.predict

    def predicted(
        plans: predict.Plans, strategy: ParallelStrategy, needed_s: float, computing_s: float
    ) -> search.Candidate:
        planned[strategy.name] = 0.0
        way = predict_way(plans, strategy, needed_s, computing_s)
        planned[strategy.name] = way.seconds
        return way

    monkeypatch.setattr(team, "predict", predicted)
    found = search.best_way(program, PlanSettings(size=4), environment, budget_s=1e3)
    assert found.chosen.strategy.name == "data parallel" and splits and not planned.keys() & splits.keys()
    said = "\n".join(found.lines)
    assert not any("pipeline" in name for name in planned)  # the plan of data parallelism says that none can run
    refused = [line for line in found.lines if "pipeline" in line and "cannot run" in line]
    assert sum("a value of all micro-batches is needed" in line for line in refused) == 1
    assert all(f"{name}: {1e3 * least_s:.2f} ms at least" in said for name, least_s in splits.items())
    bounded, _ = dict(planned), planned.clear()
    monkeypatch.setattr(search, "_list_looked_at", lambda *_: [(c, 0.0) for c, _ in looked_at if not c.is_pipelined])
    assert search.best_way(program, PlanSettings(size=4), environment, budget_s=1e3).chosen == found.chosen
    assert all(least_s <= planned[name] for name, least_s in splits.items())
    assert planned["data parallel"] == bounded["data parallel"]


def test_ways_are_judged_with_what_nccl_takes() -> None:
    two = cluster_file.parse("name: two\nhosts: [{name: a, devices: [{type: t4, count: 2}]}]\n")
    through_host = PlanSettings(size=2)
    by_nccl = through_host.but(exchange__backend="nccl")
    program = normalise(capture_program(read(CLASSIFIER)), through_host)
    held = {}
    for settings in (through_host, by_nccl, by_nccl.but(memory__limit_bytes=1 << 40)):
        environment = SearchEnvironment.read_cluster(two, program, 2)
        environment = replace(environment, limits_bytes=[nccl_bytes(1, 0, {})] * 2)
        way = predict.predict(predict.Plans(program, settings, environment), divide_over_all("data parallel", 2))
        held[settings.exchange.backend, settings.memory.limit_bytes] = way.bytes, way.fits
    (tensors, fits), (with_nccl, fits_beside) = held["whale", 0], held["nccl", 0]
    assert with_nccl == tensors + nccl_bytes(1, 0, {})
    assert fits and not fits_beside
    assert held["nccl", 1 << 40] == (tensors, True)
