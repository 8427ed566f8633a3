"""Writes and reads plan files: JSON, sorted, deterministic; `plan.schema.json` is the schema.

Every file contains the strategy, its prediction and who chose it (`PlanRecord`). The plan of a described model contains
its cluster and the request, so that it can be evaluated, re-bound and checked anywhere; its devices are virtual: a
stage names pools of the cluster. The plan of a program contains the layout of each of its tensors, and the script, or
description, of the program. `format_version` is major.minor: another major is refused, unknown fields of a newer minor
are ignored.
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
SLOWER, LACKING = 6, 3  # alternatives of a plan file at most: slower ones, then ones that do not fit
SIMPLER = 2  # of them that are simpler than the plan, beside the simplest


class Alternative(msgspec.Struct, frozen=True):
    """Another strategy, and why it lost: the seconds by which it is slower, the bytes that it lacks, or why it is
    invalid.
    """

    strategy: ParallelStrategy
    slower_s: float | None = None
    lacking_bytes: float | None = None
    refused: str = ""

    @property
    def reason(self) -> str:
        """Describes why the strategy lost."""
        if self.refused:
            return self.refused
        if self.lacking_bytes is not None:
            return f"does not fit by {format_bytes(self.lacking_bytes)}"
        slower_s = self.slower_s or 0.0
        if slower_s < 0:
            return f"faster by {format_seconds(-slower_s)}, but not as simple"
        return f"slower by {format_seconds(slower_s)}"


class PlanFile(PlanRecord, frozen=True, kw_only=True):
    """A plan with its request, strategy, prediction and alternatives.

    Attributes:
        cluster: None: the plan is of a script, without a cluster.
        description: of a model whose step is captured; transformer, table: of one that formulas evaluate.
        bound_s: a lower bound of the step time of any strategy; 0: not known.
        cut: what ended the search before it had looked at all it would; empty: nothing.
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
            raise PlanError("the plan's step was not predicted", expected="predicted")
        return self.predicted.step_s

    @property
    def machines(self) -> Machines:
        """Returns the devices of the plan's cluster.

        Raises:
            PlanError: it names no cluster.
        """
        if self.cluster is None:
            raise PlanError("the plan names no cluster", expected="cluster")
        return Machines(self.cluster)

    def model(self, machines: Machines) -> Model:
        """Returns the described transformer or the measured tables; PlanError if the plan names neither."""
        if self.transformer is not None:
            return TransformerModel(self.transformer, stack(self.software), machines)
        if self.table is None:
            raise PlanError("the plan names no model", expected="transformer or table")
        return TableModel(self.table, stack(self.software), machines)

    def evaluator(self) -> Evaluator:
        """Returns the evaluator of the described model's strategies; raises PlanError if the plan names no model."""
        machines = self.machines
        return ModelEvaluator(self.model(machines), machines)

    def evaluate(self) -> tuple[Model, Machines, Evaluation]:
        """Simulates a described model's strategy again; returns its model, machines and evaluation.

        Raises:
            PlanError: the strategy is invalid for this model on this cluster; its simulation might never end.
        """
        machines = self.machines
        model = self.model(machines)
        if wrong := check(model, machines, self.strategy, self.batch):
            raise PlanError("the plan is not one of its model and cluster", found="; ".join(wrong[:5]))
        return model, machines, evaluate(model, machines, self.strategy)

    def prediction(self) -> Prediction | None:
        """Returns the prediction of a step: of a described model evaluated now, of a program as it was planned.

        Raises:
            PlanError: the strategy is invalid for the described model on its cluster.
        """
        if self.program is not None:
            return self.predicted
        model, machines, found = self.evaluate()
        return prediction_of(found, self.strategy, machines, model.stack)

    def check_ranks(self, path: str, ranks: int) -> None:
        """Compares the ranks that the plan is for with those that run.

        Raises:
            PlanError: they are others.
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
        """Lists the errors of a described model's plan, found independently of the search; empty: none."""
        machines = self.machines
        model = self.model(machines)
        wrong = check(model, machines, self.strategy, self.batch)
        if wrong:
            return wrong
        for index, stage in enumerate(evaluate(model, machines, self.strategy).stages):
            if stage.lacking_bytes > 0:
                wrong.append(f"stage {index} does not fit: it lacks {format_bytes(stage.lacking_bytes)}")
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
    """Creates the plan file of a search's result, with simpler alternatives, the best of each shape, and those that
    nearly fit.
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
    """Creates the plan file of a program.

    Args:
        cluster: the cluster of the plan, or of its prediction.
        description: of the model that the step trains, if there is no script.
        alternatives: other strategies that `auto_parallel` tried.
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
    return msgspec.json.schema(PlanFile)


def dumps(plan: PlanFile) -> bytes:
    """Serialises a plan: the same bytes for the same plan."""
    return file_text(plan)


def save(plan: PlanFile, path: str | Path) -> None:
    """Writes a plan file."""
    Path(path).write_bytes(dumps(plan))


def loads(data: bytes, origin: str = "<text>") -> PlanFile:
    """Parses a plan file's text.

    Raises:
        PlanError: it is not a plan, has another major version, or its layouts of a program are invalid.
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
    """Reads a plan file; raises PlanError if it is missing, is not a plan file, or has another major version."""
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
