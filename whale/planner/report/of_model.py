"""Checks and draws the plan of a described model by evaluating its strategy; no program is captured.

`whale.tools.program_report` has the same functions for plans of programs.
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
    """Lists the errors of the plan, on another cluster if one is given; empty: none."""
    return (msgspec.structs.replace(plan, cluster=cluster) if cluster is not None else plan).problems()


def trace(plan: PlanFile, path: str, profile: str | None, cluster: str | None) -> str:
    """Returns the simulated timeline as a Chrome trace."""
    return draw.trace(plan)


def describe_page(
    plan: PlanFile, path: str, profile: str | None, cluster: str | None, measured: Measured
) -> dict[str, Any]:
    """Returns the plan's data for `draw.page`; ``measured``: a measured step, given the predicted seconds."""
    return draw.describe_page(plan, measured(plan.evaluate()[2].step_s))
