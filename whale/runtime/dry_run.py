"""Plans without processes: ``wh.plan`` and `whale plan script`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whale.capture.function import capture_function
from whale.errors import ClusterError, ProgramError
from whale.ir.plan import Plan
from whale.ir.text import format_plan
from whale.passes.pipeline import PlanContext, normalise
from whale.runtime import context as runtime_context
from whale.runtime.compile import plan_context, with_memory
from whale.runtime.mesh import plan_program


def plan(fn: Any, *args: Any, ranks: int = 1, **kwargs: Any) -> Plan:
    """The plan of a step for ``ranks`` ranks, made in this process alone.

    Args:
      fn: a Python function, a tf.function or a wh.function.
      args, kwargs: its arguments; tf.TensorSpec with static shapes (the global batch) stand for tensors.

    Raises:
      CaptureError: the step cannot be captured.
      PlanError: the batch cannot be split as asked.
    """
    captured = capture_function(getattr(fn, "__wrapped__", fn), args, kwargs)
    settings = PlanContext(size=ranks)
    if runtime_context._current is not None:
        from dataclasses import replace

        settings = replace(plan_context(runtime_context._current), size=ranks)
    program = normalise(captured.program, settings)
    return with_memory(program, plan_program(program, settings), settings)


def main(script: str, args: Sequence[str], ranks: int, out: str | None = None) -> int:
    """Runs ``script`` up to its first step with a batch, prints that step's plan for ``ranks`` ranks, and stops there.

    Programs without a batch input (initial values, restoring) run on one rank, so that the script gets to its step.

    Args:
      args: the script's arguments.
      out: file that receives the plan as JSON.

    Raises:
      ClusterError: the script does not exist.
      ProgramError: the script ended without a step that takes a batch.
    """
    if not Path(script).is_file():
        raise ClusterError(
            "the script does not exist", given=script, expected="a Python file", action="correct the path"
        )
    planned: list[Plan] = []

    def stop(plan: Plan) -> None:
        if plan.batch_inputs:
            planned.append(plan)
            raise _Planned

    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runtime_context.dry_run(ranks, stop)
    try:
        runpy.run_path(script, run_name="__main__")
    except _Planned:
        pass
    finally:
        runtime_context.shutdown()
    if not planned:
        raise ProgramError(
            "the script ended before it ran a step that takes a batch",
            given=script,
            expected="a call of a wh.function or wh.Session.run that takes or is fed a batch",
            action="check that the script calls its step when started alone",
        )
    if out is not None:
        planned[0].save(out)
    sys.stdout.write(format_plan(planned[0]))
    return 0


class _Planned(BaseException):
    """Ends the script: its plan is known. Not an Exception, so that the script's own handlers let it pass."""
