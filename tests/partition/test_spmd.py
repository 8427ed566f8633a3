"""What one rank runs: local shapes and constants, one-time ops, order, loops and branches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.partition.compare import assert_equal_runs, lowered
from tests.partition.talk import assert_ranks_agree, communication
from tests.programs import Builder, body, mlp, planned
from whale.errors import PlanError
from whale.ir.layout import B, Partial, divide_evenly, shard
from whale.ir.ops import HOROVOD_ALL_REDUCE
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, TensorType
from whale.partition.spmd import list_unread_communication, partition_for_rank
from whale.passes.verify.check import check

SHARES = [(8,), (4, 4), (5, 3), (8, 0), (0, 8), (3, 3, 2), (0, 7, 1), (2, 2, 2, 2), (0, 5, 0, 3)]


@pytest.mark.parametrize("sizes", SHARES, ids=str)
def test_a_training_step(sizes: tuple[int, ...]) -> None:
    program = mlp()
    plan = planned(program, *sizes)
    spread = assert_equal_runs(program, plan)
    first = spread.ranks[0].variables
    for rank in spread.ranks[1:]:
        for name, value in rank.variables.items():
            np.testing.assert_array_equal(value, first[name], "all ranks hold the same bits")
    assert_ranks_agree(lowered(program, plan))


def test_a_ranks_part_does_not_grow_with_the_number_of_ranks() -> None:
    program, written = mlp(rows=2048), []
    for size in (4, 1024):
        plan = planned(program, *divide_evenly(2048, size))
        rank = partition_for_rank(program, plan, 0, "comm", "a step")
        names = sum(len(n.name) + len(str(n.attrs.get("key", ""))) for n in rank.nodes)
        written.append((len(rank.nodes), [len(n.inputs) for n in rank.nodes], names))
    few, many = written
    assert few[:2] == many[:2] and many[2] < 2 * few[2]


def test_gradients_travel_in_one_collective() -> None:
    plan = planned(mlp(), 4, 4)
    assert sorted(n.op for _, n in communication(lowered(mlp(), plan)[0])) == ["WhaleAllReduce", "WhaleCheck"]
    alone = planned(mlp(), 4, 4, group_bytes=0)
    assert [n.op for _, n in communication(lowered(mlp(), alone)[0])].count("WhaleAllReduce") == 5


@pytest.mark.parametrize("sizes", SHARES[1:], ids=str)
def test_sums_through_horovod(sizes: tuple[int, ...]) -> None:
    program = mlp()
    plan = planned(program, *sizes)
    reshards = (replace(r, backend="horovod") if isinstance(r.source, Partial) else r for r in plan.reshards)
    plan = replace(plan, reshards=tuple(reshards))
    check(program, plan)
    assert_equal_runs(program, plan)
    for rank in lowered(program, plan):
        (reduced,) = (n for n in rank.nodes if n.op == HOROVOD_ALL_REDUCE)
        assert rank.by_name[reduced.inputs[0].node].op == "WhaleHold", "never computed while TensorFlow optimises"
        assert "WhaleAllReduce" not in {n.op for n in rank.nodes}


def test_one_rank_talks_to_nobody() -> None:
    (only,) = lowered(mlp(), planned(mlp(), 8))
    assert communication(only) == []
    assert set(only.by_name) >= set(mlp().by_name)


def test_shapes_are_local() -> None:
    first, second = lowered(mlp(), planned(mlp(), 5, 3))
    assert first.by_name["relu"].outputs == (TensorType("float64", (5, 6)),)
    assert second.by_name["relu"].outputs == (TensorType("float64", (3, 6)),)
    assert first.by_name["x"].outputs == (TensorType("float64", (8, 4)),), "inputs are fed whole"


def test_every_run_checks_what_the_ranks_run() -> None:
    plan = planned(mlp(), 5, 3)
    for program in lowered(mlp(), plan):
        node = program.by_name["whale/check"]
        assert (
            node.attrs["fingerprint"] == plan.fingerprint
            and node.attrs["what"] == "mlp"
            and "whale/check" in program.effects
        )


def _mean_and_friends() -> Program:
    b = Builder("reductions")
    x = b.matmul(
        b.input("x", (6, 4)), b.const(np.eye(4)), name="product"
    )  # an input itself could be had whole for nothing
    outs = [b.reduce(op, x, *axes, keep=keep, name=f"{op}{axes}{keep}")
            for op in ("Mean", "Sum", "Max", "Min") for axes in ((0,), (0, 1), (1,))
            for keep in (False, True)]  # fmt: skip
    centred = b.op("Sub", x, outs[1])
    outs.append(b.reduce("Mean", b.op("Square", centred), 0))
    outs.append(b.op("ArgMax", x, b.const(1, "int32"), output_type=DType("int64")))
    outs.append(b.op("SelectV2", b.op("Less", x, b.const(0.0)), x, b.op("ZerosLike", x)))
    return b.build(outs)


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (6, 0), (0, 6), (0, 1, 5), (2, 2, 0, 2)], ids=str)
def test_reductions_of_uneven_and_empty_shares(sizes: tuple[int, ...]) -> None:
    assert_equal_runs(_mean_and_friends(), planned(_mean_and_friends(), *sizes))


def test_a_mean_over_the_batch_is_a_sum_over_the_global_count() -> None:
    rank = lowered(_mean_and_friends(), planned(_mean_and_friends(), 4, 2))[1]
    divided = rank.by_name["Mean(0,)False"]
    assert divided.op == "RealDiv" and rank.by_name[divided.inputs[0].node].op == "Sum"
    assert rank.const(divided.inputs[1]) == 6.0


def test_a_rank_without_rows_runs_no_kernel_on_them() -> None:
    _, empty = lowered(mlp(), planned(mlp(), 8, 0))
    assert {empty.by_name[n].op for n in ("layer1", "relu", "d_w1", "loss")} == {"Const"}


def _random_then_print() -> Program:
    b = Builder("once")
    x = b.input("x", (6, 4))
    noise = b.node("RandomUniform", (b.ints(6, 4),), (b.types[x],), "noise", stateful=True)
    noisy = b.op("AddV2", x, noise, name="noisy")
    unruled = b.node("UnruledNoise", (noisy,), (b.types[x],), "unruled", stateful=True)
    total = b.reduce("Sum", unruled, 0, 1, name="total")
    # The print reads a gathered tensor and a reduced one, which no other rank needs.
    text = b.op("StringFormat", b.op("Relu", noisy), b.reduce("Sum", noisy, 0, name="column_sums"), name="text")
    printed = b.node("PrintV2", (text,), (), "print", stateful=True).node
    after = b.op("Neg", unruled, controls=[printed], name="after")
    return b.build([total, after], [printed])


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (0, 6), (1, 2, 3)], ids=str)
def test_what_runs_once_is_sent_to_the_others(sizes: tuple[int, ...]) -> None:
    program = _random_then_print()
    plan = planned(program, *sizes)
    spread = assert_equal_runs(program, plan)
    assert len(spread.ranks[0].printed) == 1
    if len(sizes) > 1:
        assert plan.strategies[""]["noise"].once and plan.strategies[""]["unruled"].once
        for rank in lowered(program, plan)[1:]:
            assert not {"noise", "unruled", "print", "text"} & set(rank.by_name)
            assert rank.by_name["after"].controls == (), "a control edge to what is elsewhere goes"


def test_updates_stay_behind_the_reads() -> None:
    """The counter is read before and after it grows; the interpreter takes any order that the edges allow."""
    b = Builder("counter")
    x = b.input("x", (4, 2))
    handle = b.variable("count", (2,))
    before = b.read(handle, name="before")
    grown = b.update("AssignAddVariableOp", handle, b.reduce("Sum", x, 0), controls=["before"], name="grow")
    after = b.read(handle, controls=[grown], name="after")
    program = b.build([before, after], [grown])
    plan = planned(program, 3, 1)
    for seed in range(10):
        assert_equal_runs(program, plan, seed)


def _counting_cond(shapes: list[tuple[int, ...]], steps: int) -> Program:
    b, args = body("cond", *shapes)
    return b.build([b.op("Less", args[0], b.const(float(steps)))])


def looping(rows: int, talks: bool, scope: str = "") -> Program:
    """State: a counter, rows (divided), their running sum (partial), a weight that the body reduces if ``talks``.

    With a ``scope``, a layer behind it stands there.
    """
    shapes = [(), (rows, 3), (3,), (3, 3)]
    inner, (i, x, total, w) = body("body", *shapes)
    moved = inner.op("Tanh", inner.matmul(x, w, name="product"))
    summed = inner.op("AddV2", total, inner.reduce("Sum", moved, 0))
    grad = inner.matmul(x, moved, a=True, name="gradient")
    new_w = inner.op("Sub", w, inner.op("Mul", inner.op("Relu", grad), inner.const(0.01))) if talks else w
    step = inner.build([inner.op("AddV2", i, inner.const(1.0)), moved, summed, new_w])
    b = Builder("looping")
    x = b.input("x", (rows, 3))
    state = [b.const(0.0), x, b.const(np.zeros(3)), b.const(np.eye(3))]
    loop = b.loop(_counting_cond(shapes, 3), step, *state)
    outs = b.nodes[-1].list_refs()
    b.scope = scope
    layer = [b.matmul(outs[1], b.read(b.variable("w", (3, 4))), name="layer")] if scope else []
    b.scope = ""
    return b.build([b.op("Square", outs[2], name="squared"), outs[1], outs[3], loop, *layer])


@pytest.mark.parametrize("talks", [False, True], ids=["local body", "body that reduces"])
@pytest.mark.parametrize("sizes", [(6,), (3, 3), (4, 2), (0, 6), (1, 0, 5)], ids=str)
def test_loops(sizes: tuple[int, ...], talks: bool) -> None:
    program = looping(6, talks)
    plan = planned(program, *sizes)
    spread = assert_equal_runs(program, plan)
    ranks = lowered(program, plan)
    assert_ranks_agree(ranks)
    if len(sizes) == 1:
        return
    assert [str(p)[0] for p in plan.strategies[""]["loop"].inputs] == ["B", "S", "P", "B"]
    inside = [c.key for c in spread.calls if c.key.startswith("body/")]
    assert len(inside) == (3 if talks else 0), "one reduction per iteration"
    for rank in ranks:
        loop = rank.by_name["loop"]
        assert loop.op == ("While" if talks else "StatelessWhile")
        assert loop.attrs["parallel_iterations"] == (1 if talks else 10)
        assert [s.dims for s in loop.attrs["output_shapes"]] == [t.shape for t in loop.outputs]
        assert rank.functions["body"].by_name["body_arg1"].outputs == (loop.outputs[1],)


def _branching(rows: int) -> Program:
    then, (x, w) = body("then", (rows, 3), (3, 2))
    other, (y, v) = body("other", (rows, 3), (3, 2))
    yes = then.matmul(x, w)
    no = other.op("Relu", other.matmul(y, v))
    b = Builder("branching")
    x, w = b.input("x", (rows, 3)), b.input("w", (3, 2))
    positive = b.op("Less", b.const(0.0), b.reduce("Sum", x, 0, 1))
    result = b.branch(
        positive, then.build([yes, then.reduce("Sum", yes, 0)]), other.build([no, other.reduce("Max", no, 0)]), x, w
    )
    return b.build([result, b.op("Tanh", b.nodes[-1].list_refs()[1])])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("sizes", [(6,), (4, 2), (0, 6), (2, 2, 2)], ids=str)
def test_branches(sizes: tuple[int, ...], sign: float) -> None:
    program = _branching(6)
    plan = planned(program, *sizes, x=shard(0, sizes))
    rng = np.random.default_rng(0)
    assert_equal_runs(program, plan, feeds={"x": sign * np.abs(rng.normal(size=(6, 3)))})
    assert_ranks_agree(lowered(program, plan))


def test_a_function_without_strategies_stays_as_it_is() -> None:
    """Only ops that run on the first rank call it; it must not be localised by accident."""
    program = looping(6, False)
    plan = planned(program, 3, 3)
    kept = {g: s for g, s in plan.strategies.items() if g in ("", "body")}
    lacking = Plan(plan.program, plan.fingerprint, 2, strategies=kept, returned=plan.returned, reshards=plan.reshards)
    for rank in lowered(program, lacking):
        assert rank.functions["cond"].nodes == program.functions["cond"].nodes


def test_a_fetched_value_that_only_the_first_rank_has() -> None:
    b = Builder("fetch")
    handle = b.node("UnruledQueue", (), (TensorType("resource", ()),), "queue", stateful=True)
    program = b.build([handle])
    plan = planned(program, 1, 1)
    assert len(lowered(program, Plan("p", "f", 1, strategies=plan.strategies, returned=plan.returned))) == 1
    with pytest.raises(PlanError, match=r"only the first rank has.*\n  op: queue:0"):
        lowered(program, plan)


def test_strings_are_fetched_from_the_first_rank() -> None:
    b = Builder("text")
    x = b.input("x", (4, 2))
    program = b.build([b.op("StringFormat", x, name="text")])
    first, second = lowered(program, planned(program, 2, 2))
    assert first.by_name["text"].op == "StringFormat"
    assert second.const(second.outputs[0]) == b""
    assert B == planned(program, 2, 2).strategies[""]["text"].inputs[0]


@pytest.mark.parametrize(
    ("read", "effects", "added"),
    [
        ((), (), ["branch"]),  # only what it does inside counts
        (("y",), (), ["branch"]),  # its result is read, which alone does not run all of it
        (("y",), ("branch",), []),
        ((), ("branch",), []),
    ],
)
def test_a_branch_with_exchanges_inside_runs_to_its_end(read: list[str], effects: list[str], added: list[str]) -> None:
    t = TensorType("float32", ())
    nodes = [Node("x", "Placeholder", outputs=(t,)), Node("branch", "If", (Ref("x"),), outputs=(t,))]
    nodes += [Node("quiet", "If", (Ref("x"),), outputs=(t,)), Node("y", "Neg", (Ref("branch"),), outputs=(t,))]
    by_name = {node.name: node for node in nodes}
    assert list_unread_communication(by_name, read, effects, lambda node: node.name == "branch") == added
