"""Split scopes: what is divided and what moves, in hand-written programs that run on simulated ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from tests.partition.compare import assert_equal_runs
from tests.programs import Builder, body, mlp
from whale.errors import PlanError
from whale.ir.layout import P_SUM, B, Shard, Strategy, shard
from whale.ir.plan import Plan
from whale.ir.program import Program, Ref
from whale.ir.values import DType, TensorType
from whale.passes.analysis.scopes import split_scope
from whale.passes.autoshard import choose
from whale.passes.normalize.annotate import annotate
from whale.passes.pass_manager import make_plan
from whale.passes.plan_builder import expand
from whale.passes.settings import PlanSettings
from whale.passes.verify.check import check
from whale.sharding_rules.base import Window


def scoped(program: Program, scope: str = "split_0") -> Program:
    """``program`` with every node but its inputs in ``scope``."""
    nodes = tuple(n if n.name in program.inputs else replace(n, scope=scope) for n in program.nodes)
    return replace(program, nodes=nodes)


def planned(program: Program, ranks: int, **changes: object) -> Plan:
    """The plan, after a run on simulated ranks equalled the global one and moved what the plan says."""
    settings = PlanSettings(ranks).but(**changes)
    plan = make_plan(program, settings)
    feeds = {}
    for name in program.inputs:
        t = program.by_name[name].outputs[0]
        if t.dtype == "int32":
            feeds[name] = np.random.default_rng(1).integers(0, 6, t.shape).astype(np.int32)
    assert_equal_runs(expand(program, plan.expanded, settings), plan, feeds=feeds)
    return plan


def moves(plan: Plan) -> Counter[str]:
    """What the plan moves, by kind of change."""
    found: Counter[str] = Counter()
    for r in plan.reshards:
        if r.bytes:
            kinds = [p.__class__.__name__ for p in (r.source, r.target)]
            found[" -> ".join(kinds)] += 1
    return found


def classifier(rows: int, width: int, classes: int, scope: str, words: int = 0) -> Program:
    """Features (a tanh layer, or an embedding's rows), a classifier, sparse cross-entropy, backward pass, SGD."""
    b = Builder("classifier")
    labels = b.input("labels", (rows,), "int32")
    if words:
        tokens = b.input("tokens", (rows,), "int32")
        b.scope = scope
        table = b.variable("table", (words, width))
        h = b.op("GatherV2", b.read(table, name="table/read"), tokens, b.const(0, "int32"), name="lookup",
                 batch_dims=0, Tparams=DType("float64"), Tindices=DType("int32"), Taxis=DType("int32"))  # fmt: skip
    else:
        x = b.input("x", (rows, 5))
        b.scope = "replica_0"
        u = b.variable("u", (5, width))
        h = b.op("Tanh", b.matmul(x, b.read(u, name="u/read"), name="layer"), name="features")
    b.scope = scope
    w = b.variable("w", (width, classes))
    read = b.read(w, name="w/read")
    logits = b.matmul(h, read, name="logits")
    kinds = [TensorType("float64", (rows,)), TensorType("float64", (rows, classes))]
    entropy = b.node("SparseSoftmaxCrossEntropyWithLogits", (logits, labels), kinds, "entropy",
                     T=DType("float64"), Tlabels=DType("int32"))  # fmt: skip
    loss = b.reduce("Mean", entropy, 0, name="loss")
    slope = b.op("Mul", Ref("entropy", 1), b.const(1.0 / rows), name="slope")
    d_w, d_h = b.matmul(h, slope, a=True, name="d_w"), b.matmul(slope, read, b=True, name="d_h")
    rate = b.const(0.1, name="rate")
    updates = [b.update("ResourceApplyGradientDescent", w, rate, d_w, controls=["w/read", "d_h"], name="sgd_w")]
    if words:
        count = b.const(words, "int32")
        d_table = b.op("UnsortedSegmentSum", d_h, tokens, count, name="d_table", T=DType("float64"),
                       Tindices=DType("int32"), Tnumsegments=DType("int32"))  # fmt: skip
        updates.append(b.update("ResourceApplyGradientDescent", table, rate, d_table, controls=["table/read"],
                                name="sgd_table"))  # fmt: skip
    else:
        b.scope = "replica_0"
        one = b.op("Sub", b.const(1.0), b.op("Square", h), name="tanh_slope")
        d_u = b.matmul(x, b.op("Mul", d_h, one, name="d_layer"), a=True, name="d_u")
        updates.append(b.update("ResourceApplyGradientDescent", u, rate, d_u, controls=["u/read"], name="sgd_u"))
    return b.build([loss], updates)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_layers_need_one_sum(ranks: int) -> None:
    """The first layer by columns, the second by rows: its results are summed, and nothing else moves."""
    plan = planned(scoped(mlp(8, 12, 24, 6)), ranks)
    assert plan.split_flops_fraction == 1.0
    assert {n: (p.dim, sum(p.sizes)) for n, p in plan.variables.items() if isinstance(p, Shard)} == {
        "w1": (1, 24), "b1": (0, 24), "w2": (0, 24),
    }  # fmt: skip
    assert [(str(r.ref), r.source, r.target) for r in plan.reshards if r.bytes] == [("layer2:0", P_SUM, B)]


@pytest.mark.parametrize("waiting", [False, True])
def test_a_loss_whose_classes_stay_whole_is_planned_as_one_op_also_where_something_waits_for_it(waiting: bool) -> None:
    program = classifier(8, 16, 6, "split_0")  # fewer classes than ranks
    if waiting:
        nodes = [replace(n, controls=(*n.controls, "entropy")) if n.name == "sgd_w" else n for n in program.nodes]
        program = program.replace_nodes(tuple(nodes))
    plan = planned(program, 8)
    assert not plan.expanded and plan.strategies[""]["w"].outputs[0].dim == 0


def test_sizes_need_not_be_even() -> None:
    plan = planned(scoped(mlp(8, 5, 7, 3)), 3)
    assert plan.variables["w1"] == shard(1, (3, 2, 2))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("words", [0, 40], ids=["layer", "embedding"])
def test_logits_of_split_classes_stay_where_they_are(ranks: int, words: int) -> None:
    """Features of divided rows, a classifier whose classes are split: the largest tensors do not move."""
    program = classifier(16, 32, 4000, "split_0", words)
    plan = planned(program, ranks)
    assert plan.expanded == ("entropy",)
    assert plan.variables["w"] == shard(1, (4000 // ranks,) * ranks)
    largest = max(program.find_type(Ref(n)).bytes for n in ("logits", "d_w"))
    assert plan.logical_bytes < largest / 2
    per_example = [r for r in plan.reshards if r.ref.node.startswith("entropy/") and r.bytes]
    assert per_example and all(r.bytes <= 2 * (ranks - 1) * 16 * 8 for r in per_example)
    data_parallel = planned(replace(program, nodes=tuple(replace(n, scope="") for n in program.nodes)), ranks)
    assert data_parallel.logical_bytes > 10 * plan.logical_bytes


def test_the_largest_class_is_found_where_classes_are_split() -> None:
    program = classifier(16, 32, 4000, "split_0")
    b = Builder("more")
    b.nodes, b.inputs, b.variables = list(program.nodes), list(program.inputs), list(program.variables)
    b.types = {r: program.find_type(r) for n in program.nodes for r in n.list_refs()}
    b.scope = "split_0"
    best = b.op("ArgMax", Ref("logits"), b.const(1, "int32"), name="best", output_type=DType("int64"))
    plan = planned(b.build([*program.outputs, best], program.effects), 2)
    assert plan.expanded == ("entropy", "best")
    assert all(r.bytes <= 2 * 16 * 8 for r in plan.reshards if r.ref.node.startswith("best/"))


def test_an_embedding_is_split_and_its_rows_are_found_where_they_are() -> None:
    """Named dimension or not, rows of the table that other ranks hold arrive, and gradients go back to them."""
    for scope in ("split_0", "split_0(dim=-1)"):
        plan = planned(classifier(8, 3, 30, scope, words=50), 2)
        assert isinstance(plan.variables["table"], Shard)
    rows = planned(classifier(64, 3, 6, "split_0", words=5000), 2)
    assert rows.variables["table"].dim in (0, 1) and rows.logical_bytes < 5000 * 3 * 8


def test_a_named_dimension_is_kept() -> None:
    for dim, cut in ((-1, 1), (1, 1)):
        plan = planned(scoped(mlp(8, 12, 24, 6), f"split_0(dim={dim})"), 2)
        assert plan.variables["w1"].dim == plan.variables["w2"].dim == cut


def test_variables_keep_the_layout_that_an_earlier_program_gave_them() -> None:
    known = {"w1": shard(0, (6, 6)), "b1": B, "w2": shard(1, (4, 2)), "b2": B}
    plan = planned(scoped(mlp(8, 12, 24, 6)), 2, split__known=known)
    assert plan.variables == {"w1": shard(0, (6, 6)), "w2": shard(1, (4, 2))}
    outside = planned(mlp(8, 12, 24, 6), 2, split__known=known)
    assert outside.variables == plan.variables


def test_where_variables_are_not_to_lie_split_only_the_computation_is() -> None:
    plan = planned(scoped(mlp(8, 12, 24, 6)), 2, split__state_only=True)
    assert plan.variables == {} and plan.split_flops_fraction == 1.0


def test_one_rank_has_nothing_to_split() -> None:
    plan = planned(scoped(mlp()), 1)
    assert plan.variables == {} and plan.expanded == () and plan.logical_bytes == 0


def test_nothing_to_split_is_an_error_that_names_what_would_work() -> None:
    with pytest.raises(PlanError, match=r"nothing under a split(.|\n)*layer1(.|\n)*\[2, 3\](.|\n)*over 4 ranks") as e:
        make_plan(scoped(mlp(8, 2, 3, 3)), PlanSettings(4))
    assert "4 or more" in str(e.value)
    with pytest.raises(PlanError, match="since an earlier step of the run uses the weights whole"):
        planned(scoped(mlp(8, 12, 24, 6)), 2, split__known=dict.fromkeys(("w1", "b1", "w2", "b2"), B))
    b = Builder("none")
    x = b.input("x", (4, 4))
    b.scope = "split_0"
    with pytest.raises(PlanError, match=r"nothing under a split scope(.|\n)*no product or lookup"):
        make_plan(b.build([b.op("Relu", x)]), PlanSettings(2))


def test_a_dimension_that_cannot_be_split_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"layer2(.|\n)*dim=-1 of \[8, 3\], of size 3 over 4 ranks(.|\n)*4 or more"):
        make_plan(scoped(mlp(8, 12, 24, 3), "split_0(dim=-1)"), PlanSettings(4))
    with pytest.raises(PlanError, match=r"dim=5 of \[8, 24\](.|\n)*one of dimensions \[1\]"):
        make_plan(scoped(mlp(8, 12, 24, 6), "split_0(dim=5)"), PlanSettings(2))


def test_the_innermost_scope_counts() -> None:
    assert split_scope("replica_0/split_1(dim=-1)") == ("replica_0/split_1(dim=-1)", -1)
    assert split_scope("split_0") == ("split_0", None)
    assert split_scope("split_0/replica_1") is None and split_scope("") is None


def test_updates_join_the_scope_of_their_variable() -> None:
    program = classifier(8, 4, 12, "split_0")
    bare = tuple(replace(n, scope="") if n.name.startswith("sgd") or n.op == "Const" else n for n in program.nodes)
    plan = planned(annotate(replace(program, nodes=bare)), 2)
    assert isinstance(plan.variables["w"], Shard) and "u" not in plan.variables


def test_a_scope_around_the_making_of_variables_splits_these_only() -> None:
    """Nodes join the scope of the variables that they read; what comes behind does, but its weights are not touched."""
    program = classifier(16, 32, 400, "split_0")
    bare = replace(
        program,
        nodes=tuple(replace(n, scope="") for n in program.nodes),
        variables=tuple(v if v.node == "w" else replace(v, scope="") for v in program.variables),
    )
    plan = planned(annotate(bare), 2)
    assert set(plan.variables) == {"w"}


def test_planted_faults_are_found() -> None:
    """The checker refuses layouts of variables that do not fit; a run with wrong offsets or a missing sum differs."""
    program = scoped(mlp(8, 12, 24, 6))
    plan = make_plan(program, PlanSettings(2))

    def check_with(**changes: object) -> None:
        check(program, replace(plan, **changes))

    with pytest.raises(PlanError, match=r"w1 \(VarHandleOp\)(.|\n)*B, the placement in which it is passed in"):
        check_with(variables={n: p for n, p in plan.variables.items() if n != "w1"})
    for wrong in (shard(1, (24,)), shard(1, (25, -1)), shard(1, (12, 11)), shard(2, (12, 12)), P_SUM):
        nodes = {**plan.strategies[""], "w1": Strategy((), (wrong,), "planted")}
        with pytest.raises(PlanError, match="into 2 parts that add up"):
            check_with(variables={**plan.variables, "w1": wrong}, strategies={"": nodes})
    whole = {**plan.strategies[""], "w1/read": Strategy((B,), (B,), "planted")}
    with pytest.raises(PlanError, match=r"operand w1:0, which is produced in the placement S\(1\)"):
        check_with(strategies={"": whole})
    with pytest.raises(PlanError, match=r"operand layer2:0, which is produced in the placement P\(sum\)"):
        check_with(reshards=())


@pytest.mark.parametrize("fault", ["offset", "mask"])
def test_a_planted_fault_in_a_lookup_changes_the_result(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = classifier(16, 32, 60, "split_0", words=4000)
    rows = {"table": shard(0, (2100, 1900))}
    assert planned(program, 2, split__known=rows).strategies[""]["lookup"].outputs == (P_SUM,)
    right = Window.__init__

    def planted(self: Window, indices: int, offset: int, size: int, masked: int | None = None, **rest: int) -> None:
        right(self, indices, offset + (fault == "offset"), size, masked if fault == "offset" else None, **rest)

    monkeypatch.setattr(Window, "__init__", planted)
    with pytest.raises(AssertionError):
        planned(program, 2, split__known=rows)


def test_graphs_that_are_too_wide_go_to_the_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    program = scoped(mlp(8, 12, 24, 6))
    expected = planned(program, 2)
    monkeypatch.setattr(choose, "_LARGEST_TABLE", 20)
    monkeypatch.setattr(choose, "solve_integer_program", seen := Mock(wraps=choose.solve_integer_program))
    assert planned(program, 2).logical_bytes == expected.logical_bytes and seen.called


def carried() -> Program:
    """Two layers, and between them a loop and a branch through which columns go."""
    b = Builder("carried")
    x = b.input("x", (8, 12))
    b.scope = "split_0"
    w1, w2 = b.variable("w1", (12, 24)), b.variable("w2", (24, 6))
    h = b.matmul(x, b.read(w1, name="w1/read"), name="layer1")
    turn, (count, state) = body("turn", (), (8, 24))
    more = turn.op("AddV2", count, turn.const(1.0))
    turned = turn.build([more, turn.op("Tanh", turn.op("Mul", state, turn.const(0.5)))])
    until, (so_far, _) = body("until", (), (8, 24))
    condition = until.build([until.op("Less", so_far, until.const(3.0))])
    loop = b.loop(condition, turned, b.const(0.0), h)
    (then, (one,)), (other, (two,)) = body("then", (8, 24)), body("other", (8, 24))
    yes, no = then.build([then.op("Neg", one)]), other.build([other.op("Square", two)])
    flag = b.op("Less", b.reduce("Sum", b.read(w2, name="w2/flag"), 0, 1), b.const(0.0))
    chosen = b.branch(flag, yes, no, Ref(loop.node, 1))
    return b.build([b.matmul(chosen, b.read(w2, name="w2/read"), name="layer2")])


def test_what_enters_a_loop_or_branch_divided_stays_so() -> None:
    """Columns that a split layer makes go through a loop and a branch; nothing is brought together in between."""
    plan = planned(carried(), 2)
    columns = shard(1, (12, 12))
    assert plan.strategies[""]["loop"].outputs == (B, columns) and plan.strategies[""]["branch"].outputs == (columns,)
    assert columns in [p for s in plan.strategies["turn"].values() for p in s.outputs]
    assert not [r for r in plan.reshards if r.graph and r.bytes]
    assert {n: p.dim for n, p in plan.variables.items() if isinstance(p, Shard)} == {"w1": 1, "w2": 0}
