"""Plans described models of the families `FAMILIES` (`whale plan --describe bert:...`).

A described step is captured, and divided over the devices of a cluster as `auto_parallel` would divide it.
Predictions are of the ranks' programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from cost_model.cluster.allocation import read_named_cluster
from cost_model.cluster.cluster_file import Cluster
from whale.cgroup import cpu_quota
from whale.errors import DoesNotFitError, PlanError, find_similar
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.ir.strategy import ParallelStrategy
from whale.partition.lower import add_memory, lower_shown_ranks
from whale.partition.verify_saved_plan import verify_saved_plan
from whale.passes.pass_manager import normalise
from whale.passes.settings import FuseSettings, PlanSettings
from whale.planner.evaluate import ProgramEvaluator
from whale.planner.graph_search.environment import SearchEnvironment
from whale.planner.graph_search.plan_prediction import Planned, predict_on
from whale.planner.graph_search.predict import complete
from whale.planner.graph_search.search import Found, best_way
from whale.planner.report import planfile
from whale.planner.report.planfile import Alternative, PlanFile
from whale.planner.report.show import show, terminal_width
from whale.runtime.compile.memory_plan import options_text
from whale.runtime.compile.settings import choose_fused
from whale.tools.models import T5, Bert, Classifier, Description, Dlrm, Resnet, Vit, capture_program

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
      PlanError: it cannot be read, or there is no batch.
    """
    family, _, rest = text.partition(":")
    fields: dict[str, str | int] = {} if batch is None else {"batch": batch}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name.strip() in SPREAD:
            raise PlanError(
                "a model's description cannot say how the model is divided",
                given=part,
                action="leave it out: it is chosen",
            )
        fields[name.strip()] = value.strip()
    try:
        # Lists of widths are for model files.
        return msgspec.convert({"family": family, **fields}, FAMILIES[family], strict=False)
    except msgspec.ValidationError as error:
        names = [f.name for f in msgspec.structs.fields(FAMILIES[family]) if f.name not in SPREAD]
        wrong = next((name for name in fields if name not in names), "")
        near = find_similar(wrong, names) if wrong else ""
        raise PlanError(
            "a description cannot be read",
            given=text,
            reason=str(error),
            expected=", ".join(names),
            action=f"write {near}={fields[wrong]}, if that is meant" if near else None,
        ) from error


def find_strategy(described: Description, cluster: Cluster, budget_s: float | None = None) -> tuple[Found, Plan]:
    """Searches over all devices; returns the result, and the plan of the fastest strategy that fits, with its
    prediction.

    Args:
      budget_s: seconds after which no further strategy is tried; None: the default of a run.

    Raises:
      PlanError: no strategy of the model can run, or none fits.
    """
    captured = capture_program(described, mark_gradients=True)
    settings = _settings(cluster)
    program = normalise(captured, settings)
    environment = SearchEnvironment.read_cluster(cluster, program, settings.size, captured)
    try:
        found = best_way(program, settings, environment, budget_s=budget_s)
    except DoesNotFitError as error:
        apart = "cpu" not in cluster.kinds
        error.action = options_text(settings, environment.limits_bytes, captured, lambda: captured, apart)
        raise
    made = Planned(found.made.program, found.made.plan, found.made.settings)
    return found, _add_prediction(found.chosen.strategy, made, cluster)


def plan_as(strategy: ParallelStrategy, captured: Program, cluster: Cluster) -> Plan:
    """Returns the plan of a captured step under a strategy over all devices, with its prediction.

    Raises:
      PlanError: it cannot be divided that way.
    """
    return _add_prediction(strategy, ProgramEvaluator(captured, _settings(cluster), cluster).plan(strategy), cluster)


def plan_again(plan: PlanFile, path: str) -> Planned:
    """Captures a described model's step again, under a saved plan of it.

    Raises:
      PlanError: the plan is not legal for the step.
    """
    assert plan.cluster is not None
    layouts = plan.plan
    assert layouts is not None
    captured = capture_program(read(plan.description, plan.batch), mark_gradients=True)
    program, settings = ProgramEvaluator(captured, _settings(plan.cluster), plan.cluster).apply(plan.strategy)
    if compute_fingerprint(program) != layouts.fingerprint:
        raise PlanError("the saved plan was made for another program", given=path, op=program.name)
    return Planned(program, layouts, settings, tuple(verify_saved_plan(program, layouts, settings, path)))


def _settings(cluster: Cluster) -> PlanSettings:
    return PlanSettings(size=cluster.device_count, fuse=choose_fused(cluster, FuseSettings.all_on()))


def _add_prediction(strategy: ParallelStrategy, made: Planned, cluster: Cluster) -> Plan:
    """Returns the plan of a strategy with its prediction."""
    program, settings = made.program, made.settings
    shown = lower_shown_ranks(program, made.plan, settings)
    plan = add_memory(made.plan, shown, settings)
    predicted = predict_on(replace(made, ranks=tuple(shown)), cluster)
    return replace(plan, predicted=predicted, strategy=complete(strategy, settings), searched=True)


def file_of(text: str, cluster: Cluster, found: Found, plan: Plan) -> PlanFile:
    """Returns the plan file of a described model's step, with the strategies that lost."""
    step_s = found.chosen.step_s
    others = []
    for one in found.others:
        if one.refused:
            others.append(Alternative(one.strategy, refused=one.refused))
        elif one.lacking_bytes > 0:
            others.append(Alternative(one.strategy, lacking_bytes=one.lacking_bytes))
        else:
            others.append(Alternative(one.strategy, slower_s=one.step_s - step_s))
    return planfile.from_program(plan, cluster, text, others)


def main(
    text: str,
    batch: int | None,
    cluster: str,
    network: str | None,
    out: str | None,
    budget_s: float | None,
    found: Callable[[], None],
) -> int:
    """Prints the plan of the fastest strategy that fits, and the predictions of others.

    Args:
      out: file to write that plan to, as JSON.
      budget_s: see `spread`.
      found: called when all are known, before anything is printed.

    Raises:
      ClusterError: the cluster cannot be read.
      PlanError: the description cannot be read, or no strategy fits.
    """
    machines = read_named_cluster(cluster, network, cpu_quota())
    plan = file_of(text, machines, *find_strategy(read(text, batch), machines, budget_s))
    found()
    if out is not None:
        planfile.save(plan, out)
    print(show(plan, terminal_width()))
    return 0
