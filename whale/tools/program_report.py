"""Checks and draws the plan of a captured program: captures its step again, and inspects the ranks' programs.

`whale.planner.report.of_model` has the same functions for plans of described models. The check does not rely on the
planner: a plan from a file is proved legal for its program (`whale/partition/verify_saved_plan.py`), and the predicted
memory of each rank is compared with its device's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cost_model.cluster.cluster_file import Cluster
from cost_model.graph.machine import cluster_machine
from whale.errors import PlanError
from whale.ir.plan import Plan
from whale.ir.plan_text import format_bytes
from whale.partition.verify_saved_plan import format_in_a_line
from whale.passes.memory.step_bytes import predict_taken_bytes
from whale.planner.graph_search.plan_prediction import rank_programs
from whale.planner.report import draw_captured
from whale.planner.report.draw_captured import Drawn
from whale.planner.report.planfile import PlanFile
from whale.tools.dry_run import PredictionTarget, capture_again, replay

Measured = Callable[[float], Mapping[str, Any] | None]


def trace(plan: PlanFile, path: str, profile: str | None, cluster: str | None) -> str:
    """Returns the simulated timeline of all ranks as a Chrome trace in JSON.

    Args:
      path: path of the plan file.
      profile: path of a profile of `whale profile` to predict with; None: the cluster, or the default profile.
      cluster: path of a cluster file to predict with; None: the plan's own.
    """
    return draw_captured.trace(_draw(plan, path, profile, cluster))


def describe_page(
    plan: PlanFile, path: str, profile: str | None, cluster: str | None, measured: Measured
) -> dict[str, Any]:
    """Returns the data that `draw.page` draws for the plan; the arguments are those of `trace`.

    Args:
      measured: predicted seconds of a step -> a measured step to draw below, or None.
    """
    drawn = _draw(plan, path, profile, cluster, with_sliders=True)
    return draw_captured.describe_page(drawn, measured(drawn.prediction.step_s))


def _draw(plan: PlanFile, path: str, profile: str | None, cluster: str | None, with_sliders: bool = False) -> Drawn:
    return replay(plan, path, PredictionTarget(profile, cluster), with_sliders)


def problems(plan: PlanFile, path: str, cluster: Cluster | None) -> list[str]:
    """Returns the errors of a plan for its program, and for a cluster if one is known; an empty list: the plan is
    valid.

    Args:
      path: path of the plan file.
      cluster: the devices to check memory for; None: the plan's own cluster, if it has one.

    Raises:
      ClusterError: the script does not exist here.
      PlanError: the plan names no script.
      ProgramError: the script ends without the plan's step.
    """
    ranks, cluster = plan.strategy.ranks, cluster or plan.cluster
    devices = cluster_machine(cluster).memory_bytes if cluster is not None else ()
    if cluster is not None and len(devices) < ranks:
        return [f"the plan has {ranks} ranks, and the cluster {cluster.name} only {len(devices)} devices"]
    found = []
    try:
        planned = capture_again(plan, path)
        programs = rank_programs(planned)
    except PlanError as error:  # the saved plan is not legal for its program
        return [format_in_a_line(error)]
    for rank, program in enumerate(programs):
        needed = sum(predict_taken_bytes(program, rank, planned.settings).values())
        if cluster is not None and needed > devices[rank]:
            lacking = format_bytes(round(needed - devices[rank]))
            found.append(
                f"rank {rank} needs {format_bytes(needed)}, and its device has {format_bytes(round(devices[rank]))}: "
                f"{lacking} too much"
            )
    return found


def summary(plan: Plan) -> str:
    """Formats one line about a valid plan: ranks, operations, reshards and stages."""
    operations, stages = sum(map(len, plan.strategies.values())), len(plan.stage_groups)
    return f"{plan.program} on {plan.ranks} ranks, {operations} operations, {len(plan.reshards)} reshards" + (
        f", {stages} stages' groups with {len(plan.edges)} tensors between them" if stages else ""
    )
