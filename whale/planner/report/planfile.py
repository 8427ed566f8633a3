"""Writes and reads plan files: JSON with sorted keys, deterministic; `plan.schema.json` is the schema.

Every file contains the strategy, its prediction, and who chose it (`PlanRecord`). The plan of a described model also
contains its cluster and the request, so that it can be evaluated, checked and bound to other devices anywhere; its
devices are virtual, as a stage only names pools of the cluster. The plan of a captured program also contains the layout
of each of its tensors, and the name of the script or the description of the model. `format_version` is major.minor: a
file of another major version is refused, unknown fields of a newer minor version are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cost_model.analytic.evaluate import Evaluation, evaluate, prediction_of
from cost_model.analytic.layer_costs import Model
from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer import Transformer
from cost_model.analytic.transformer_model import TransformerModel, stack_of
from cost_model.cluster import yaml_files
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from whale.errors import PlanError
from whale.ir.plan import FORMAT_VERSION, KIND, Plan, PlanRecord, file_text, record_from_text
from whale.ir.plan_text import format_bytes, format_seconds
from whale.ir.prediction import Prediction
from whale.ir.strategy import ParallelStrategy
from whale.planner.analytic_search.candidates import SearchResult
from whale.planner.analytic_search.layer_profiles import LayerProfile, TableModel
from whale.planner.analytic_search.plan_check import check
from whale.planner.evaluate import Evaluator, ModelEvaluator

SCHEMA = Path(__file__).with_name("plan.schema.json")
SLOWER, LACKING = 6, 3  # most alternatives in a plan file: slower ones, and ones that do not fit
SIMPLER = 2  # how many of them are simpler than the plan, in addition to the simplest one


class Alternative(msgspec.Struct, frozen=True):
    """Holds another strategy, and why it was not chosen.

    Attributes:
        slower_s: seconds by which its step is longer than the plan's; None: not predicted, or the strategy does not
            fit.
        lacking_bytes: bytes of memory that the fullest rank lacks; None: the strategy fits.
        refused: why the strategy is invalid; empty: it is valid.
    """

    strategy: ParallelStrategy
    slower_s: float | None = None
    lacking_bytes: float | None = None
    refused: str = ""

    @property
    def reason(self) -> str:
        """Describes in a few words why the strategy was not chosen."""
        if self.refused:
            return self.refused
        if self.lacking_bytes is not None:
            return f"does not fit by {format_bytes(self.lacking_bytes)}"
        slower_s = self.slower_s or 0.0
        if slower_s < 0:
            return f"faster by {format_seconds(-slower_s)}, but not as simple"
        return f"slower by {format_seconds(slower_s)}"


class PlanFile(PlanRecord, frozen=True, kw_only=True):
    """Holds the content of a plan file: request, strategy, prediction and alternatives.

    Attributes:
        cluster: the cluster that was planned for; None: the plan is of a script, without a cluster.
        software: name or path of the training stack that formulas assume.
        description: text that describes a model whose step is captured as a program; empty: there is none.
        transformer: a model that formulas evaluate; None: another kind of model.
        table: a model of measured layers; None: another kind of model.
        bound_s: a lower bound of the step time of any strategy; 0: unknown.
        cut: what ended the search early, such as "the budget"; empty: it ran to its end.
        alternatives: strategies that were not chosen, with reasons.
    """

    cluster: Cluster | None = None
    software: str = ""
    description: str = ""
    transformer: Transformer | None = None
    table: LayerProfile | None = None
    bound_s: float = 0.0
    cut: str = ""
    alternatives: tuple[Alternative, ...] = ()

    @property
    def step_s(self) -> float:
        """Returns the predicted seconds of a step.

        Raises:
            PlanError: the plan has no prediction.
        """
        if self.predicted is None:
            raise PlanError(
                "the plan has no predicted step time",
                expected="a plan file with the field `predicted`",
                action="plan the script for a machine: `whale plan --measured FILE` or `--cluster FILE`",
            )
        return self.predicted.step_s

    @property
    def machines(self) -> Machines:
        """Returns the devices of the plan's cluster.

        Raises:
            PlanError: the plan has no cluster.
        """
        if self.cluster is None:
            raise PlanError(
                "the plan contains no cluster",
                expected="a plan that was made with --cluster",
                action="plan again: `whale plan --cluster FILE ...`",
            )
        return Machines(self.cluster)

    def model(self, machines: Machines) -> Model:
        """Returns the described or measured model on the given machines; raises PlanError if the plan has neither."""
        if self.transformer is not None:
            return TransformerModel(self.transformer, stack(self.software), machines)
        if self.table is None:
            raise PlanError(
                "the plan contains no described or measured model",
                expected="a plan that was made with --describe or --profile",
                action="plan again: `whale plan --describe gpt:layers=... --cluster FILE`",
            )
        return TableModel(self.table, stack(self.software), machines)

    def evaluator(self) -> Evaluator:
        """Returns an evaluator of strategies for the described or measured model; raises PlanError if the plan has
        neither.
        """
        machines = self.machines
        return ModelEvaluator(self.model(machines), machines)

    def evaluate(self) -> tuple[Model, Machines, Evaluation]:
        """Evaluates the strategy of a described model again; returns the model, the machines and the evaluation.

        Raises:
            PlanError: the strategy is invalid for this model and cluster, so that its simulation might never end.
        """
        machines = self.machines
        model = self.model(machines)
        if wrong := check(model, machines, self.strategy, self.batch):
            raise PlanError(
                "the plan's strategy is not valid for the plan's own model and cluster",
                found="; ".join(wrong[:5]),
                action="plan the model again: the file was edited, or made by another version",
            )
        return model, machines, evaluate(model, machines, self.strategy)

    def prediction(self) -> Prediction | None:
        """Returns the prediction of a step: evaluated now for a described model, as stored in the plan for a program.

        Raises:
            PlanError: the strategy is invalid for the described model on its cluster.
        """
        if self.program is not None:
            return self.predicted
        model, machines, found = self.evaluate()
        return prediction_of(found, self.strategy, machines, model.stack)

    def check_ranks(self, path: str, ranks: int) -> None:
        """Checks that as many ranks run as the plan is for.

        Args:
            path: path of the plan file, for the error.
            ranks: number of ranks that run.

        Raises:
            PlanError: the numbers differ.
        """
        planned = self.strategy.ranks
        if planned == ranks:
            return
        again = f"with -np {ranks}"
        if self.program is None:
            devices = self.machines.devices
            again = f"with --set of stages, data and tensor that use {ranks} of the {devices} devices"
        raise PlanError(
            "the saved plan is for another number of ranks",
            given=f"{path}: {planned} ranks, of which {ranks} run",
            expected=f"{planned} ranks",
            action=f"start {planned} ranks, or make the plan again {again}",
        )

    def problems(self) -> list[str]:
        """Returns the errors of a described model's plan, found independently of the search; an empty list: it is valid
        and fits.
        """
        machines = self.machines
        model = self.model(machines)
        wrong = check(model, machines, self.strategy, self.batch)
        if wrong:
            return wrong
        for index, stage in enumerate(evaluate(model, machines, self.strategy).stages):
            if stage.lacking_bytes > 0:
                lacking = format_bytes(stage.lacking_bytes)
                wrong.append(f"stage {index} does not fit: a device lacks {lacking} of memory")
        return wrong


def from_search(
    found: SearchResult,
    cluster: Cluster,
    software: str,
    batch: int,
    transformer: Transformer | None,
    table: LayerProfile | None,
    planner: str = "whale",
) -> PlanFile:
    """Creates the plan file of a search's result.

    Alternatives are some simpler strategies, the best of each other shape (stages, degrees, rows, recompute, ZeRO,
    offload), and strategies that nearly fit.
    """
    best = found.evaluation.step_s
    used = stack(software) if transformer is None else stack_of(stack(software), transformer)
    others: list[Alternative] = []
    seen = {_shape(found.strategy)}
    for strategy, evaluation in found.simpler[-1:] + found.simpler[:SIMPLER]:
        if all(one.strategy != strategy for one in others):
            seen.add(_shape(strategy))
            others.append(Alternative(strategy, slower_s=evaluation.step_s - best))
    others.sort(key=lambda one: one.slower_s or 0.0)
    for strategy, evaluation in found.others:
        if _shape(strategy) not in seen and len(others) < SLOWER:
            seen.add(_shape(strategy))
            others.append(Alternative(strategy, slower_s=evaluation.step_s - best))
    for strategy, evaluation in sorted(found.misfits, key=lambda e: e[1].step_s):
        if _shape(strategy) not in seen and len(others) < SLOWER + LACKING:
            seen.add(_shape(strategy))
            others.append(Alternative(strategy, lacking_bytes=evaluation.lacking_bytes))
    return PlanFile(
        kind=KIND,
        format_version=FORMAT_VERSION,
        cluster=cluster,
        software=software,
        batch=batch,
        strategy=found.strategy,
        predicted=prediction_of(found.evaluation, found.strategy, Machines(cluster), used),
        bound_s=found.bound_s,
        cut=found.cut,
        transformer=transformer,
        table=table,
        alternatives=tuple(others),
        planner=planner,
    )


def from_program(
    plan: Plan, cluster: Cluster | None = None, description: str = "", alternatives: Sequence[Alternative] = ()
) -> PlanFile:
    """Creates the plan file of a captured program.

    Args:
        cluster: the cluster that the plan, or its prediction, is for; None: this machine.
        description: text that describes the model, if there is no script.
        alternatives: other strategies that `auto_parallel` evaluated.
    """
    record = msgspec.structs.asdict(plan.record())
    return PlanFile(**record, cluster=cluster, description=description, alternatives=tuple(alternatives))


def _shape(strategy: ParallelStrategy) -> tuple[int, int, int, int, tuple[str, ...], int, str]:
    part = strategy.stages[0].parts[0]
    return (
        len(strategy.stages), part.tensor, strategy.stages[0].replicas, part.rows,
        tuple(sorted(set(strategy.recomputes))), strategy.zero, strategy.offload,
    )  # fmt: skip


def schema() -> dict[str, Any]:
    """Returns the JSON schema of a plan file."""
    return yaml_files.make_schema(PlanFile)


def dumps(plan: PlanFile) -> bytes:
    """Serialises a plan to JSON; equal plans give equal bytes."""
    return file_text(plan)


def save(plan: PlanFile, path: str | Path) -> None:
    """Writes a plan file."""
    Path(path).write_bytes(dumps(plan))


def loads(data: bytes, origin: str = "<text>") -> PlanFile:
    """Parses the content of a plan file.

    Args:
        origin: name of the source, for errors.

    Raises:
        PlanError: the data are no plan, have another major version, or contain invalid layouts.
    """
    try:
        found = record_from_text(data, PlanFile)
        if wrong := found.strategy.find_problem():
            raise ValueError(f"not a plan file: {wrong}")
        _ = found.plan
    except ValueError as error:
        raise PlanError(
            "the plan cannot be read",
            given=origin,
            reason=str(error),
            expected="a file that `whale plan -o` wrote",
            action="make the plan again",
        ) from error
    return found


def load(path: str | Path) -> PlanFile:
    """Reads a plan file; raises PlanError if it is missing, is no plan file, or has another major version."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(
            "the plan cannot be read",
            given=str(path),
            reason=error.strerror or "",
            expected="a file that `whale plan -o` wrote",
            action="correct the path",
        ) from error
    return loads(data, str(path))
