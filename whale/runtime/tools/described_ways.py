"""Plans described models of the families `FAMILIES` (`whale plan --describe bert:...`).

A described step is captured, and spread as `auto_parallel` would spread it over the devices of a cluster.
What is predicted is what the ranks would run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec

from cost_model.cluster.allocation import named_cluster
from cost_model.cluster.cluster_file import Cluster
from whale.cgroup import cpu_quota
from whale.errors import DoesNotFitError, PlanError
from whale.ir.plan import Plan
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.ir.strategy import ParallelStrategy
from whale.partition.lower import make_any_plan, shown_ranks, with_memory
from whale.passes.pass_manager import normalise
from whale.passes.settings import FuseSettings, PlanSettings
from whale.planner.graph_search.environment import SearchEnvironment
from whale.planner.graph_search.predict import Made, apply, recompute_of
from whale.planner.graph_search.search import best_way
from whale.runtime.compile.memory_plan import options_text
from whale.runtime.compile.settings import fused_on
from whale.runtime.described import Description, program_of
from whale.runtime.described.families import T5, Bert, Classifier, Dlrm, Resnet, Vit
from whale.runtime.tools.plan_prediction import Planned, predicted_on

FAMILIES: dict[str, type[Description]] = {
    "bert": Bert,
    "t5": T5,
    "vit": Vit,
    "resnet": Resnet,
    "dlrm": Dlrm,
    "classifier": Classifier,
}
SPREAD = ("split", "tensor_parallel", "sequence_parallel", "recompute")  # fields that say how a model is spread


def read(text: str, batch: int | None = None) -> Description:
    """Reads a description such as `dlrm:tables=26,rows=1000000,factors=16,batch=4096`: a family of FAMILIES and its
    fields.

    Raises:
      PlanError: it cannot be read, or names no batch and none is given.
    """
    family, _, rest = text.partition(":")
    fields: dict[str, str | int] = {} if batch is None else {"batch": batch}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name.strip() in SPREAD:
            raise PlanError(
                "how a model is spread is no part of its description", given=part, action="leave it out: it is chosen"
            )
        fields[name.strip()] = value.strip()
    try:
        # Lists of widths are for model files.
        return msgspec.convert({"family": family, **fields}, FAMILIES[family], strict=False)
    except msgspec.ValidationError as error:
        names = ", ".join(f.name for f in msgspec.structs.fields(FAMILIES[family]) if f.name not in SPREAD)
        raise PlanError("a description cannot be read", given=text, reason=str(error), expected=names) from error


def spread(
    described: Description, cluster: Cluster, budget_s: float | None = None
) -> tuple[ParallelStrategy, list[str], Plan]:
    """Returns (the fastest way that fits, over all devices; what was found, line by line; its plan, with the
    prediction).

    Args:
      budget_s: seconds on the clock, after which no further way is looked at; None: as long as a run has.

    Raises:
      PlanError: the model can be spread in no way, or fits in none.
    """
    captured = program_of(described, mark_gradients=True)
    settings = _settings(cluster)
    program = normalise(captured, settings)
    environment = SearchEnvironment.of_cluster(cluster, program, settings.size, captured)
    try:
        found = best_way(program, settings, environment, budget_s=budget_s)
    except DoesNotFitError as error:
        limit_bytes, apart = min(environment.limits_bytes), cluster.kinds == {"gpu"}
        error.action = options_text(settings, limit_bytes, captured, lambda: captured, apart)
        raise
    plan = _told(found.chosen.strategy, found.made, cluster)
    return found.chosen.strategy, found.lines, plan


def planned_as(strategy: ParallelStrategy, captured: Program, cluster: Cluster) -> Plan:
    """Returns the plan of a captured step that is spread in one way over all devices, with what it is predicted to
    take.

    Raises:
      PlanError: it cannot be spread so.
    """
    settings = _settings(cluster)
    if how := recompute_of(strategy):
        settings = settings.but(memory__recompute=how)
    program, settings = apply(normalise(captured, settings), settings, strategy)
    return _told(strategy, Made(program, settings, make_any_plan(program, settings)), cluster)


def _settings(cluster: Cluster) -> PlanSettings:
    return PlanSettings(size=cluster.device_count, fuse=fused_on(cluster, FuseSettings.all_on()))


def _told(strategy: ParallelStrategy, made: Made, cluster: Cluster) -> Plan:
    """Returns a strategy's plan with what it is predicted to take."""
    program, settings, plan = made.program, made.settings, made.plan
    predicted = predicted_on(Planned(program, plan, settings), cluster)
    plan = with_memory(plan, shown_ranks(program, plan, settings), settings)
    return replace(plan, predicted=predicted, strategy=strategy)


def main(
    text: str,
    batch: int | None,
    cluster: str,
    network: str | None,
    out: str | None,
    budget_s: float | None,
    found: Callable[[], None],
) -> int:
    """Prints what each way takes, and the plan of the fastest that fits.

    Args:
      out: file that receives that plan as JSON.
      budget_s: see `spread`.
      found: called when all are known, before anything is printed.

    Raises:
      ClusterError: the cluster cannot be read.
      PlanError: the description cannot be read, or nothing fits.
    """
    machines = named_cluster(cluster, network, cpu_quota())
    _, lines, plan = spread(read(text, batch), machines, budget_s)
    found()
    if out is not None:
        plan.save(out)
    sys.stdout.write("\n".join([f"{text}, on {machines.name}", *lines, "", format_plan(plan)]))
    return 0
