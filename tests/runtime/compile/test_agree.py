"""What a rank says while it waits for rank 0's plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import whale_ops
from tests.programs import mlp, planned
from whale.errors import ProgramError
from whale.ir.program import Program, make_const, rename_nodes
from whale.ir.values import Tensor, TensorType
from whale.passes.settings import PlanSettings
from whale.runtime.compile import cross_rank_checks
from whale.runtime.context import Reports

_TIMEOUT_S = 30.0


def _renamed(program: Program) -> Program:
    return rename_nodes(program, {program.nodes[2].name: "of_this_rank"})


def _of_another_constant(program: Program) -> Program:
    constant = make_const("factor", Tensor.from_numpy(np.float32(2.0), "float32"))
    return program.replace_nodes((*program.nodes, constant))


def _of_more_rows(program: Program) -> Program:
    first = program.by_name[program.inputs[0]]
    wider = replace(first, outputs=(TensorType("float32", (99, 7)),))
    return program.replace_nodes(tuple(wider if node is first else node for node in program.nodes))


@pytest.mark.parametrize(
    ("change", "hashes", "cause"),
    [
        (_renamed, (), "layers, variables or columns made in the order of os.listdir"),
        (_renamed, (1,), "Python's string hashes differ between these ranks"),
        (_of_another_constant, (), "layers, variables or columns"),
        (_of_more_rows, (), ""),
    ],
)
def test_ranks_with_different_programs_hear_a_likely_cause(
    change: Callable[[Program], Program], hashes: tuple[int, ...], cause: str
) -> None:
    comms = whale_ops.connect_in_process(f"differing{change.__name__}{len(hashes)}", 2)
    programs = mlp(), change(mlp())

    def of_rank(rank: int) -> dict[str, Any]:
        config = {"debug.check_timeout_s": _TIMEOUT_S}
        context: Any = SimpleNamespace(
            has_other_processes=True,
            comms=[comms[rank]],
            config=config,
            reports=Reports(),
            other_hashes=hashes,
            rounds_otherwise=False,
        )
        with pytest.raises(ProgramError, match="about to run different programs") as refused:
            cross_rank_checks.compare_programs(programs[rank], {}, 0, context)
        return refused.value.facts

    with ThreadPoolExecutor(2) as threads:
        for facts in threads.map(of_rank, (0, 1)):
            assert facts.get("likely cause", "").startswith(cause)
            assert ("likely cause" in facts) == bool(cause)


def test_a_rank_that_waits_for_a_plan_says_that_rank_0_is_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    comms = whale_ops.connect_in_process("planning", 2)
    program, plan, said = mlp(), planned(mlp(), 4, 4), []

    def slowly(*_: Any) -> Any:
        end_s = time.monotonic() + _TIMEOUT_S
        while not said and time.monotonic() < end_s:
            said.extend(wait.what for wait in comms[1].waits())
            time.sleep(0.01)
        return plan

    def of_rank(rank: int) -> Any:
        config = {"debug.check_timeout_s": _TIMEOUT_S}
        context: Any = SimpleNamespace(has_other_processes=True, rank=rank, comms=[comms[rank]], config=config)
        return cross_rank_checks.agree_on_plan(program, 3, context, PlanSettings(size=2))

    monkeypatch.setattr(cross_rank_checks, "make_plan", slowly)
    with ThreadPoolExecutor(2) as threads:
        plans = list(threads.map(of_rank, (0, 1)))
    assert said == ["the planning of program 3, `mlp` (rank 0 is planning)"]
    assert plans[0] == plans[1]
