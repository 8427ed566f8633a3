"""Fused collectives: what may travel together, how much, and that the choice is the same everywhere."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.partition.random_programs import placements, programs
from tests.programs import Builder, layouts_of, mlp
from whale.ir.layout import P_SUM, B, Partial, Placement, Replicate, shard
from whale.ir.plan import Reshard
from whale.ir.program import Program, Ref
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.resharding.fuse_all_reduces import fuse_all_reduces
from whale.passes.resharding.reshards import explicit_reshards

ROWS = shard(0, (4, 4))
RELAXED = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def _grouped(program: Program, group_bytes: int, parts: int = 2, **placed: Placement) -> tuple[Reshard, ...]:
    layouts = layouts_of(program, parts, placed or dict.fromkeys(program.inputs, ROWS))
    return fuse_all_reduces(program, layouts, explicit_reshards(program, layouts, parts), group_bytes)


def _members(reshards: tuple[Reshard, ...]) -> list[list[str]]:
    table: dict[int, list[str]] = {}
    for r in reshards:
        if r.group >= 0:
            table.setdefault(r.group, []).append(r.ref.node)
    return [sorted(names) for names in table.values()]


def test_gradients_and_loss_travel_together() -> None:
    assert _members(_grouped(mlp(), 1 << 20)) == [["d_b1", "d_b2", "d_w1", "d_w2", "loss"]]


@pytest.mark.parametrize("group_bytes", [0, 8, 100, 200, 336, 500])
def test_no_group_is_larger_than_asked(group_bytes: int) -> None:
    program = mlp()
    reshards = _grouped(program, group_bytes)
    for names in _members(reshards):
        assert len(names) > 1
        assert sum(program.by_name[n].outputs[0].bytes for n in names) <= group_bytes
    assert {r.ref.node for r in reshards if isinstance(r.source, Partial)} == {"d_b1", "d_b2", "d_w1", "d_w2", "loss"}


def test_groups_are_filled_in_the_order_of_the_backward_pass() -> None:
    """loss 8, d_w2 144, d_b2 24, d_w1 192, d_b1 48 bytes: two groups of at most 200."""
    assert _members(_grouped(mlp(), 200)) == [["d_b2", "d_w2", "loss"]]
    assert _members(_grouped(mlp(), 240)) == [["d_b2", "d_w2", "loss"], ["d_b1", "d_w1"]]


def _chain() -> Program:
    """The second sum needs the first one; the third needs neither."""
    b = Builder("chain")
    x, w = b.input("x", (8, 4)), b.input("w", (4, 4))
    product = b.matmul(x, w, name="product")
    first = b.matmul(x, product, a=True, name="first")
    second = b.matmul(x, b.matmul(x, b.op("Tanh", first), name="again"), a=True, name="second")
    third = b.matmul(product, product, a=True, name="third")
    return b.build([b.op("Tanh", second), b.op("Tanh", third)])


def test_what_waits_for_another_sum_travels_later() -> None:
    reshards = _grouped(_chain(), 1 << 20, x=ROWS)
    assert {r.ref.node for r in reshards if r.source == P_SUM} == {"first", "second", "third"}
    assert _members(reshards) == [["first", "third"]]


def test_unlike_reductions_do_not_mix() -> None:
    b = Builder("unlike")
    product = b.matmul(b.input("x", (8, 400)), b.op("Fill", b.ints(400, 400), b.const(1.0)), name="product")
    outs = [
        b.reduce(op, product, 0, name=name)
        for op, name in (("Max", "max"), ("Sum", "sum"), ("Max", "other"), ("Min", "min"))
    ]
    small = b.op("Cast", b.reduce("Sum", product, 0, name="single"), SrcT="d", DstT="float32", name="cast")
    reshards = _grouped(b.build([*(b.op("Tanh", o) for o in outs), small]), 1 << 20, x=ROWS)
    assert ["max", "other"] in _members(reshards)
    for names in _members(reshards):
        kinds = {(r.source, b.types[r.ref].dtype) for r in reshards if r.ref.node in names}
        assert len(kinds) == 1


def _depends(program: Program, on: Ref, layout: GraphLayout) -> set[str]:
    """Nodes that are computed from the whole form of ``on``, by plain search."""
    found: set[str] = set()
    for node in program.nodes:
        direct = any(r == on and type(p) is Replicate for r, p in zip(node.inputs, layout.strategies[node.name].inputs))
        if direct or any(r.node in found for r in node.inputs) or any(c in found for c in node.controls):
            found.add(node.name)
    return found


@RELAXED
@given(programs(), st.integers(2, 3), st.sampled_from([100, 1000, 1 << 20]), st.integers(0, 99), st.data())
def test_groups_of_random_programs(program: Program, parts: int, limit: int, seed: int, data: st.DataObject) -> None:
    layouts = layouts_of(program, parts, data.draw(placements(program, parts)))
    reshards = explicit_reshards(program, layouts, parts)
    grouped = fuse_all_reduces(program, layouts, reshards, limit)
    assert [(r.ref, r.source, r.target, r.key, r.bytes) for r in grouped] == [
        (r.ref, r.source, r.target, r.key, r.bytes) for r in reshards
    ]
    members: dict[int, list[Reshard]] = {}
    for r in grouped:
        if r.group >= 0:
            members.setdefault(r.group, []).append(r)
    assert sorted(members) == list(range(len(members)))
    for rows in members.values():
        assert len(rows) > 1 and sum(program.find_type(r.ref).bytes for r in rows) <= limit
        for r in rows:
            waiting = _depends(program, r.ref, layouts[""])
            assert not any(other.ref.node in waiting for other in rows), "a member waits for another"
    _assert_same_in_any_order(program, layouts, grouped, limit, random.Random(seed))


def _assert_same_in_any_order(
    program: Program, layouts: dict[str, GraphLayout], grouped: tuple[Reshard, ...], limit: int, order: random.Random
) -> None:
    """Dicts filled in another order, reshards listed in another order: the same groups with the same numbers."""

    def shuffled(table: dict) -> dict:
        items = list(table.items())
        order.shuffle(items)
        return dict(items)

    layout = layouts[""]
    other = GraphLayout(
        shuffled(layout.strategies),
        shuffled(layout.produced),
        shuffled(layout.preferred),
        layout.outputs,
        layout.unruled,
    )
    rows = list(grouped)
    order.shuffle(rows)
    again = fuse_all_reduces(program, {"": other}, tuple(rows), limit)
    assert {r.key: r.group for r in again} == {r.key: r.group for r in grouped}


def test_sizes_that_only_the_run_knows_travel_alone() -> None:
    b = Builder("unknown")
    x = b.input("x", (8, 4))
    product = b.matmul(x, b.const([[1.0] * 4] * 4), name="product")
    total = b.reduce("Sum", product, 0, name="total")
    ragged = b.node("Mul", (total, total), (b.types[total].__class__("float64", (None,)),), "ragged")
    layouts = layouts_of(b.build([total, ragged]), 2, {"x": ROWS})
    produced = {**layouts[""].produced, ragged: P_SUM}
    layout = GraphLayout(layouts[""].strategies, produced, layouts[""].preferred, (B, B))
    program = b.build([total, ragged])
    reshards = (
        Reshard("", total, P_SUM, B, "total", 64), Reshard("", ragged, P_SUM, B, "ragged", 16),
    )  # fmt: skip
    assert [r.group for r in fuse_all_reduces(program, {"": layout}, reshards, 1 << 20)] == [-1, -1]


def _lookups(count: int, width: int = 4) -> Program:
    """Rows of the batch are added to a table each, which every rank has whole; one of them is also fetched whole."""
    b = Builder("lookups")
    x = b.input("x", (8, width))
    ids, updates = b.const([0] * 8, "int32"), []
    for i in range(count):
        table = b.variable(f"table_{i}", (10, width))
        updates.append(b.update("ResourceScatterAdd", table, ids, b.op("Tanh", x, name=f"rows_{i}")))
    return b.build([b.op("Exp", x, name="fetched")], updates)


def test_what_updates_take_is_gathered_together() -> None:
    program = _lookups(3)
    assert _members(_grouped(program, 1 << 20, x=ROWS)) == [["rows_0", "rows_1", "rows_2"]]
    assert _members(_grouped(program, 600, x=ROWS)) == [["rows_0", "rows_1"]]  # 256 bytes each
    layouts = layouts_of(program, 2, {"x": ROWS})
    reshards = explicit_reshards(program, layouts, 2)
    assert {r.ref.node for r in reshards} >= {"rows_0", "rows_1", "rows_2", "fetched"}
    assert not any(r.group >= 0 for r in fuse_all_reduces(program, layouts, reshards, 1 << 20, gathers=False))


def test_what_sends_nothing_is_not_grouped() -> None:
    """It adds no depth: what waits for it could be of its group."""
    assert _members(_grouped(_lookups(3, width=0), 1 << 20, x=ROWS)) == []
