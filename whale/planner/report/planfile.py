"""Writes and reads a plan of the planner as a file: JSON, sorted, deterministic; `plan.schema.json` is its schema.

`format_version` is major.minor: another major is refused, unknown fields of a newer minor are ignored. Virtual devices
only: a stage names pools of the cluster, which the file carries, so the plan can be re-bound and checked elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cost_model.analytic.evaluate import Evaluation, evaluate
from cost_model.analytic.layer_costs import Model
from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer import Transformer
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from whale.errors import PlanError
from whale.ir.plan_text import human_bytes, human_seconds
from whale.ir.strategy import ParallelStrategy
from whale.planner.analytic_search.candidates import SearchResult
from whale.planner.analytic_search.layer_profiles import LayerProfile, TableModel
from whale.planner.analytic_search.plan_check import check

FORMAT_VERSION = "1.2"
SCHEMA = Path(__file__).with_name("plan.schema.json")
KIND = "whale-strategy"
SLOWER, LACKING = 6, 3  # alternatives of a plan file at most: slower ones, then ones that do not fit


class Alternative(msgspec.Struct, frozen=True):
    """Another strategy, and by how much it lost: seconds it is slower by, or bytes that it lacks."""

    strategy: ParallelStrategy
    slower_s: float | None = None
    lacking_bytes: float | None = None

    @property
    def reason(self) -> str:
        """Says in words why it lost."""
        if self.lacking_bytes is not None:
            return f"does not fit by {human_bytes(self.lacking_bytes)}"
        return f"slower by {human_seconds(self.slower_s or 0.0)}"


class Predicted(msgspec.Struct, frozen=True):
    """The simulator's prediction of a step; the parts add up to `step_s`."""

    step_s: float
    compute_s: float
    send_s: float
    bubble_s: float
    reduce_s: float
    update_s: float


class PlanFile(msgspec.Struct, frozen=True):
    """A plan with what was asked, what was decided, what is predicted, what lost."""

    kind: str
    format_version: str
    cluster: Cluster
    software: str
    batch: int
    strategy: ParallelStrategy
    predicted: Predicted
    bound_s: float
    transformer: Transformer | None = None
    table: LayerProfile | None = None
    alternatives: tuple[Alternative, ...] = ()
    planner: str = "whale"

    def model(self, machines: Machines) -> Model:
        """Returns the described transformer or the measured tables; PlanError if the plan names neither."""
        software = stack(self.software)
        if self.transformer is not None:
            return TransformerModel(self.transformer, software, machines)
        if self.table is None:
            raise PlanError("the plan names no model", expected="transformer or table")
        return TableModel(self.table, software, machines)

    def evaluate(self) -> tuple[Model, Machines, Evaluation]:
        """Simulates the plan's strategy again; returns its model, machines and evaluation.

        Raises:
            PlanError: the strategy is none of this model on this cluster, whose simulation might never end.
        """
        machines = Machines(self.cluster)
        model = self.model(machines)
        if wrong := check(model, machines, self.strategy, self.batch):
            raise PlanError("the plan is not one of its model and cluster", found="; ".join(wrong[:5]))
        return model, machines, evaluate(model, machines, self.strategy)

    def problems(self) -> list[str]:
        """Lists what is wrong with the plan, found independently of the search; empty: nothing."""
        machines = Machines(self.cluster)
        model = self.model(machines)
        wrong = check(model, machines, self.strategy, self.batch)
        if wrong:
            return wrong
        for index, stage in enumerate(evaluate(model, machines, self.strategy).stages):
            if stage.lacking_bytes > 0:
                wrong.append(f"stage {index} does not fit: it lacks {human_bytes(stage.lacking_bytes)}")
        return wrong


def predicted(found: Evaluation) -> Predicted:
    """Returns what a plan file says of an evaluation."""
    return Predicted(found.step_s, found.compute_s, found.send_s, found.bubble_s, found.reduce_s, found.update_s)


def of_search(
    found: SearchResult,
    cluster: Cluster,
    software: str,
    batch: int,
    transformer: Transformer | None,
    table: LayerProfile | None,
    planner: str = "whale",
) -> PlanFile:
    """Makes the file of a search's result, with the best alternative of each shape and what nearly fitted."""
    best = found.evaluation.step_s
    others: list[Alternative] = []
    seen = {_shape(found.strategy)}
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
        predicted=predicted(found.evaluation),
        bound_s=found.bound_s,
        transformer=transformer,
        table=table,
        alternatives=tuple(others),
        planner=planner,
    )


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
    """Returns the file's text: the same bytes for the same plan."""
    return msgspec.json.format(msgspec.json.encode(plan, order="sorted"), indent=1) + b"\n"


def save(plan: PlanFile, path: str | Path) -> None:
    """Writes a plan file."""
    Path(path).write_bytes(dumps(plan))


def loads(data: bytes, origin: str = "<text>") -> PlanFile:
    """Reads a plan file's text; PlanError if it is none, or of another major version."""

    class Head(msgspec.Struct):
        kind: str = ""
        format_version: str = ""

    try:
        head = msgspec.json.decode(data, type=Head)
        if head.kind == KIND and head.format_version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
            raise PlanError(
                "a plan of another format",
                given=f"format_version {head.format_version} in {origin}",
                expected=f"{FORMAT_VERSION.split('.')[0]}.x",
                action="make the plan again with this version's `whale plan`",
            )
        if head.kind != KIND:
            raise PlanError("not a plan of the planner", given=origin, expected="what `whale plan --describe` wrote")
        return msgspec.json.decode(data, type=PlanFile)
    except (ValueError, OverflowError, RecursionError) as error:
        raise PlanError("the plan cannot be read", given=origin, reason=str(error)) from error


def is_spread(data: bytes) -> bool:
    """Tells whether a file's text is such a plan, and not that of a captured program."""

    class Head(msgspec.Struct):
        kind: str = ""

    try:
        return msgspec.json.decode(data, type=Head).kind == KIND
    except (ValueError, RecursionError):
        return False


def load(path: str | Path) -> PlanFile:
    """Reads a plan file; PlanError if there is none, it is none, or of another major version."""
    try:
        return loads(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise PlanError("the plan cannot be read", given=str(path), reason=error.strerror or "") from error
