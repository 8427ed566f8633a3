"""Every change of layout, alone: the values arrive, and exactly the bytes of the Plan move."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from tests.interpreter import run
from tests.partition.compare import assert_equal_runs, lowered, run_both
from tests.programs import Builder, plan_of
from whale.errors import LayoutError, PlanError
from whale.ir.emitter import Emitter
from whale.ir.layout import FIRST, P_MAX, P_MIN, P_SUM, B, Partial, Placement, Shard, Strategy, count_moved_bytes, shard
from whale.ir.plan import Plan, Reshard
from whale.ir.program import Program, Ref, sort_nodes
from whale.ir.values import DType, TensorType
from whale.partition.resharding import emit_reshard
from whale.passes.propagation.graph_layout import GraphLayout


def _program(
    source: Placement, target: Placement, shape: tuple[int, ...], dtype: str = "float64"
) -> tuple[Program, GraphLayout]:
    """x -> one node that yields ``source`` -> one that wants ``target`` -> fetched whole."""
    b = Builder("move", dtype)
    x = b.input("x", shape)
    if source == FIRST:
        made = b.node("UnruledNoise", (x,), (b.types[x],), "made", stateful=True)
        first = Strategy((B,), (FIRST,), "test", once=True)
    else:
        made = b.op("Identity", x, name="made")
        first = Strategy((source,), (source,), "test")
    moved = b.op("Identity", made, name="moved")
    layout = GraphLayout(
        {"x": Strategy((), (B,), "input"), "made": first, "moved": Strategy((target,), (target,), "test")},
        {x: B, made: source, moved: target}, outputs=(B,),
    )  # fmt: skip
    return b.build([moved]), layout


def _cuts(shape: tuple[int, ...], parts: int) -> list[Placement]:
    """Splits of every dimension: as even as possible, uneven with empty shares, everything on the last."""
    found = {
        shard(d, sizes)
        for d, n in enumerate(shape)
        for sizes in (
            tuple(n // parts + (i < n % parts) for i in range(parts)),
            tuple(n - n // 2 if i == 0 else n // 2 if i == parts - 1 else 0 for i in range(parts)),
            (0,) * (parts - 1) + (n,),
        )
        if sum(sizes) == n
    }
    found |= {shard(s.dim, tuple(n // 2 for n in s.sizes), 2) for s in found if not any(n % 2 for n in s.sizes)}
    return sorted(found, key=str)


CASES = [
    (shape, parts, source, target)
    for shape in ((), (5,), (4, 3), (6, 3), (2, 3, 4))
    for parts in (1, 2, 3, 4)
    for source, target in itertools.product(
        [B, FIRST, P_SUM, P_MAX, P_MIN, *_cuts(shape, parts)], [B, P_SUM, P_MAX, P_MIN, *_cuts(shape, parts)]
    )
]


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (6, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_every_change(shape: tuple[int, ...], parts: int) -> None:
    cases = [(s, t) for n, p, s, t in CASES if n == shape and p == parts]
    assert len(cases) >= 20
    for source, target in cases:
        program, layout = _program(source, target, shape)
        plan = plan_of(program, {"": layout}, parts, {})
        try:
            assert_equal_runs(program, plan)
        except AssertionError as error:
            raise AssertionError(f"{source} -> {target}") from error


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "uint8", "bool"])
def test_every_change_of_other_dtypes(dtype: str, parts: int) -> None:
    """Bit by bit where nothing is added up."""
    shape, sums = (4, 3), [] if dtype == "bool" else [P_SUM]
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
    for source, target in itertools.product([B, P_MAX, P_MIN, *sums, *_cuts(shape, parts)], repeat=2):
        program, layout = _program(source, target, shape, dtype)
        plan = plan_of(program, {"": layout}, parts, {})
        spread = assert_equal_runs(program, plan, feeds={"x": x})
        assert all(np.array_equal(outputs[0], x) for outputs in spread.outputs), f"{source} -> {target}"


@pytest.mark.parametrize(
    ("source", "target", "ops"),
    [
        (P_SUM, B, {"WhaleAllReduce"}), (P_SUM, shard(0, (2, 2)), {"WhaleReduceScatter"}),
        (shard(0, (2, 2)), B, {"WhaleAllGather"}), (shard(0, (2, 2)), shard(1, (2, 1)), {"WhaleAllToAll"}),
        (shard(0, (2, 2)), shard(0, (3, 1)), {"WhaleSend", "WhaleRecv"}), (shard(0, (2, 2)), P_SUM, {"PadV2"}),
        (FIRST, B, {"WhaleBroadcast"}), (FIRST, shard(0, (3, 1)), {"WhaleAllToAll"}), (FIRST, P_SUM, {"Fill"}),
        (B, shard(0, (2, 2)), {"Slice"}), (B, P_MAX, {"Fill"}),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value),
)  # fmt: skip
def test_the_op_of_each_change(source: Placement, target: Placement, ops: set[str]) -> None:
    t, r = TensorType("float64", (4, 3)), Reshard("", Ref("x"), source, target, "k", 0)
    made: set[str] = set()
    for rank in range(2):
        e = Emitter(rank, 2, "comm")
        assert emit_reshard(e, r, t, lambda rank=rank: None if source == FIRST and rank else Ref("x")) is not None
        made |= {n.op for n in e.nodes.values()} - {"Const", "WhaleCommunicator"}
    assert ops <= made and {op for op in made if op.startswith("Whale")} == {op for op in ops if op.startswith("Whale")}


def test_a_change_that_needs_two_steps_is_refused() -> None:
    reshard = Reshard("", Ref("x"), P_SUM, P_MAX, "k", 0)
    with pytest.raises(LayoutError, match=r"cannot be carried out by one reshard.*\n.*x:0\n.*P\(sum\) -> P\(max\)"):
        emit_reshard(Emitter(0, 2, "comm"), reshard, TensorType("float64", (4,)), lambda: Ref("x"))


def test_sizes_that_only_the_run_knows() -> None:
    """The tensor's rows are not static; partial sums and the first rank's tensor still reach everyone."""
    for source in (P_SUM, FIRST):
        b = Builder("unknown")
        x = b.input("x", (None, 3))
        op = "UnruledNoise" if source == FIRST else "Identity"
        made = b.node(op, (x,), (b.types[x],), "made", stateful=source == FIRST)
        moved = b.node("Relu", (made,), (b.types[x],), "moved")
        operand = B if source == FIRST else source
        strategies = {"x": Strategy((), (B,), ""), "made": Strategy((operand,), (source,), "", source == FIRST),
                      "moved": Strategy((B,), (B,), "")}  # fmt: skip
        layout = GraphLayout(strategies, {x: B, made: source, moved: B}, outputs=(B,))
        program = b.build([moved])
        plan = plan_of(program, {"": layout}, 3, {})
        whole, spread = run_both(program, plan, feeds={"x": np.arange(12.0).reshape(4, 3)})
        for outputs in spread.outputs:
            np.testing.assert_allclose(outputs[0], whole.outputs[0][0], rtol=1e-15)


@pytest.mark.parametrize("dtype", ["int32", "bool", "float32"])
def test_fills_have_the_tensors_own_dtype(dtype: str) -> None:
    reshard, t = Reshard("", Ref("x"), B, Partial("min"), "k", 0), TensorType(dtype, (2,))
    e = Emitter(1, 2, "comm")
    ref = emit_reshard(e, reshard, t, lambda: Ref("x"))
    assert ref is not None
    fill = e.nodes[ref.node]
    assert fill.op == "Fill" and fill.attrs["T"] == DType(dtype)
    value = e.nodes[fill.inputs[1].node].attrs["value"]
    assert value.dtype == dtype and np.minimum(value.numpy(), np.array(1, dtype)) == np.array(1, dtype)


def test_a_plan_without_the_reshard_is_refused() -> None:
    program, layout = _program(P_SUM, shard(0, (2, 2)), (4,))
    plan = plan_of(program, {"": layout}, 2, {})
    lacking = Plan(plan.program, plan.fingerprint, 2, strategies=plan.strategies, returned=plan.returned)
    with pytest.raises(PlanError, match=r"the plan lacks a reshard, .*\n  op: x:0\n  given: .* in placement P\(sum\)"):
        lowered(program, lacking)


def test_a_split_that_one_rank_has_whole_is_not_cut() -> None:
    e = Emitter(1, 2, "comm")
    target = Shard(0, (0, 4))
    assert e.cut("cut", Ref("x"), TensorType("float64", (4,)), target) == Ref("x")
    assert not e.nodes


def _held(ref: Ref) -> Callable[[], Ref | None]:
    return lambda: ref


@pytest.mark.parametrize("halo", [(1, 1), (0, 2), (3, 0), (4, 5)])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (3, 3, 2), (1, 6, 1), (4, 0, 4), (8, 0)], ids=str)
@pytest.mark.parametrize("divided", [True, False], ids=["divided", "whole"])
def test_what_neighbours_have(sizes: tuple[int, ...], halo: tuple[int, int], divided: bool) -> None:
    """Each rank gets the indices before and after its own, and what it lacks of them is what moves."""
    b = Builder("halo")
    x = b.input("x", (3, 8))
    whole, t = b.build([x]), b.types[x]
    own, wide = shard(1, sizes), shard(1, sizes, 1, halo)
    start: Placement = own if divided else B
    moved = count_moved_bytes(start, wide, t.bytes, len(sizes))
    programs = []
    for rank in range(len(sizes)):
        e = Emitter(rank, len(sizes), "comm")
        e.nodes["x"] = whole.by_name["x"]
        mine = e.cut("own", x, t, own) if divided else x
        found = emit_reshard(e, Reshard("", x, start, wide, "key", moved), t, _held(mine))
        assert found is not None
        effects = [n.name for n in e.nodes.values() if n.op == "WhaleSend"]
        programs.append(Program("halo", sort_nodes(e.nodes), ("x",), (), (found,), tuple(effects)))
    value = np.arange(24.0).reshape(3, 8)
    spread = run(programs, {"x": value}, {})
    for rank, outputs in enumerate(spread.outputs):
        np.testing.assert_array_equal(outputs[0], np.take(value, wide.list_indices(rank), axis=1))
    assert sum(call.bytes for call in spread.calls) == moved
    assert count_moved_bytes(P_SUM, wide, t.bytes, len(sizes)) == (len(sizes) - 1) * t.bytes + count_moved_bytes(
        own, wide, t.bytes, len(sizes)
    )
