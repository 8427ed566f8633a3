"""Programs of described models: what a captured step of the same size contains, node for node, and no memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer import LayerShare, Transformer
from cost_model.analytic.transformer_kernels import Collective, layer_backward, layer_forward
from cost_model.graph.machine import cluster_machine
from cost_model.graph.machine_profile import write
from cost_model.graph.predict import predict_ranks
from cost_model.graph.signature import signature
from cost_model.kernels.op_work import iterate_work
from tests.cost_model.test_captured import LAB, TABLE
from tests.draws import one_of
from whale.cli import main
from whale.errors import ClusterError, PlanError
from whale.ir.layout import B, shard
from whale.ir.program import Program, Ref
from whale.ir.values import TensorType
from whale.partition.mesh import plan_program
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.plan_prediction import Planned, predict_plan, rank_programs
from whale.tools import models as f
from whale.tools.models import capture_program, read_description, trace_program

TEXT = {"layers": 1, "hidden": 16, "heads": 2, "sequence": 6, "vocabulary": 40, "batch": 4}
SMALL: list[f.Description] = [
    f.Gpt(**TEXT),
    f.Bert(**TEXT, dtype="float64", optimizer="sgd", tensor_parallel=True, sequence_parallel=True),
    f.T5(**TEXT),
    f.Moe(**TEXT, experts=3),
    f.Vit(layers=1, hidden=16, heads=2, image=8, patch=4, classes=5, batch=4),
    f.Resnet(blocks=(1, 1), width=4, image=16, classes=5, batch=4),
    f.Dlrm(tables=3, rows=20, factors=4, dense=5, bottom=(8,), top=(8, 6), batch=4),
    f.Classifier(classes=60, features=8, inputs=6, batch=4, split=True),
]


def contents(program: Program) -> Counter[tuple[str, float, float, int]]:
    """(op, FLOPs, bytes, kernels) of every node that does something."""
    return Counter((n.op, w.flops, w.moved_bytes, w.kernels) for n, w in iterate_work(program) if w.kernels)


@pytest.mark.parametrize("d", one_of(3, SMALL), ids=lambda d: type(d).__name__)
def test_a_described_program_is_the_captured_one(d: f.Description) -> None:
    described, captured = (normalise(p, PlanSettings(size=1)) for p in (capture_program(d), trace_program(d)))
    assert contents(described) == contents(captured)
    assert sum(contents(described).values()) > 15
    assert Counter(v.type for v in described.variables) == Counter(v.type for v in captured.variables)
    assert Counter(signature(described, n) for n in described.nodes if "MatMul" in n.op or "Conv" in n.op) == Counter(
        signature(captured, n) for n in captured.nodes if "MatMul" in n.op or "Conv" in n.op
    )


def test_full_recompute_holds_less_and_computes_more() -> None:
    programs = {}
    for kind in ("none", "full"):
        d = f.Gpt(**{**TEXT, "layers": 3, "sequence": 32, "batch": 8}, recompute=kind)
        settings = PlanSettings(size=1).but(memory__recompute="" if kind == "none" else "marked")
        programs[kind] = normalise(capture_program(d), settings)
        if kind == "full":
            assert contents(programs[kind]) == contents(normalise(trace_program(d), settings))
    work = {kind: sum(w.flops for _, w in iterate_work(p)) for kind, p in programs.items()}
    assert 1.15 < work["full"] / work["none"] < 1.34  # a third of the layers' work, and none of the logits'
    peak = {kind: predict_ranks([p], cluster_machine(LAB)).peak_bytes for kind, p in programs.items()}
    assert peak["full"] < 0.8 * peak["none"]


def test_selective_recompute_repeats_the_scores_of_attention_and_holds_none_of_them() -> None:
    d = f.Gpt(**{**TEXT, "layers": 3, "sequence": 32, "batch": 8}, recompute="selective")
    settings = PlanSettings(size=1).but(memory__recompute="marked")
    program = normalise(capture_program(d), settings)
    assert contents(program) == contents(normalise(trace_program(d), settings))
    again = [(n, w) for n, w in iterate_work(program) if n.marks.recomputed]
    # Of each layer: the product of queries and keys, 2 b s^2 h; scale, mask and softmax of b a s^2 scores.
    scores = d.batch * d.heads * d.sequence**2
    assert Counter(n.op for n, _ in again) == dict.fromkeys(("BatchMatMulV2", "Mul", "AddV2", "Softmax"), 3)
    assert sum(w.flops for n, w in again if "MatMul" in n.op) == 3 * 2 * scores * (d.hidden // d.heads)
    assert sum(w.flops for n, w in again if n.op in ("Mul", "AddV2")) == 3 * 2 * scores
    assert (d.batch, d.heads, d.sequence, d.sequence) not in {t.shape for t in held_types(program)}


def test_ranks_that_divide_tensors_exchange_what_megatron_lm_does() -> None:
    ranks, sizes = 2, {"layers": 2, "hidden": 1024, "heads": 8, "sequence": 256, "vocabulary": 8192}
    settings = PlanSettings(size=ranks)
    d = f.Gpt(**sizes, batch=1, tensor_parallel=True, optimizer="sgd")
    program = normalise(capture_program(d), settings)
    planned = Planned(program, plan_program(program, settings), settings)
    products = [
        sum(w.flops for n, w in iterate_work(p) if "MatMul" in n.op) for p in (program, *rank_programs(planned))
    ]
    assert products[1:] == [products[0] / ranks] * ranks
    # The formulas of the cost model, whose elements have two bytes, and those of embedding and logits' gradient.
    share = LayerShare(tensor=ranks)
    layer = [of(Transformer(**sizes), share, stack("megatron-2022")) for of in (layer_forward, layer_backward)]
    expected = [2 * int(op.tensor_bytes) for ops in layer for op in ops if isinstance(op, Collective)] * d.layers
    large = [r for r in planned.plan.reshards if r.bytes > 2**16]
    assert {type(r.source).__name__ for r in large} == {"Partial"} and {r.target for r in large} == {B}
    moved = 2 * (ranks - 1)  # an all-reduce, of all ranks together
    assert sorted(r.bytes for r in large) == sorted(moved * b for b in [*expected, expected[0], expected[0]])


@pytest.mark.parametrize("kind", one_of(3, ["none", "selective", "full"]))
def test_what_lies_between_products_is_divided_along_the_sequence(kind: str) -> None:
    """Reduce-scatters and all-gathers in place of all-reduces, and no tensor of these is held whole."""
    ranks, layers, shape = 2, 2, (1, 128, 256)
    held, kinds, peaks = [], [], []
    for parallel in (False, True):
        d = f.Gpt(layers=layers, hidden=256, heads=4, sequence=128, vocabulary=4096, batch=1, recompute=kind,
                  tensor_parallel=True, sequence_parallel=parallel, optimizer="sgd")  # type: ignore[arg-type]  # fmt: skip
        settings = PlanSettings(size=ranks).but(memory__recompute="" if kind == "none" else "marked")
        program = normalise(capture_program(d), settings)
        planned = Planned(program, plan_program(program, settings), settings)
        lies = planned.plan.strategies[""]
        held.append(
            {lies[r.node].outputs[r.index] for r in held_tensors(program) if program.find_type(r).shape == shape}
        )
        large = [r for r in planned.plan.reshards if r.bytes > 2**16]
        kinds.append(Counter((type(r.source).__name__, type(r.target).__name__) for r in large))
        peaks.append(predict_plan(planned, LAB).peak_bytes)
    assert held[0] >= {B} and held[1] == {shard(1, (64, 64))}
    assert kinds[0].keys() == {("Partial", "Replicate")}
    # The embedding's rows travel by their ids. All but the last layer are computed again: the attention's sum, and
    # what two products read.
    sums, again = 4 * layers + 1, layers - 1 if kind == "full" else 0
    assert kinds[1] == {("Partial", "Shard"): sums + again, ("Shard", "Replicate"): sums + 2 * again}
    assert len(planned.plan.routed) == 2 and peaks[1] < peaks[0]


def held_tensors(program: Program) -> set[Ref]:
    """What the backward pass reads of the forward pass."""
    late = {n.name for n in program.nodes if n.marks.backward or n.marks.recomputed or n.name.startswith("gradients/")}
    read = {r for n in program.nodes if n.name in late for r in n.inputs if r.node not in late}
    return {r for r in read if program.by_name[r.node].op != "Const"}


def held_types(program: Program) -> list[TensorType]:
    return [program.find_type(r) for r in held_tensors(program)]


@pytest.mark.parametrize("d", [SMALL[0], SMALL[-2]], ids=["Gpt", "Dlrm"])
def test_it_is_planned_and_predicted_like_any_other(d: f.Description) -> None:
    settings = PlanSettings(size=2)
    program = normalise(capture_program(d), settings)
    planned = Planned(program, plan_program(program, settings), settings)
    assert planned.plan.batch_inputs and planned.plan.split_flops_fraction > 0.9
    found = predict_plan(planned, LAB)
    assert found.step_s > 0 and sum(found.logical_bytes) == planned.plan.logical_bytes


def test_a_model_file_is_simulated_on_a_measured_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, profile = tmp_path / "model.yaml", tmp_path / "profile.json"
    model.write_text("family: dlrm\nbatch: 32\ntables: 2\nrows: 64\n")
    write(TABLE, profile)
    assert main(["simulate", str(model), "--measured", str(profile), "-np", "2"]) == 0
    assert "Predicted on lab as `whale profile` measured it" in capsys.readouterr().out
    write(msgspec.structs.replace(TABLE, memory_gb=1e-6), profile)
    assert main(["simulate", str(model), "--measured", str(profile), "-np", "2"]) == 1
    assert "does not fit: rank 1 lacks" in capsys.readouterr().out


def test_a_model_that_no_machine_holds_is_captured_all_the_same() -> None:
    d = f.Gpt(layers=1, hidden=12288, heads=96, sequence=2048, vocabulary=51200, batch=4)
    program = normalise(capture_program(d), PlanSettings(size=1))
    held = sum(v.type.bytes for v in program.variables)
    assert held > 3 * 4 * 12 * 12288**2
    assert predict_ranks([program], cluster_machine(LAB)).peak_bytes > held


def test_model_files(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("family: vit\nlayers: 12\nhidden: 768\nheads: 12\nbatch: 64\n")
    assert read_description(path) == f.Vit(layers=12, hidden=768, heads=12, batch=64)
    path.write_text("family: gpt\nlayers: 0\n")
    with pytest.raises(ClusterError, match=r"model.yaml:2(.|\n)*"):
        read_description(path)
    path.write_text("family: vgg\n")
    with pytest.raises(ClusterError):
        read_description(path)
    with pytest.raises(PlanError, match="multiple of heads"):
        f.Gpt(**{**TEXT, "heads": 3})
    with pytest.raises(PlanError, match="set tensor_parallel: true"):
        f.Bert(**TEXT, sequence_parallel=True)
