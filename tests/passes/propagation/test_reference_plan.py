"""Strategies of a nearly equal program are kept where they fit, also along sizes that only a step knows."""

from __future__ import annotations

import pytest

from tests.programs import Builder
from whale.ir.layout import B, Placement, Strategy, shard
from whale.ir.program import Program
from whale.ir.values import TensorType
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
