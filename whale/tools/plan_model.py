"""Plans models that are described on the command line but captured as programs (`whale plan --describe bert:...`).

The step of the model is captured, and divided over the devices of a cluster as `auto_parallel` would divide it.
Predictions simulate the ranks' programs.
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
    """Parses a description such as `dlrm:tables=26,rows=1000000,factors=16,batch=4096`: a family of FAMILIES with its
    fields.

    Args:
        batch: global batch in rows, which `batch=` in the text overrides.

    Raises:
      PlanError: the text cannot be read, or there is no batch.
    """
    family, _, rest = text.partition(":")
    fields: dict[str, str | int] = {} if batch is None else {"batch": batch}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name.strip() in SPREAD:
            raise PlanError(
                "a model's description cannot say how the model is divided",
                given=part,
                action=f"leave {name.strip()} out: the search chooses it",
            )
        fields[name.strip()] = value.strip()
    try:
        # Fields that are lists (widths of layers) cannot be given in a description, only in a model file.
        return msgspec.convert({"family": family, **fields}, FAMILIES[family], strict=False)
    except msgspec.ValidationError as error:
        names = [f.name for f in msgspec.structs.fields(FAMILIES[family]) if f.name not in SPREAD]
        wrong = next((name for name in fields if name not in names), "")
        near = find_similar(wrong, names) if wrong else ""
        raise PlanError(
            "the model's description cannot be read",
            given=text,
            reason=str(error),
            expected=f"{family}: with fields of {', '.join(names)}",
            action=f"write {near}={fields[wrong]}, if that is meant" if near else "correct the field that reason names",
        ) from error


def find_strategy(described: Description, cluster: Cluster, budget_s: float | None = None) -> tuple[Found, Plan]:
    """Searches for the fastest strategy on all devices of a cluster; returns the search's result, and the plan with
    prediction.

    Args:
      budget_s: seconds after which no further strategy is tried; None: the default of `best_way`.

    Raises:
      PlanError: no strategy can run, or none fits into memory.
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
    """Plans a captured step under a given strategy over all devices; the plan has its prediction.

    Raises:
      PlanError: the step cannot be divided that way.
    """
    return _add_prediction(strategy, ProgramEvaluator(captured, _settings(cluster), cluster).plan(strategy), cluster)


def plan_again(plan: PlanFile, path: str) -> Planned:
    """Captures a described model's step again, under a saved plan for it.

    Args:
      path: path of the plan file, for errors.

    Raises:
      PlanError: the plan is for another program, or not legal for the step.
    """
    assert plan.cluster is not None
    layouts = plan.plan
    assert layouts is not None
    captured = capture_program(read(plan.description, plan.batch), mark_gradients=True)
    program, settings = ProgramEvaluator(captured, _settings(plan.cluster), plan.cluster).apply(plan.strategy)
    if compute_fingerprint(program) != layouts.fingerprint:
        raise PlanError(
            "the saved plan was made for another program",
            given=path,
            op=program.name,
            expected=f"the step of {plan.description}, as this version of Whale captures it",
            action="plan the model again: `whale plan --describe ... --cluster FILE -o FILE`",
        )
    return Planned(program, layouts, settings, tuple(verify_saved_plan(program, layouts, settings, path)))


def _settings(cluster: Cluster) -> PlanSettings:
    return PlanSettings(size=cluster.device_count, fuse=choose_fused(cluster, FuseSettings.all_on()))


def _add_prediction(strategy: ParallelStrategy, made: Planned, cluster: Cluster) -> Plan:
    """Returns the plan with its memory, its prediction on the cluster, and its strategy."""
    program, settings = made.program, made.settings
    shown = lower_shown_ranks(program, made.plan, settings)
    plan = add_memory(made.plan, shown, settings)
    predicted = predict_on(replace(made, ranks=tuple(shown)), cluster)
    return replace(plan, predicted=predicted, strategy=complete(strategy, settings), searched=True)


def file_of(text: str, cluster: Cluster, found: Found, plan: Plan) -> PlanFile:
    """Creates the plan file of a described model's step, with the strategies that were not chosen.

    Args:
      text: the description.
    """
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
    """Prints the plan of the fastest strategy that fits, and the predictions of the others.

    Args:
      text: the description.
      batch: global batch in rows; None: the description says it.
      out: file to write the plan to, as JSON.
      budget_s: see `find_strategy`.
      found: called when the plan is complete, before it is printed.

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
