"""Predicts a workload under every plan, in a process of its own: ``python -m ...foresee WORKLOAD PROFILE OUT``.

The workload's operations are measured first (`whale profile SCRIPT` does the same), which completes the profile.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import whale as wh
from benchmarks.predictions.models import WORKLOADS, Workload, make_step
from benchmarks.predictions.plans import KINDS
from cost_model.graph import machine_profile as tables
from whale.capture.function import capture_function
from whale.errors import WhaleError
from whale.partition.mesh import plan_program
from whale.passes.pass_manager import normalise
from whale.planner.graph_search.plan_prediction import Planned, predict_plan
from whale.runtime.compile.settings import settings_of
from whale.runtime.context import DryRun, require_current
from whale.runtime.start import plan_only
from whale.tools.profile.profile import measure_programs as profile_programs
from whale_ops.memory import COUNTED_FROM_BYTES


def main() -> None:
    """Writes {kind: {"step_s", "ranks": [...]} or {"refused": why}}."""
    name, profile, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    planned: dict[str, Planned] = {}
    found: dict[str, object] = {}
    for kind_name in KINDS:
        try:
            planned[kind_name] = plan(name, kind_name)
        except WhaleError as error:
            found[kind_name] = {"refused": str(error).splitlines()[0]}
    table = profile_programs(tables.read(profile), list(planned.values()), profile, print)
    for kind_name, one in planned.items():
        predicted = predict_plan(one, table, COUNTED_FROM_BYTES)
        found[kind_name] = {"step_s": predicted.step_s, "ranks": [asdict(rank) for rank in predicted.ranks]}
    out.write_text(json.dumps(found))


def plan(name: str, kind_name: str) -> Planned:
    """The workload under one plan."""
    workload, kind = WORKLOADS[name], KINDS[kind_name]
    return plan_workload(workload, kind.ranks, kind.configuration(workload.batch), kind.scope())


def plan_workload(
    workload: Workload,
    ranks: int,
    configuration: Mapping[str, Any] = MappingProxyType({}),
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Planned:
    """Captures a workload and plans it for so many ranks, without starting them."""
    with plan_only(DryRun(ranks, lambda *_: None)):
        wh.init(dict(configuration))
        step, batch = make_step(workload, lambda fn: fn, scope)
        captured = capture_function(step, batch, {})
        settings = settings_of(require_current()).but(size=ranks)
        program = normalise(captured.program, settings)
        return Planned(program, plan_program(program, settings), settings)


if __name__ == "__main__":
    main()
