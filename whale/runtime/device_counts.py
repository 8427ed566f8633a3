"""Translates numbers in scripts of the first Whale: devices of a replica, and micro-batches as configured."""

from __future__ import annotations

from whale.errors import PlanError
from whale.ir.mesh import TENSOR
from whale.runtime.context import require_current

_SCHEDULES = {"preferbackward": "1f1b", "preferbackwardoptimizer": "1f1b", "preferforward": "gpipe"}


def check_count(kind: str, count: int | None) -> None:
    """Raises PlanError if the number of devices of a replica does not divide the number of ranks."""
    size = require_current(f"the scope wh.{kind}").planned_size
    if count is not None and (count < 1 or (size > 1 and size % count)):
        raise PlanError(
            f"the ranks cannot be divided among parts of wh.{kind}",
            given=f"device_count={count}, {size} ranks",
            expected=f"a number that divides {size}",
            action="correct device_count, or start another number of ranks",
        )


def set_split_ranks(count: int | None) -> None:
    """Makes ``count`` consecutive ranks divide tensors together, in all of the run.

    Raises:
      PlanError: it does not divide the ranks, or the run has another number.
    """
    context = require_current("the scope wh.split")
    if count is None or context.planned_size == 1:
        return
    check_count("split", count)
    config = context.config
    known = context.mesh.get(TENSOR) or (context.planned_size if context.scoping.dividing_scope_seen else 0)
    if (config["mesh"] or known) and known != count:
        raise PlanError(
            "all tensors of a run are divided over the same number of ranks",
            given=f"device_count={count}, and {config['mesh'] or f'{known} ranks'} before",
            expected="one number for all splits",
            action="give every wh.split the same device_count, or name axes with the key mesh",
        )
    context.scoping.split_ranks = count


def refuse_unnamed_stage(count: int | None) -> None:
    """Raises PlanError for a stage with a number of ranks instead of their names."""
    if count not in (None, 1):
        raise PlanError(
            "a stage with several ranks has to name them",
            given=f"device_count={count}",
            expected="its ranks, or 1",
            action="name them: wh.stage(devices=[0, 1])",
        )


def read_micro_batches() -> int:
    """Returns the configured number of micro-batches."""
    return int(require_current("the scope wh.pipeline").config["pipeline.micro_batches"])


def check_schedule(strategy: str | None) -> None:
    """Raises PlanError if a pipeline asks for another schedule than the run has."""
    config = require_current("the scope wh.pipeline").config
    if strategy is None or _SCHEDULES.get(strategy.lower(), strategy) == config["pipeline.schedule"]:
        return
    raise PlanError(
        "a pipeline cannot have another schedule than the run",
        given=f"strategy={strategy!r}, pipeline.schedule={config['pipeline.schedule']!r}",
        expected="the same",
        action="set the key pipeline.schedule",
    )
