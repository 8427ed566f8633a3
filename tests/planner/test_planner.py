"""The planner: against enumeration, against the simulator, its files and its answers when nothing fits."""

from __future__ import annotations

import re

import msgspec
import pytest

from benchmarks.planner.instances import enumerate_best, instance
from cost_model.analytic.evaluate import evaluate
from cost_model.analytic.predict import predict
from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer import Transformer
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster import cluster_file
from cost_model.cluster.pools import Machines
from whale.cli import main
from whale.errors import ClusterError, PlanError
from whale.ir.strategy import Degrees, DeviceGroup, ParallelStrategy, Stage, divide_chunks
from whale.planner import ask
from whale.planner.analytic_search import layer_profiles as tables
from whale.planner.analytic_search.candidates import Constraints
from whale.planner.analytic_search.plan_check import check
from whale.planner.analytic_search.search_sequence import search
from whale.planner.analytic_search.whale22 import algorithm_1, formula_1
from whale.planner.report import planfile
from whale.planner.report.show import _name_chunk, against, diff, explain_layer, schedule_lines, show

UNEQUAL = """
name: unequal
networks: {fabric: {type: infiniband-hdr-200}}
hosts:
  - {name: new, devices: [{type: v100-sxm2-16gb, count: 8}], networks: {fabric: {nics: 1}}}
  - {name: old, devices: [{type: p100-pcie-16gb, count: 8}], networks: {fabric: {nics: 1}}}
"""
SMALL = "gpt:layers=24,hidden=1024,heads=16,sequence=512,vocabulary=30720,batch=256"


@pytest.fixture(scope="module")
def plan():
    model, batch = ask.describe(SMALL)
    return ask.plan(cluster_file.parse(UNEQUAL), batch, model)


@pytest.mark.parametrize("seed", [4, 6, 7, 8])
def test_nothing_is_faster_than_what_is_found_for_few_devices(seed):
    one = instance(seed)
    model = one.model()
    found = search(model, model.machines, one.batch, Constraints(zero=0, budget_s=60, runnable=False))
    assert check(model, model.machines, found.strategy, one.batch) == []
    best_s, better, _ = enumerate_best(one, 0, found.evaluation.step_s)
    assert better is None or found.evaluation.step_s <= 1.03 * best_s
    assert found.bound_s <= found.evaluation.step_s


def test_replicas_of_a_stage_divide_tensors_alike_since_only_that_runs():
    one = instance(7)
    model = one.model()
    stages = {
        runnable: [
            {part.tensor for part in stage.parts}
            for strategy, _ in search(model, model.machines, one.batch, Constraints(zero=0, runnable=runnable)).others
            for stage in strategy.stages
        ]
        for runnable in (True, False)
    }
    assert max(map(len, stages[True])) == 1 < max(map(len, stages[False]))


@pytest.mark.parametrize(
    "p",
    [
        Degrees(data=4, micro_batch=2, batch=16),
        Degrees(tensor=2, data=16, micro_batch=2, batch=64, sequence_parallel=True),
        Degrees(tensor=8, stages=2, data=2, chunks=2, micro_batch=2, batch=32, recompute="full"),
        Degrees(tensor=2, stages=4, data=4, chunks=2, batch=64, recompute="selective", zero=1),
        Degrees(data=32, micro_batch=2, batch=192, zero=2),
        Degrees(data=32, micro_batch=1, batch=32, zero=3, recompute="full"),
    ],
)
def test_a_uniform_spread_is_predicted_as_a_job(p):
    t = Transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=51200)
    p = msgspec.structs.replace(p, sequence_parallel=True)  # as the planner's strategies of described models all are
    software = stack("megatron-2022")
    machines = Machines(
        cluster_file.parse(
            "name: c\nnetworks: {f: {type: infiniband-hdr-200}}\n"
            "hosts:\n- {name: h, count: 4, devices: [{type: a100-sxm-80gb, count: 8}],\n"
            "   networks: {f: {nics: 4, far_gb_per_s: 6.1}}}\n"
        )
    )
    fixed = Constraints(
        p.stages, p.tensor, p.data, p.micro_batch, p.micro_batches, p.recompute, p.zero, p.chunks, context=p.context
    )
    found = search(TransformerModel(t, software, machines), machines, p.batch, fixed)
    job = predict(t, p, software, machines.cluster)
    own = evaluate(TransformerModel(t, software, machines), machines, job.strategy)
    assert (job.step_s, job.evaluation.stages) == (own.step_s, own.stages)
    assert 0.9 * job.step_s < found.evaluation.step_s <= job.step_s * (1 + 1e-9)  # layers need not be divided evenly
    assert check(TransformerModel(t, software, machines), machines, job.strategy, p.batch) == []


def test_a_plan_survives_its_file_and_unknown_fields_of_a_newer_minor(plan):
    data = planfile.dumps(plan)
    assert planfile.loads(data) == plan
    assert planfile.dumps(planfile.loads(data)) == data
    raw = msgspec.json.decode(data)
    newer = {**raw, "format_version": "1.9", "more": 1}
    assert planfile.loads(msgspec.json.encode(newer)).strategy == plan.strategy
    with pytest.raises(PlanError, match=r"format_version 2\.0; this version of Whale reads"):
        planfile.loads(msgspec.json.encode({**raw, "format_version": "2.0"}))


def test_the_published_schema_is_that_of_plan_files():
    assert msgspec.json.decode(planfile.SCHEMA.read_bytes()) == msgspec.json.decode(
        msgspec.json.encode(planfile.schema())
    )


def test_advice_names_changes_of_the_model_that_pay():
    model, _ = ask.describe("gpt:layers=23,hidden=1024,heads=16,sequence=512,vocabulary=30001")
    rows = ask.advise(cluster_file.parse(UNEQUAL), 64, model, budget_s=0.3)
    assert any(row.startswith("vocabulary 30001 -> 30080: ") for row in rows), rows
    assert any(row.startswith("layers 23 -> 24: ") for row in rows), rows


def test_the_checker_finds_what_is_wrong(plan):
    assert plan.problems() == []
    s = plan.strategy
    assert "rows of a batch" in msgspec.structs.replace(plan, batch=plan.batch + 1).problems()[0]
    short = msgspec.structs.replace(s, stages=(Stage(((0, 3),), s.stages[0].parts), *s.stages[1:]))
    assert "do not make up" in msgspec.structs.replace(plan, strategy=short).problems()[0]
    one_host = msgspec.structs.replace(plan.cluster, hosts=plan.cluster.hosts[:1])
    pools = {p.pool for stage in s.stages for p in stage.parts}
    many = DeviceGroup(0, 1, 9, 1)
    crowded = msgspec.structs.replace(s, stages=(Stage(((0, 24),), (many,)),), micro_batches=1)
    assert pools <= {0, 1}
    assert "9 devices" in " ".join(msgspec.structs.replace(plan, strategy=crowded, cluster=one_host).problems())


def test_plans_print(plan, capsys, tmp_path):
    text = show(plan, 200)
    assert text.splitlines()[-1].startswith("Plan: ") and "alternatives that lost" in text
    assert "lies in stage" in explain_layer(plan, 3)
    assert diff(plan, plan) == "The plans are equal."
    path = tmp_path / "p.json"
    planfile.save(plan, path)
    for verb in (
        ["show"],
        ["check"],
        ["explain", "0"],
        ["trace", "-o", str(tmp_path / "t.json")],
        ["html", "-o", str(tmp_path / "p.html")],
    ):
        assert main([verb[0], str(path), *verb[1:]]) == 0
    assert msgspec.json.decode((tmp_path / "t.json").read_bytes())["traceEvents"]
    page = (tmp_path / "p.html").read_text()
    assert "http" not in page and "/*DATA*/" not in page and plan.strategy.format_summary() in page


def test_when_nothing_fits_the_error_says_what_binds_and_what_to_do():
    model, _ = ask.describe("gpt:layers=96,hidden=12288,heads=96")
    with pytest.raises(PlanError) as error:
        ask.plan(cluster_file.parse(UNEQUAL), 8, model)
    assert "largest_part" in error.value.facts and "layers instead of 96" in str(error.value)


def test_a_description_does_not_say_how_the_model_is_spread():
    with pytest.raises(PlanError, match="whale simulate"):
        ask.describe("gpt:layers=2,hidden=64,heads=4,sequence_parallel=true")


def test_where_tensors_are_divided_the_sequence_is_divided_between_products():
    model, batch = ask.describe("gpt:layers=24,hidden=2048,heads=16,batch=64")
    found = ask.plan(cluster_file.parse(UNEQUAL), batch, model, limits=ask.limits(["tensor=8"]))
    assert found.strategy.sequence_parallel and "8 tensor" in found.strategy.format_summary()
    assert "sequence parallel" in found.strategy.format_summary()
    own, machines, evaluation = found.evaluate()
    other = evaluate(own, machines, msgspec.structs.replace(found.strategy, sequence_parallel=False))
    assert evaluation.step_s < other.step_s and evaluation.lacking_bytes < other.lacking_bytes


def test_what_is_fixed_stays_fixed(plan):
    model, batch = ask.describe(SMALL)
    fixed = ask.plan(cluster_file.parse(UNEQUAL), batch, model, limits=ask.limits(["stages=4", "recompute=full"]))
    assert len(fixed.strategy.stages) == 4 and fixed.strategy.recompute == "full"
    with pytest.raises(PlanError, match="cannot be fixed"):
        ask.limits(["colour=4"])
    with pytest.raises(PlanError, match="cannot be fixed"):
        ask.limits(["hurried=1"])  # the search's own
    change = 1e3 * (fixed.predicted.step_s - plan.predicted.step_s)
    assert against(fixed, plan).startswith(f"{change:+.1f} ms (") and "compute" in against(fixed, plan)
    assert "stays as it is" in against(plan, plan)


@pytest.mark.parametrize(
    "fixed, reason",
    [
        ("attention/*.split=5", "16 heads are not divisible by 5"),
        ("*.split=16", "tensor-parallel degree 16 needs as many devices of a kind on one host, which has at most 8"),
        ("stages=25", "24 layers are not enough for 25 stages"),
        ("micro_batch=3", "a batch of 256 is not divisible by 3 rows of a micro-batch"),
        ("data=17", "17 devices are needed, and unequal has 16"),
        ("data=300", "256 rows of a micro-batch are not enough for 300 replicas"),
        ("micro_batches=64 data=8", "4 rows of a micro-batch are not enough for 8 replicas"),
        ("micro_batches=4 micro_batch=8 data=4", "a batch of 256 in 4 micro-batches of 8 rows has 8 replicas, not 4"),
        ("micro_batches=4 micro_batch=128", "64 rows of a micro-batch are not divisible by 128 rows of a replica"),
        ("micro_batch=2 data=3", "a batch of 256 is not divisible by 3 replicas of 2 rows"),
        ("tensor=8 stages=2 data=2", "32 devices are needed, and unequal has 16"),
        ("tensor=8 chunks=2 data=2", "32 devices are needed, and unequal has 16"),
        ("chunks=2 stages=1", "one stage is not interleaved in 2 chunks"),
        ("chunks=13", "24 layers are not enough for 2 stages of 13 chunks"),
    ],
)  # fmt: skip
def test_what_cannot_be_fixed_says_why(fixed, reason):
    model, batch = ask.describe(SMALL)
    with pytest.raises(PlanError) as error:
        ask.plan(cluster_file.parse(UNEQUAL), batch, model, limits=ask.limits(fixed.split()))
    assert error.value.facts["reason"] == f"infeasible: {reason}"


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ("zero=4", "a choice cannot be fixed to this value\n  given: zero=4\n  expected: zero=a level from 0 to 3"),
        ("stages=0", "given: stages=0\n  expected: stages=a whole number of at least 1"),
        ("data=-2", "given: data=-2\n  expected: data=a whole number of at least 1"),
        ("micro_batch=\u00b2", "a choice cannot be fixed to this value\n  given: micro_batch="),
        ("recompute=some", "given: recompute=some\n  expected: recompute=none or selective or full"),
        ("tensor=2 qkv.split=4", "tensor is fixed twice\n  given: tensor=2 and qkv.split=4"),
    ],
)
def test_values_that_no_plan_can_have_are_refused(fixed, words):
    with pytest.raises(PlanError, match=words):
        ask.limits(fixed.split())


def test_the_page_names_overridden_figures_long_sequences_and_a_bounded_gain():
    where = cluster_file.parse(
        "name: one\nhosts: [{name: a, devices: [{type: h100, count: 2, memory_gb: 160, memory_gb_per_s: 3000}]}]\n"
    )
    model, _ = ask.describe("gpt:layers=2,hidden=512,heads=8,sequence=131072,vocabulary=1024")
    page = show(ask.plan(where, 2, model, software="composer-bf16", limits=ask.limits([], 0.2)))
    words = " ".join(page.split())
    assert (
        "overridden a/h100: memory_gb 160 (85.9 in the catalogue); a/h100: memory_gb_per_s 3000 (3350 in the" in words
    )
    assert "attention has all 131,072 tokens of a row on one rank; `--set context=2` plans with" in words or (
        "ranks divide the 131,072 tokens of a row, 65,536 each" in words
    )
    gain = int(re.search(r"at most (\d+)% of the step to gain", words)[1])
    assert 0 <= gain < 100


def test_a_token_goes_through_no_more_experts_than_there_are():
    with pytest.raises(PlanError, match="more experts than there are\n  given: top=9, experts=8"):
        ask.describe("moe:layers=2,hidden=1024,heads=16,experts=8,top=9")
    with pytest.raises(PlanError, match="given: top=2, experts=0"):
        ask.describe("gpt:layers=2,hidden=1024,heads=16,top=2")


@pytest.mark.parametrize(
    ("batch", "fixed"),
    [
        (16, "stages=5"),  # no number of stages that leaves each the same layers
        (16, "chunks=2"),  # of seven layers: three stages at most
        (12, "micro_batch=6"),  # no power of two
        (300, "micro_batch=150"),
        (300, "micro_batches=1 data=5"),
        (7, "data=3 stages=5"),  # unequal rows, and a pipeline that never fills
        (7, "tensor=8 stages=3"),
        (300, "micro_batches=2 micro_batch=5"),  # more replicas than the larger pool has devices
    ],
)
def test_what_is_legal_is_found_however_it_is_fixed(batch, fixed):
    """More: 800 draws beside an enumeration of plans of equal stages found none that was refused."""
    model, _ = ask.describe("gpt:layers=7,hidden=512,heads=8,sequence=128,vocabulary=1024")
    text = (
        "name: three\nnetworks: {f: {type: infiniband-hdr-200}}\nhosts:\n"
        "- {name: a, count: 3, devices: [{type: a100, count: 8}], networks: {f: {nics: 8}}}\n"
    )
    if batch == 300:
        text += "- {name: b, count: 2, devices: [{type: v100, count: 4}], networks: {f: {nics: 1}}}\n"
    where, limits = cluster_file.parse(text), ask.limits(fixed.split(), 0.2)
    found = ask.plan(where, batch, model, limits=limits).strategy
    stages, parts = found.stages, [part for stage in found.stages for part in stage.parts]
    assert limits.stages in (None, len(stages)) and limits.chunks in (None, found.chunks)
    assert limits.micro_batches in (None, found.micro_batches)
    assert limits.data is None or {stage.replicas for stage in stages} == {limits.data}
    assert limits.micro_batch is None or {part.rows for part in parts} == {limits.micro_batch}
    assert limits.tensor is None or {part.tensor for part in parts} == {limits.tensor}


def test_operations_of_a_described_model_are_divided_alike():
    assert ask.limits(["attention/*.split=8"]).tensor == ask.limits(["qkv.split=8"]).tensor == 8
    with pytest.raises(PlanError, match="no operation has that name"):
        ask.limits(["convolution.split=8"])
    with pytest.raises(PlanError, match="needs a budget of time above 0"):
        ask.limits([], 0.0)


def test_only_stages_whose_memory_binds_compute_again():
    one = instance(25)  # four stages, of which the first holds the most micro-batches
    plan = ask.plan(one.cluster, one.batch, table=one.table, software="megatron-2021", limits=Constraints(zero=0))
    assert plan.strategy.recomputes == ("full", "none", "none", "none") and plan.problems() == []
    model, machines, found = plan.evaluate()
    kept = evaluate(model, machines, plan.strategy.replace_recompute(("none",) * 4))
    assert kept.stages[0].lacking_bytes > 0 and all(other.lacking_bytes <= 0 for other in kept.stages[1:])
    again = evaluate(model, machines, plan.strategy.replace_recompute(("full",) * 4))
    assert again.fits and again.step_s > found.step_s
    # It is kept in the file, shown for each stage, explained, compared and checked.
    assert planfile.loads(planfile.dumps(plan)) == plan
    assert "full recompute in stage 0" in plan.strategy.format_summary()
    rows = [line.split() for line in show(plan, 200).splitlines() if "] " in line]
    assert ["full" in row for row in rows] == [True, False, False, False], rows
    assert "none recompute in this stage: infeasible" in explain_layer(plan, 0)
    other = msgspec.structs.replace(plan, strategy=plan.strategy.replace_recompute(("full",) * 4))
    assert "recompute      full, none -> full" in diff(plan, other)
    other = msgspec.structs.replace(plan, strategy=plan.strategy.replace_recompute(("none",) * 4))
    assert "stage 0 does not fit" in other.problems()[0]
    other = msgspec.structs.replace(plan, strategy=plan.strategy.replace_recompute(("selective",) * 4))
    assert "selective recompute; of the model is known: full, none" in other.problems()[0]


def test_a_table_that_lacks_a_layer_with_recompute_is_refused(tmp_path):
    path = tmp_path / "t.yaml"
    layers = "layers: [{name: a, count: 2}, {name: b}]\nmeasured:\n"
    row = "  - {layer: %s, device: t4, forward_s: 0.1, backward_s: 0.2, memory_bytes: 5, recompute: %s}\n"
    path.write_text("batch: 8\n" + layers + "".join(row % one for one in (("a", "none"), ("a", "full"), ("b", "none"))))
    with pytest.raises(ClusterError, match="not measured alike") as error:
        tables.read(path)
    assert error.value.facts["given"] == "no b on t4, tensor 1, micro_batch 1, recompute full"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_longer_than_the_terminal(plan, width):
    assert max(map(len, show(plan, width).splitlines())) <= width


def test_shares_as_published():
    # V100 and P100 at 15.7 and 9.3 TFLOP/s: 0.59 of the rows, as in the paper's data-parallel case.
    shares = formula_1(1024, [15.7e12] * 8 + [9.3e12] * 8)
    assert sum(shares) == 1024 and set(shares[:8]) <= {80, 81} and set(shares[8:]) <= {47, 48}
    # A device whose memory holds 60 rows only gives the others the rest.
    moved = algorithm_1([80, 47], [15.7, 9.3], 1.0, 0.0, [60.0, 100.0])
    assert moved == [60, 67]
    assert algorithm_1([80, 47], [15.7, 9.3], 1.0, 0.0, [60.0, 60.0]) is None


def test_a_profile_is_planned(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(
        "batch: 8\nlayers: [{name: a, count: 4, parameters: 1000000, output_bytes: 100000}]\nmeasured:\n"
        + "".join(
            f"  - {{layer: a, device: {device}, micro_batch: {rows},"
            f" forward_s: {t * rows}, backward_s: {2 * t * rows}}}\n"
            for device, t in (("v100-sxm2-16gb", 0.001), ("p100-pcie-16gb", 0.0017))
            for rows in (1, 8)
        )
    )
    where = tmp_path / "c.yaml"
    where.write_text(UNEQUAL.replace("count: 8", "count: 1"))
    out = tmp_path / "p.json"
    assert main(["plan", "--profile", str(path), "--cluster", str(where), "-o", str(out)]) == 0
    found = planfile.load(out)
    assert found.strategy.ranks == 2
    # 5 and 3 rows of 4 layers: the slower device needs 3 x 4 x 5.1 ms.
    assert found.predicted.compute_s == pytest.approx(0.0612)


def test_replicas_on_several_kinds_of_devices_can_be_asked_for():
    model, batch = ask.describe("gpt:layers=4,hidden=32,heads=4,sequence=16,vocabulary=64,batch=16")
    fixed = ask.limits(["stages=1", "tensor=1", "data=16", "zero=3", "micro_batches=1"])
    found = ask.plan(cluster_file.parse(UNEQUAL), batch, model, limits=fixed)
    assert found.strategy.stages[0].replicas == 16 and found.strategy.zero == 3
    assert found.problems() == []
    fixed = ask.limits(["stages=1", "tensor=1", "data=8", "zero=3", "micro_batches=2"])
    small = cluster_file.parse(UNEQUAL.replace("count: 8", "count: 4"))  # no kind has eight devices of its own
    assert ask.plan(small, batch, model, limits=fixed).strategy.stages[0].replicas == 8


def test_the_page_says_that_a_search_was_cut_and_what_tied_weights_take():
    where = cluster_file.parse(
        "name: slow\nnetworks: {f: {type: ethernet-10g}}\nhosts:\n"
        "- {name: g, count: 2, devices: [{type: rtx-4090, count: 4}], networks: {f: {nics: 1}}}\n"
    )
    model, _ = ask.describe("gpt:layers=8,hidden=1024,heads=16,sequence=512,vocabulary=128256")
    found = ask.plan(where, 32, model, limits=ask.limits(["stages=8"], 0.05))
    words = " ".join(show(found).split())
    assert found.cut == "the budget" and "search ended by the budget before all was looked at" in words
    share = int(re.search(r"gradients of their tied weights: [\d.]+ m?s \((\d+)% of the step\)", words)[1])
    assert share == round(100 * found.evaluate()[2].tied_s / found.step_s)


def test_unequal_devices_gain_as_much_as_was_published():
    """BERT-large on 8 V100 and 8 P100 was 1.45 times as fast as on the V100 alone."""
    where = cluster_file.parse(
        "name: v100p100\nnetworks: {f: {type: ethernet-25g}}\nhosts:\n"
        "- {name: v, devices: [{type: v100-sxm2-32gb, count: 8}], networks: {f: {nics: 2}}}\n"
        "- {name: p, devices: [{type: p100, count: 8}], networks: {f: {nics: 2}}}\n"
    )
    model, batch = ask.describe("gpt:layers=24,hidden=1024,heads=16,sequence=128,vocabulary=30720,batch=512")
    limits = ask.limits([], 0.2)
    both = ask.plan(where, batch, model, software="tensorflow-fp32", limits=limits)
    fast = msgspec.structs.replace(where, hosts=where.hosts[:1])
    alone = ask.plan(fast, batch, model, software="tensorflow-fp32", limits=limits)
    assert alone.step_s / both.step_s == pytest.approx(1.45, abs=0.05)
    (stage,) = both.strategy.stages
    assert {part.pool: part.rows for part in stage.parts} == {0: 41, 1: 23}


def test_more_chunks_than_letters_have_names() -> None:
    stages = [Stage(ranges, (DeviceGroup(0, 1, 1, 1),)) for ranges in divide_chunks(60, 2, 30)]
    told = schedule_lines(ParallelStrategy(tuple(stages), 2))
    assert told[0] == "schedule   1f1b, 30 chunks per stage"
    assert [_name_chunk(chunk) for chunk in (0, 8, 25, 26, 63)] == ["a", "i", "z", "aa", "bl"]
    assert "F0h F1h F0i F1i" in told[1]
