"""Explicit reshards: one per tensor and target, whole forms first."""

from __future__ import annotations

from tests.programs import Builder, layouts_of, mlp
from whale.ir.layout import P_MAX, P_SUM, B, Placement, Strategy, count_moved_bytes, shard
from whale.ir.plan import Reshard
from whale.ir.program import Program
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.resharding.reshards import explicit_reshards

ROWS, COLUMNS = shard(0, (4, 4)), shard(1, (2, 2))


def _readers(source: Placement, *targets: Placement) -> tuple[Program, GraphLayout]:
    """One tensor in ``source`` that a reader wants in each of ``targets``."""
    b = Builder()
    made = b.op("Relu", b.input("x", (8, 4)), name="made")
    readers = [b.op("Identity", made, name=f"reader{i}") for i in range(len(targets))]
    program = b.build(readers)
    strategies = {"x": Strategy((), (B,), ""), "made": Strategy((source,), (source,), "")}
    strategies |= {r.node: Strategy((t,), (B,), "") for r, t in zip(readers, targets)}
    produced: dict = {r: B for n in program.nodes for r in n.list_refs()} | {made: source}
    return program, GraphLayout(strategies, produced, outputs=(B,) * len(targets))


def _of_made(source: Placement, *targets: Placement) -> list[Reshard]:
    program, layout = _readers(source, *targets)
    return [r for r in explicit_reshards(program, {"": layout}, 2) if r.ref.node == "made"]


def test_one_reshard_for_many_readers() -> None:
    rows = _of_made(P_SUM, B, B, B)
    assert [(r.source, r.target, r.bytes, r.origin) for r in rows] == [(P_SUM, B, 2 * 256, "for reader0")]


def test_what_is_wanted_whole_and_cut_moves_once() -> None:
    rows = _of_made(P_SUM, ROWS, B)
    assert [(r.source, r.target, r.bytes) for r in rows] == [(P_SUM, B, 512), (B, ROWS, 0)]


def test_one_form_is_made_directly() -> None:
    assert [(r.source, r.target, r.bytes) for r in _of_made(P_SUM, ROWS)] == [(P_SUM, ROWS, 256)]
    assert [(r.source, r.target, r.bytes) for r in _of_made(ROWS, COLUMNS)] == [(ROWS, COLUMNS, 128)]


def test_several_cut_forms_are_cut_from_the_whole() -> None:
    rows = _of_made(ROWS, COLUMNS, shard(0, (8, 0)))
    assert [(r.source, r.target) for r in rows] == [(ROWS, B), (B, COLUMNS), (B, shard(0, (8, 0)))]


def test_another_reduction_goes_by_way_of_the_whole() -> None:
    assert [(r.source, r.target) for r in _of_made(P_SUM, P_MAX)] == [(P_SUM, B), (B, P_MAX)]


def test_what_is_there_needs_nothing() -> None:
    assert _of_made(ROWS, ROWS) == [] and _of_made(B, B) == []


def test_keys_are_unique_and_bytes_are_those_of_the_table() -> None:
    program = mlp()
    reshards = explicit_reshards(program, layouts_of(program, 2, {"x": ROWS, "y": ROWS}), 2)
    assert len({r.key for r in reshards}) == len(reshards) >= 5
    for r in reshards:
        assert r.bytes == count_moved_bytes(r.source, r.target, program.find_type(r.ref).bytes, 2)
    assert [r.ref.node for r in reshards] == sorted((r.ref.node for r in reshards), key=list(program.by_name).index)
