"""`whale plan --describe dlrm:...` and `classifier:...`: models of one large layer, planned each way and compared.

Their step is captured, planned and predicted as a script's is, so what is predicted is what the ranks would run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from cost_model.captured.predict import CapturedPrediction
from cost_model.machines.allocation import named_cluster
from cost_model.machines.cluster import Cluster
from whale.cgroup import cpu_quota
from whale.errors import PlanError
from whale.ir.plan_text import format_plan, human_bytes
from whale.passes.order import normalise
from whale.passes.settings import PlanSettings
from whale.runtime.described import Description, program_of
from whale.runtime.described.families import Classifier, Dlrm
from whale.runtime.spread.lower import make_any_plan
from whale.runtime.tools.plan_prediction import Planned, kept, machine, predict_plan

FAMILIES: dict[str, type[Dlrm] | type[Classifier]] = {"dlrm": Dlrm, "classifier": Classifier}
SPLIT = {"dlrm": "tables sharded by rows", "classifier": "classes sharded"}


@dataclass(frozen=True)
class Way:
    """One way to spread a described model: its plan, what a step takes, and by how much it does not fit (bytes)."""

    name: str
    planned: Planned
    predicted: CapturedPrediction
    lacking: float

    def text(self) -> str:
        """A line of the table."""
        fits = f"   does not fit by {human_bytes(self.lacking)}" if self.lacking > 0 else ""
        step_ms, held = 1e3 * self.predicted.step_s, human_bytes(self.predicted.peak_bytes)
        return f"  {self.name:<42} {step_ms:>10.2f} {held:>12} {human_bytes(self.planned.plan.logical_bytes):>12}{fits}"


def read(text: str, batch: int | None = None) -> Description:
    """`dlrm:tables=26,rows=1000000,factors=16,batch=4096`: a family of FAMILIES and the fields of its description.

    Raises:
      PlanError: it cannot be read, or names no batch and none is given.
    """
    family, _, rest = text.partition(":")
    fields: dict[str, str | int] = {} if batch is None else {"batch": batch}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name.strip() == "split":
            raise PlanError(
                "how a model is spread is no part of its description", given=part, action="leave it out: it is chosen"
            )
        fields[name.strip()] = value.strip()
    try:
        # Lists of widths are for model files.
        return msgspec.convert({"family": family, **fields}, FAMILIES[family], strict=False)
    except msgspec.ValidationError as error:
        names = ", ".join(f.name for f in msgspec.structs.fields(FAMILIES[family]) if f.name != "split")
        raise PlanError("a description cannot be read", given=text, reason=str(error), expected=names) from error


def ways(described: Description, cluster: Cluster) -> list[Way]:
    """Each way that can be planned for all of the cluster's devices, and one device alone; the fastest that fits first.

    Raises:
      PlanError: none can be planned.
    """
    limits = machine(cluster, 1).memory_bytes
    size = len(limits)
    tried: list[tuple[str, Description, PlanSettings]] = [("one device", described, PlanSettings(size=1))]
    if size > 1:
        everywhere = PlanSettings(size=size)
        divided = msgspec.structs.replace(described, split=True)
        tried += [("data parallel", described, everywhere)]
        tried += [(SPLIT[type(described).__name__.lower()], divided, everywhere)]
        if described.optimizer == "adam":
            tried += [("data parallel, optimizer's state sharded", described, everywhere.but(zero__level=1))]
            tried += [("data parallel, state and weights sharded", described, everywhere.but(zero__level=3))]
    found, refused = [], []
    for name, description, settings in tried:
        try:
            found.append(_way(name, description, settings, cluster, limits))
        except PlanError as error:
            refused.append(f"{name}: {error.message}")
    if not found:
        raise PlanError("no way to spread the model was found", reason="; ".join(refused))
    return sorted(found, key=lambda way: (way.lacking > 0, way.predicted.step_s))


def _way(name: str, description: Description, settings: PlanSettings, cluster: Cluster, limits: Sequence[float]) -> Way:
    program = normalise(program_of(description), settings)
    planned = Planned(program, make_any_plan(program, settings), settings)
    predicted = predict_plan(planned, cluster)
    lacking = max(rank.peak_bytes - limit for rank, limit in zip(predicted.ranks, limits))
    return Way(name, planned, predicted, lacking)


def main(
    text: str, batch: int | None, cluster: str, network: str | None, out: str | None, found: Callable[[], None]
) -> int:
    """Prints what each way takes, and the plan of the fastest that fits.

    Args:
      out: file that receives that plan as JSON.
      found: called when all are known, before anything is printed.

    Raises:
      ClusterError: the cluster cannot be read.
      PlanError: the description cannot be read, or nothing fits.
    """
    machines = named_cluster(cluster, network, cpu_quota())
    every = ways(read(text, batch), machines)
    found()
    best = every[0]
    lines = [f"  {'':<42} {'ms a step':>10} {'at most':>12} {'moved':>12}", *(way.text() for way in every)]
    sys.stdout.write("\n".join([f"{text}, on {machines.name}", *lines, "", ""]))
    if best.lacking > 0:
        raise PlanError(
            "the model fits into the devices' memory in no way",
            given=f"{human_bytes(best.predicted.peak_bytes)} on a device, {best.name}",
            action=f"use more devices, or such with {human_bytes(best.lacking)} more",
        )
    predicted = kept(best.predicted, f"{machines.name}, by the catalogue's figures")
    plan = replace(best.planned.plan, predicted=predicted)
    if out is not None:
        plan.save(out)
    sys.stdout.write(f"{best.name}\n{format_plan(plan)}")
    return 0
