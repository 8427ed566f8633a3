"""Ranks of one process that compute as processes do which bring rows of their own: each cuts them from the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.combinations.program import ROWS
from whale.ir.program import Program
from whale.partition.rank_mapping import cut_rows
from whale.runtime.compile import compile as compiling
from whale.runtime.compile import step


def bring_own_rows(monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int]) -> None:
    """Has steps be compiled for ranks that pass so many rows each."""
    compile_program, lower_ranks = step.compile_program, compiling.lower_ranks

    def compiled(program: Program, context: Any, local: Any, *more: Any, **named: Any) -> Any:
        rows = {n: tuple(sizes) for n in program.inputs if program.by_name[n].outputs[0].shape[:1] == (ROWS,)}
        return compile_program(program, context, rows, *more, **named)

    def lowered(program: Program, plan: Any, settings: Any, ranks: Sequence[int], *more: Any) -> list[Program]:
        found = lower_ranks(program, plan, settings, ranks, *more)
        for b in plan.batch_inputs:
            found = [cut_rows(one, program, b, b.placement, rank) for one, rank in zip(found, ranks)]
        return found

    monkeypatch.setattr(step, "compile_program", compiled)
    monkeypatch.setattr(compiling, "lower_ranks", lowered)
