"""Checks and draws the plan of a program: captures its step again, and inspects the ranks' programs.

`whale.planner.report.of_model` has the same functions for plans of described models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from whale.planner.report import draw_captured
from whale.planner.report.draw_captured import Drawn
from whale.planner.report.planfile import PlanFile
from whale.tools.dry_run import PredictionTarget, replay
from whale.tools.plan_check import problems

__all__ = ["describe_page", "problems", "trace"]

Measured = Callable[[float], Mapping[str, Any] | None]


def trace(plan: PlanFile, path: str, profile: str | None, cluster: str | None) -> str:
    """Returns the simulated timeline of all ranks as a Chrome trace."""
    return draw_captured.trace(_draw(plan, path, profile, cluster))


def describe_page(
    plan: PlanFile, path: str, profile: str | None, cluster: str | None, measured: Measured
) -> dict[str, Any]:
    """Returns the plan's data for `draw.page`; ``measured``: a measured step, given the predicted seconds."""
    drawn = _draw(plan, path, profile, cluster, with_sliders=True)
    return draw_captured.describe_page(drawn, measured(drawn.prediction.step_s))


def _draw(plan: PlanFile, path: str, profile: str | None, cluster: str | None, with_sliders: bool = False) -> Drawn:
    return replay(plan, path, PredictionTarget(profile, cluster), with_sliders)
