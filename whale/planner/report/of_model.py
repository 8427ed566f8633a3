"""Checks and draws the plan of a described model by evaluating its strategy.

`whale.tools.program_report` has the same functions for plans of captured programs; the command line picks one module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cost_model.cluster.cluster_file import Cluster
from whale.planner.report import draw
from whale.planner.report.planfile import PlanFile

Measured = Callable[[float], Mapping[str, Any] | None]


def problems(plan: PlanFile, path: str, cluster: Cluster | None) -> list[str]:
    """Returns the errors of the plan, on `cluster` if one is given; an empty list: the plan is valid. `path` is not
    used.
    """
    return (msgspec.structs.replace(plan, cluster=cluster) if cluster is not None else plan).problems()


def trace(plan: PlanFile, path: str, profile: str | None, cluster: str | None) -> str:
    """Returns the plan's simulated timeline as a Chrome trace in JSON; only `plan` is used."""
    return draw.trace(plan)


def describe_page(
    plan: PlanFile, path: str, profile: str | None, cluster: str | None, measured: Measured
) -> dict[str, Any]:
    """Returns the data that `draw.page` draws for the plan.

    Args:
        measured: predicted seconds of a step -> a measured step to draw below, or None; other arguments are not used.
    """
    return draw.describe_page(plan, measured(plan.evaluate()[2].step_s))
