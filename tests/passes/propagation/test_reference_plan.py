"""Strategies of a nearly equal program are kept where they fit, also along sizes that only a step knows."""

from __future__ import annotations

import pytest

from tests.programs import Builder, body
from whale.ir.layout import P_SUM, B, Placement, Strategy, shard
from whale.ir.program import Program, Ref
from whale.ir.values import TensorType
from whale.passes.propagation.propagate import propagate
from whale.passes.propagation.reference_plan import ReferencePlan

TABLE, ROWS = shard(0, (13, 13, 12, 12)), shard(0, (8, 8, 8, 8))


def _look_up(ids: int | None) -> Program:
    """Looks up rows of a table of 50 by so many ids, of a number that only the step knows where it is None."""
    b = Builder()
    handle = b.variable("table", (50, 8))
    given = b.input("ids", (ids,), "int32")
    rows = b.node("ResourceGather", [handle, given], [TensorType("float64", (ids, 8))], "look_up")
    return b.build([rows])


@pytest.mark.parametrize(
    ("ids", "rows", "kept"),
    [
        (None, TABLE, True),  # each rank looks up those that are in its part of the table
        (32, ROWS, True),
        (32, TABLE, False),  # 50 are not 32
        (8, ROWS, False),
    ],
)
def test_a_strategy_is_kept_where_no_known_size_speaks_against_it(ids: int | None, rows: Placement, kept: bool) -> None:
    program, strategy = _look_up(ids), Strategy((TABLE, rows), (rows,), "of the table")
    known = ReferencePlan({"": {"look_up": strategy}})
    assert known.exact(program, "", program.by_name["look_up"]) == (strategy if kept else None)


def test_what_may_be_rows_of_another_number_is_not_kept() -> None:
    program, strategy = _look_up(None), Strategy((B, ROWS), (ROWS,), "of the batch")
    known = ReferencePlan({"": {"look_up": strategy}}, {(8, 8, 8, 8): (6, 2, 12, 12)})
    assert known.exact(program, "", program.by_name["look_up"]) is None


def test_results_of_branches_and_loops_are_partial_where_they_are_in_the_reference() -> None:
    """Bodies of a group of ranks without rows return constants where those of the first group return sums of rows."""
    b = Builder("like")
    start = b.op("Fill", b.ints(4), b.const(0.0), name="start")
    then, (x,) = body("then", (4,))
    other, _ = body("other", (4,))
    twice = then.build([then.op("Neg", x)]), other.build([other.op("Fill", other.ints(4), other.const(1.0))])
    b.branch(b.op("Less", b.const(1.0), b.const(2.0)), *twice, start, name="branch")
    turn, (count, state) = body("turn", (), (4,))
    again = turn.build([turn.op("AddV2", count, turn.const(1.0)), turn.op("Identity", state)])
    until, (count, _) = body("until", (), (4,))
    more = until.build([until.op("Less", count, until.const(2.0))])
    b.loop(more, again, b.const(0.0), start, name="loop")
    program = b.build([Ref("branch"), Ref("loop", 1)])
    known = {"branch": Strategy((B, B), (P_SUM,), "branch"), "loop": Strategy((B, P_SUM), (B, P_SUM), "loop")}
    found = propagate(program, 2, {}, model=ReferencePlan({"": known}))[""].strategies
    assert found["branch"].outputs == (P_SUM,) and found["loop"].outputs == (B, P_SUM)
    alone = propagate(program, 2, {})[""].strategies
    assert alone["branch"].outputs == (B,) and alone["loop"].outputs == (B, B)


def test_the_length_of_a_list_is_read_where_the_list_lies_here() -> None:
    """In the reference the list's elements have five rows, divided; here they have three and are whole."""
    b, lists = Builder(), TensorType("variant", ())
    listed = b.node("TensorListFromTensor", (b.input("x", (2, 3, 4)), b.ints(3, 4)), (lists,), "list")
    length = b.node("TensorListLength", (listed,), (TensorType("int32", ()),), "length")
    divided = shard(0, (3, 2))
    known = {
        "list": Strategy((shard(1, (3, 2)), B), (divided,), "by rows"),
        "length": Strategy((divided,), (B,), "of any list"),
    }
    found = propagate(b.build([length]), 2, {}, model=ReferencePlan({"": known}))[""].strategies
    assert found["list"].outputs == found["length"].inputs == (B,)
