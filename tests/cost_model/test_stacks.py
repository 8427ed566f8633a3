"""Software stacks: the package's files and a user's, and what their fields change."""

from __future__ import annotations

import contextlib
import math
import random
from pathlib import Path

import msgspec
import pytest

from cost_model import calibrate
from cost_model.analytic import job
from cost_model.analytic.evaluate import likely_s
from cost_model.analytic.kernel_costs import cost, rank_on
from cost_model.analytic.memory import held_tensors, layer_activation_bytes
from cost_model.analytic.predict import predict
from cost_model.analytic.stacks import Stack, find_modules, read, stack, stacks
from cost_model.analytic.transformer import LayerShare, Transformer
from cost_model.analytic.transformer_kernels import Collective, Matmul, layer_backward, layer_forward
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster import cluster_file
from cost_model.cluster.pools import Machines
from cost_model.hardware import find_device, load_efficiencies
from cost_model.kernels.compute import find_rates
from cost_model.validation.cases import DATA
from cost_model.validation.cases import read as read_table
from whale.cli import main
from whale.errors import ClusterError, PlanError
from whale.ir.strategy import Degrees
from whale.planner import ask
from whale.planner.report import show

H100 = cluster_file.parse(
    "name: h\nnetworks: {f: {type: infiniband-ndr-400}}\n"
    "hosts: [{name: n, count: 4, devices: [{type: h100, count: 8}], networks: {f: {nics: 8}}}]"
)
GPT = Transformer(16, 4096, 32, 4096, 51200)
CORE = stack("megatron-core-bf16")


def changed(one: Stack, **fields: object) -> Stack:
    return msgspec.structs.replace(one, **fields)


def test_every_figure_of_the_packages_stacks_has_a_source() -> None:
    defaults = {f.name: f.default for f in msgspec.structs.fields(Stack)}
    missing = []
    for name, one in stacks().items():
        assert one.name == name
        given = {field for field in defaults if getattr(one, field) != defaults[field]} - {
            "name",
            "sources",
            "compared",
        }
        missing += [f"{name}.{field}" for field in sorted(given) if not one.find_source(field)]
        unused = {key for keys in one.sources for key in keys.split(",")} - set(defaults)
        missing += [f"{name}: a source of {key}, which it does not have" for key in unused]
    assert missing == []


def test_a_users_stack_is_a_file_with_the_same_fields(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nbase: megatron-core-fp8\nhost_us: 25\nsources: {host_us: measured by us}\n")
    found = stack(str(mine))
    assert found == changed(stack("megatron-core-fp8"), name="mine", host_us=25, sources=found.sources, compared={})
    assert found.find_source("host_us") == "measured by us"
    assert found.find_source("step_ms") == CORE.find_source("step_ms")
    task = tmp_path / "job.yaml"
    task.write_text(
        "model: {layers: 2, hidden: 256, heads: 4, sequence: 128, vocabulary: 512}\n"
        "plan: {batch: 1}\nsoftware: mine.yaml\n"
    )
    assert job.read(task).software == str(mine)
    assert job.read(task).predict(H100).step_s > 0
    assert job.read(task, "composer-bf16").software == "composer-bf16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dtype: bfloat16\nfused_attention: true", "has 2 of the 26 fields that every stack needs next: name one of"),
        ("base: megatron-core-bf16\ndtype: bf16", "key dtype: unknown dtype given: bf16 expected: bfloat16"),
        ("base: megatron-core-bf16\nattention: flash-4", "expected: flash-1, flash-2, flash-3"),
        ("base: megatron-core-bf16\nhost_us: 20us", "given: 20us next: write the number alone, in us"),
    ],
)  # fmt: skip
def test_mistakes_in_a_stack_say_what_to_write(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"name: mine\n{text}\n")
    with pytest.raises(ClusterError) as caught:
        read(tmp_path / "mine.yaml")
    assert message in " ".join(str(caught.value).split())


def test_experts_keep_operands_in_their_dtype_and_no_results_that_are_weighed_before() -> None:
    # 8,192 tokens of one expert's width a rank come and go: Megatron-Core weighs what goes into the last product.
    model = Transformer(8, 1024, 16, 4096, 32000, 512, experts=16, top=2, gated=1)
    share = LayerShare(experts=4)
    sent = 4 * 4096 * 2 * 4 // 16 * 1024  # elements: experts of a rank x tokens of each x hidden
    inner = 2 * 2 * sent // 1024 * 512
    held = {
        name: held_tensors(model, share, stack(name))["network"]
        for name in ("megatron-2022", "megatron-core-bf16", "megatron-core-fp8")
    }
    assert held == {
        "megatron-2022": inner + 4 * sent,
        "megatron-core-bf16": inner + 2 * sent,
        "megatron-core-fp8": inner + sent,
    }


def test_a_plan_names_the_file_of_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nbase: megatron-core-bf16\n")
    monkeypatch.chdir(tmp_path)
    small = Transformer(4, 512, 8, 512, 1024)
    one = cluster_file.parse("name: one\nhosts: [{name: n, devices: [{type: h100, count: 2}]}]")
    plan = ask.plan(one, 8, small, software="mine.yaml", limits=ask.limits([], 0.2))
    assert plan.software == str(tmp_path / "mine.yaml") and plan.problems() == []
    assert "none under mine on h100-sxm-80gb was compared" in " ".join(show.show(plan).split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: a\nbase: megatron-core-bf17\n",
            "none of the software stacks that the package has\n  given: megatron-core-bf17\n  expected: meg",
        ),
        ("name: a\nbase: megatron-core-bf16\nhost_ms: 1\n", "mine.yaml:3, key host_ms"),
        ("name: a\nbase: megatron-core-bf16\nhost_us: -1\n", "mine.yaml:3, key host_us"),
        ("name: a\nbase: megatron-core-bf16\nattention: flash-9\n", "mine.yaml:3, key attention"),
        ("- 1\n", "mine.yaml"),
    ],
)
def test_mistakes_in_a_stacks_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        read(path)


def test_attention_is_as_fast_as_the_latest_kernel_that_stack_and_device_have() -> None:
    curve = load_efficiencies()["hopper-sxm"]
    assert curve.find_attention_fraction("flash-1") < curve.find_attention_fraction("flash-2")
    assert curve.find_attention_fraction("flash-2") < curve.find_attention_fraction("flash-3")
    ampere = load_efficiencies()["ampere-sxm"]
    assert ampere.find_attention_fraction("flash-3") == ampere.find_attention_fraction("flash-2")
    old, new = (find_rates(find_device("h100"), "bfloat16", attention=k) for k in ("flash-1", "flash-3"))
    assert 2 < new.attention_flops_per_s / old.attention_flops_per_s < 3
    a100 = find_device("a100")
    single, half = find_rates(a100, "tf32"), find_rates(a100, "float16")
    assert single.matmul_flops_per_s < half.matmul_flops_per_s / 2  # slower than its peak says


def test_what_runs_beside_kernels_is_not_waited_for() -> None:
    share = LayerShare(tensor=8, rows=1, sequence_parallel=True)
    machines = Machines(H100)
    rank = rank_on(find_device("h100"), 1.0, machines.tensor_group(0, 8), CORE)
    exposed = [
        cost(layer_forward(GPT, share, changed(CORE, hides_sequence_parallel=part)), rank).exposed_s
        for part in (0.0, 0.5, 1.0)
    ]
    assert exposed == sorted(exposed, reverse=True) and exposed[1] == pytest.approx(exposed[0] / 2, rel=0.2)
    plan = Degrees(tensor=2, stages=4, chunks=4, micro_batch=1, batch=16, sequence_parallel=True)
    sent = [
        predict(GPT, plan, changed(CORE, overlaps_sends=hidden), H100).evaluation.send_s for hidden in (False, True)
    ]
    assert sent[0] > 0 == sent[1]


def test_a_stack_says_what_is_computed_again() -> None:
    def seconds(one: Stack, recompute: str) -> float:
        share = LayerShare(rows=2, recompute=recompute)  # type: ignore[arg-type]
        rank = rank_on(find_device("h100"), 1.0, Machines(H100).tensor_group(0, 1), one)
        return cost(layer_backward(GPT, share, one), rank, True).device_s

    none, full = seconds(CORE, "none"), seconds(CORE, "full")
    half = changed(CORE, selective_part=0.5)
    assert seconds(CORE, "selective") == none
    assert none < seconds(half, "selective") < (none + full) / 2  # attention is kept
    assert none < seconds(changed(CORE, drops_unneeded=True), "full") < full
    kept = [layer_activation_bytes(GPT, LayerShare(rows=2, recompute=r), half) for r in ("full", "selective", "none")]
    assert kept[1] == (kept[0] + kept[2]) / 2


def test_selective_recomputation_repeats_the_modules_that_a_stack_or_a_job_names() -> None:
    share = LayerShare(rows=2, tensor=2, recompute="selective")

    def both(*modules: str) -> tuple[float, float]:
        one = changed(CORE, selective=find_modules(modules))
        rank = rank_on(find_device("h100"), 1.0, Machines(H100).tensor_group(0, 2), one)
        return cost(layer_backward(GPT, share, one), rank, True).device_s, layer_activation_bytes(GPT, share, one)

    nothing, norms, more = both("core"), both("norms"), both("norms", "activation")
    network = both("norms", "network")
    assert nothing[0] < norms[0] < more[0] < network[0]
    assert nothing[1] > norms[1] > more[1] > network[1]
    sbh = 2 * 4096 * 4096
    assert nothing[1] - norms[1] == 2 * 2 * sbh  # the results of two normalisations, of two bytes
    assert norms[1] - more[1] == 2 * 4 * sbh / 2  # the activation's result, which two ranks divide
    assert not CORE.repeats_selectively and changed(CORE, selective=("norms",)).repeats_selectively
    plan = Degrees(tensor=2, micro_batch=2, batch=2, recompute="selective", selective=("activation", "norms"))
    named, plain = (predict(GPT, p, CORE, H100) for p in (plan, msgspec.structs.replace(plan, selective=())))
    assert named.step_s > plain.step_s and named.peak_bytes < plain.peak_bytes
    with pytest.raises(PlanError, match="cannot repeat\n  given: mlp\n  expected: core, norms"):
        predict(GPT, msgspec.structs.replace(plan, selective=("mlp",)), CORE, H100)


def test_operands_that_are_kept_in_float8_take_a_byte() -> None:
    share, kept = LayerShare(rows=2), changed(CORE, kept_operand_bytes=1)
    whole, small = (held_tensors(GPT, share, one) for one in (CORE, kept))
    sbh = 2 * 4096 * 4096
    assert whole["norms"] - small["norms"] == 2 * sbh and whole["activation"] - small["activation"] == 4 * sbh
    assert small["attention"] - whole["attention"] == sbh  # attention keeps its result, the product after it an operand
    assert stack("megatron-core-fp8").kept_operand_bytes == 1 and CORE.kept_operand_bytes is None
    more = predict(GPT, Degrees(batch=1), changed(CORE, base_gb=5.0), H100).peak_bytes
    assert more - predict(GPT, Degrees(batch=1), CORE, H100).peak_bytes == pytest.approx(4e9)


def test_logits_of_masked_words_only_cost_as_much_less() -> None:
    masked = msgspec.structs.replace(GPT, predicted_tokens=512)
    assert GPT.step_flops(4) - masked.step_flops(4) == 6 * 4 * (4096 - 512) * 4096 * 51200
    all_logits, few = (predict(one, Degrees(micro_batch=1, batch=4), CORE, H100) for one in (GPT, masked))
    assert few.step_s < all_logits.step_s and few.peak_bytes < all_logits.peak_bytes


def test_sequence_parallel_collectives_run_beside_the_products_that_they_feed_or_follow() -> None:
    hiding = changed(CORE, hides_sequence_parallel=0.5)
    ops = layer_forward(GPT, LayerShare(tensor=4, sequence_parallel=True), hiding)
    assert {op.over for op in ops if isinstance(op, Collective)} == {
        ("qkv",),
        ("projection",),
        ("feed forward 1",),
        ("feed forward 2",),
    }


HEADS = (
    "layers,hidden,heads,sequence,vocabulary,tensor,pipeline,data,chunks,micro_batch,global_batch,recompute,measured_s"
)
MODEL = Transformer(8, 2048, 16, 1024, 32000)
SIZES = [(t, p, m) for t, p in ((1, 1), (2, 1), (1, 2)) for m in (1, 2, 4)]


def measured_rows(path: Path, true: Stack, draw: random.Random) -> None:
    """Writes steps of nine plans under a stack, with two per cent of noise, and no software or cluster."""
    lines = ["# source: ours", HEADS]
    for tensor, stages, rows in SIZES:
        data = 16 // tensor // stages
        p = Degrees(tensor=tensor, stages=stages, data=data, micro_batch=rows, batch=16 * data, recompute="none")
        seconds = predict(MODEL, p, true, H100).step_s * math.exp(draw.gauss(0.0, 0.02))
        lines.append(f"8,2048,16,1024,32000,{tensor},{stages},{data},1,{rows},{16 * data},none,{seconds:.6f}")
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"kernel_time": 1.25}, 0.03),
        ({"host_us": 50.0, "backward_host_us": 50.0, "collective_host_us": 150.0}, 0.04),
    ],
)
def test_a_stack_is_fitted_to_ten_measured_rows_and_says_how_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, float], most: float
) -> None:
    draw, base = random.Random(3), CORE
    true, rows, out = changed(base, **changes), tmp_path / "rows.csv", tmp_path / "ours.yaml"
    measured_rows(rows, true, draw)
    (tmp_path / "lab.yaml").write_text(
        "name: h\nnetworks: {f: {type: infiniband-ndr-400}}\n"
        "hosts: [{name: n, count: 4, devices: [{type: h100, count: 8}], networks: {f: {nics: 8}}}]"
    )
    arguments = ["simulate", "--fit", str(rows), "--cluster", str(tmp_path / "lab.yaml"), "--out", str(out)]
    assert main(arguments) == 0
    printed, ours = capsys.readouterr().out, read(out)
    assert "mean error of 9 rows: " in printed and "of rows that were left out" in printed
    assert all(f"{field}: " in printed for field in changes)
    # Plans that were not measured are predicted as well as the noise allows.
    for plan in (Degrees(tensor=4, data=2, micro_batch=2, batch=32), Degrees(data=8, micro_batch=3, batch=48)):
        wanted = predict(MODEL, plan, true, H100).step_s
        assert predict(MODEL, plan, ours, H100).step_s == pytest.approx(wanted, rel=most)
    assert ours.find_source("kernel_time") or "kernel_time" not in out.read_text()
    one = ours.compared["hopper-sxm"]
    assert one.rows == 9 and 0.9 < one.low < 1 < one.high < 1.1
    low_s, high_s = likely_s(ours, predict(MODEL, Degrees(batch=1), ours, H100).strategy, Machines(H100), 1.0)
    assert (low_s, high_s) == (one.low, one.high)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fit", "rows.csv"], "--fit needs --out"),
        (["job.yaml", "--fit", "rows.csv", "--out", "o.yaml"], "without a job file"),
        (["--fit", "rows.csv", "--out", "o.yaml", "--network", "ethernet-10g"], "without a job file"),
        (["job.yaml", "--cluster", "c.yaml", "--out", "o.yaml"], "--out is for --fit"),
        (["--cluster", "c.yaml"], "a job file is needed"),
        (["--fit", "rows.csv", "--out", "o.yaml", "--cluster", "h.yaml"], "too few rows"),
        (["--fit", "odd.csv", "--out", "o.yaml", "--cluster", "h.yaml"], "rows_each expected: micro_batch"),
        (["--fit", "few.csv", "--out", "o.yaml", "--cluster", "h.yaml"], "lacks global_batch, measured_s"),
        (["--fit", "rows.csv", "--out", "o.yaml", "--cluster", "h.yaml", "--stack", "o.yaml"], "one of the package's"),
    ],
)
def test_mistakes_in_what_is_fitted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("h.yaml").write_text("name: h\nhosts: [{name: n, devices: [{type: h100, count: 8}]}]")
    Path("rows.csv").write_text(f"{HEADS}\n8,2048,16,1024,32000,1,1,8,1,1,8,none,0.5\n")
    Path("odd.csv").write_text(f"{HEADS},rows_each\n8,2048,16,1024,32000,1,1,8,1,1,8,none,0.5,1\n")
    Path("few.csv").write_text("layers,hidden,heads,batches\n8,2048,16,1\n")
    of_rows = arguments[0] == "--fit" and "h.yaml" in arguments  # which are told when the files have been read
    with contextlib.nullcontext() if of_rows else pytest.raises(SystemExit):
        assert main(["simulate", *arguments]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_constants_of_several_stacks_are_fitted_to_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["maxtext-bf16", "maxtext-fp8"]
    rows = read_table(DATA / "maxtext_70b_h100.csv")[1]
    start = calibrate.current(names=names, constants=["quantise_bytes", "pointwise_passes"])
    assert start == {"quantise_bytes": stack("maxtext-fp8").quantise_bytes, "pointwise_passes": 0.5}
    more = calibrate.errors(rows, {"quantise_bytes": 4.0}, names)
    before = calibrate.errors(rows, {}, names)
    assert [one > other for one, other in zip(more, before)] == [case.stack == "maxtext-fp8" for case in rows]
    with pytest.raises(SystemExit):
        calibrate.main(["--rows", str(DATA / "maxtext_70b_h100.csv"), "--stacks", *names, "--constants", "host_us"])
    assert "5 rows of maxtext-bf16, maxtext-fp8, and the files have 4" in capsys.readouterr().err


def test_operands_are_cast_once_and_gathered_as_they_were_cast() -> None:
    """TransformerEngine, pytorch/module/base.py: grad_output_preprocess casts and transposes, and gathers bytes."""
    core, share = stack("megatron-core-fp8"), LayerShare(tensor=8, sequence_parallel=True)
    on = rank_on(find_device("h100"), 1.0, Machines(H100).tensor_group(0, 8), core)
    passes = layer_forward(GPT, share, core), layer_backward(GPT, share, core)
    each = [[op for op in ops if isinstance(op, Matmul) and op.weights] for ops in passes]
    cast = [[op for op in ops if not op.cast_before] for ops in each]
    assert len(cast[0]) == len(each[0]) == len(cast[1]) == len(each[1]) / 2  # what came in, what came back
    free = changed(core, quantise_bytes=0.0)
    without = rank_on(find_device("h100"), 1.0, on.group, free)
    bytes_ = sum(op.m * op.k for ops in cast for op in ops) * core.quantise_bytes
    seconds = sum(cost(ops, on).device_s - cost(ops, without).device_s for ops in passes)
    kernels_s = sum(map(len, cast)) * on.rates.kernel_s
    assert seconds == pytest.approx(bytes_ / on.rates.memory_bytes_per_s + kernels_s, rel=1e-6)
    whole = GPT.sequence * GPT.hidden
    sizes = {op.kind: op.tensor_bytes for ops in passes for op in ops if isinstance(op, Collective)}
    assert sizes == {"all_gather": whole, "reduce_scatter": 2 * whole}


def test_attention_with_dropout_waits_for_random_numbers() -> None:
    dropped = msgspec.structs.replace(GPT, dropout=1)
    plan = Degrees(tensor=8, data=4, batch=32, sequence_parallel=True)
    plain_s, dropped_s = (predict(one, plan, CORE, H100).step_s for one in (GPT, dropped))
    assert 1.03 < dropped_s / plain_s < 1.4
    year = stack("megatron-2022")  # whose models are trained with dropout
    assert predict(dropped, plan, year, H100).step_s == predict(GPT, plan, year, H100).step_s


def test_ranks_that_divide_the_sequence_send_their_own_tokens_to_experts() -> None:
    mixture = msgspec.structs.replace(GPT, experts=8, top=2)
    model = TransformerModel(mixture, CORE, Machines(H100))
    one, two = (model.layer_costs(0, tensor, 1, "none", tensor > 1, 32, 8).routed for tensor in (1, 2))
    assert one is not None and two is not None
    assert one.there_bytes == 2 * two.there_bytes == 2.0 * 2 * GPT.sequence * GPT.hidden


def test_nothing_is_known_of_models_with_experts_where_none_was_compared(tmp_path: Path) -> None:
    mixture, plan = msgspec.structs.replace(GPT, experts=8, top=2), Degrees(data=8, batch=8, experts=8)
    intervals = []
    path = tmp_path / "mine.yaml"
    path.write_text("{name: mine, base: megatron-core-bf16, compared: {hopper-sxm: {rows: 9, low: 0.9, high: 1.1}}}")
    path_experts = tmp_path / "more.yaml"
    path_experts.write_text(
        path.read_text().replace("compared:", "compared_experts: true, compared:").replace("mine", "more")
    )
    for one in (path, path_experts):
        task = job.Job(mixture, plan, str(one))
        found = job.report(task, H100, task.predict(H100))
        intervals.append("no step of a model with experts under" in found)
    assert intervals == [True, False]


def test_a_pipeline_of_sharded_stages_gathers_once_a_step_where_its_software_does() -> None:
    """PyTorch's FSDP2 in TorchTitan: parameters are not given back between micro-batches of a pipeline."""
    titan = stack("torchtitan-bf16")
    plan = Degrees(stages=4, data=8, batch=128, zero=1)
    one, three = (predict(GPT, msgspec.structs.replace(plan, zero=zero), titan, H100) for zero in (1, 3))
    assert three.step_s == one.step_s and three.peak_bytes == one.peak_bytes
    each = predict(GPT, msgspec.structs.replace(plan, zero=3), changed(titan, shards_stages="pass"), H100)
    assert each.step_s > three.step_s and each.peak_bytes < three.peak_bytes
    alone = msgspec.structs.replace(plan, stages=1, data=32, zero=3)
    again = predict(GPT, alone, changed(titan, shards_stages="pass"), H100)
    assert predict(GPT, alone, titan, H100).step_s == again.step_s


def test_gradients_of_a_chunk_are_given_back_where_all_forward_passes_come_first() -> None:
    llama = stack("llama-3")
    plan = Degrees(stages=4, data=4, chunks=4, micro_batch=1, batch=16, zero=2)  # as many micro-batches as stages
    by_step, by_chunk = (predict(GPT, plan, changed(llama, shards_stages=s), H100) for s in ("step", "chunk"))
    assert by_chunk.step_s == by_step.step_s
    for whole, part in zip(by_step.stages, by_chunk.stages):
        assert part.gradients_bytes == whole.gradients_bytes / 2 == whole.parameters_bytes  # 4 bytes, of 2 of 4 chunks
    more = msgspec.structs.replace(plan, batch=32)  # 1F1B: gradients of all chunks come by turns
    assert predict(GPT, more, llama, H100).stages[0].gradients_bytes == by_step.stages[0].gradients_bytes


def test_what_goes_into_an_activation_may_be_kept_in_a_smaller_dtype() -> None:
    share = LayerShare(tensor=2, sequence_parallel=True)
    whole, small = (held_tensors(GPT, share, changed(CORE, kept_inner_bytes=n)) for n in (None, 1))
    assert small["network"] == whole["network"] / 2
    assert {name: size for name, size in small.items() if name != "network"} == {
        name: size for name, size in whole.items() if name != "network"
    }


def test_products_of_experts_are_launched_one_by_one_where_the_software_does_so() -> None:
    mixture = msgspec.structs.replace(GPT, experts=32, top=2, feed_forward=1024)
    together = changed(CORE, launches_each_expert=False)
    on = rank_on(find_device("h100"), 1.0, Machines(H100).tensor_group(0, 1), CORE)
    for own in (1, 4, 16):
        share = LayerShare(experts=32 // own)
        for ops, products in ((layer_forward(mixture, share, CORE), 2), (layer_backward(mixture, share, CORE), 4)):
            one, all_ = cost(ops, on), cost(ops, rank_on(find_device("h100"), 1.0, on.group, together))
            more = products * (own - 1)
            assert one.host_s - all_.host_s == pytest.approx(more * CORE.host_us * 1e-6)
            assert one.device_s - all_.device_s == pytest.approx(more * on.rates.kernel_s / 4)


def test_a_device_waits_once_a_layer_for_the_number_of_its_experts_tokens() -> None:
    mixture = msgspec.structs.replace(GPT, experts=32, top=2)
    share, on = LayerShare(experts=16), rank_on(find_device("h100"), 1.0, Machines(H100).tensor_group(0, 1), CORE)
    for op_lists, times in ((layer_forward, 1), (layer_backward, 0)):
        counted, known = (
            cost(op_lists(mixture, share, changed(CORE, expert_wait_us=wait_us)), on) for wait_us in (700.0, 0.0)
        )
        assert counted.device_s - known.device_s == pytest.approx(times * 700e-6)
        assert counted.host_s == known.host_s
    assert layer_forward(GPT, share, CORE) == layer_forward(GPT, share, changed(CORE, expert_wait_us=0))


def test_an_exchange_of_tokens_may_run_beside_kernels() -> None:
    mixture = msgspec.structs.replace(GPT, experts=32, top=2)
    plan = Degrees(stages=2, data=16, experts=16, batch=64)
    steps = [predict(mixture, plan, changed(CORE, hides_experts=part), H100) for part in (0.0, 0.5, 1.0)]
    compute_s = [one.evaluation.compute_s for one in steps]
    assert compute_s[0] > compute_s[1] > compute_s[2] > 0
    with pytest.raises(PlanError, match="top_groups and expert_groups have to be given together"):
        msgspec.structs.replace(mixture, expert_groups=4)
    with pytest.raises(PlanError, match="only for a model with experts"):
        msgspec.structs.replace(GPT, expert_groups=4, top_groups=2)
