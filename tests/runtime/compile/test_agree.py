"""What a rank says while it waits for rank 0's plan."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import whale_ops
from tests.programs import mlp, planned
from whale.passes.settings import PlanSettings
from whale.runtime.compile import agree

_TIMEOUT_S = 30.0


def test_a_rank_that_waits_for_a_plan_says_that_rank_0_is_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    comms = whale_ops.in_process("planning", 2)
    program, plan, said = mlp(), planned(mlp(), 4, 4), []

    def slowly(*_: Any) -> Any:
        end_s = time.monotonic() + _TIMEOUT_S
        while not said and time.monotonic() < end_s:
            said.extend(wait.what for wait in comms[1].waits())
            time.sleep(0.01)
        return plan

    def of_rank(rank: int) -> Any:
        config = {"check.timeout_s": _TIMEOUT_S}
        context: Any = SimpleNamespace(between_processes=True, rank=rank, comms=[comms[rank]], config=config)
        return agree.agreed_plan(program, 3, context, PlanSettings(size=2))

    monkeypatch.setattr(agree, "made_plan", slowly)
    with ThreadPoolExecutor(2) as threads:
        plans = list(threads.map(of_rank, (0, 1)))
    assert said == ["the planning of program 3, `mlp` (rank 0 is planning)"]
    assert plans[0] == plans[1]
