"""Runs a script under a saved plan: the key ``mesh.plan`` (``wh.init(plan=...)``, `whale run --plan`).

``read_saved_plan`` reads the file; ``SavedPlan.find_plan`` returns the plan for the program that it was made for.

Decisions: 0049, 0099.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.discover import find_gpu
from cost_model.cluster.pools import Machines
from whale.distributed.device_exchange import OwnGpu
from whale.errors import ClusterError, PlanError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.layout import Shard
from whale.ir.plan import BatchInput, Plan
from whale.ir.program import Program
from whale.ir.strategy import ChosenStrategy
from whale.log import log
from whale.passes.analysis.axes import project_to_axis
from whale.passes.pass_manager import complete_plan
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.strategies import trains
from whale.planner.report import planfile
from whale.planner.report.planfile import PlanFile


@dataclass
class SavedPlan:
    """Holds a saved plan for one of the run's programs; the other programs are planned as usual.

    Attributes:
      path: of the plan file.
      plan: the plan of one program.
      cluster: the devices that the plan was made for; None: the file names none.
      used: whether a program was already compiled under the plan.
    """

    path: str
    plan: Plan
    cluster: Cluster | None = None
    used: bool = False

    @property
    def chosen_strategy(self) -> ChosenStrategy | None:
        """Returns the strategy that `auto_parallel` found when the plan was made; None: the plan was not searched."""
        searched = self.plan.strategy if self.plan.searched else None
        return ChosenStrategy(searched) if searched is not None else None

    @property
    def needs_whole_batches(self) -> bool:
        """Returns True if ranks that pass their own rows must gather the whole batch, because the plan has several mesh
        axes or stages.
        """
        return self.plan.inner is not None or bool(self.plan.stage_groups)

    def find_plan(self, program: Program, settings: PlanSettings) -> Plan | None:
        """Returns the plan if it was made for this program, adapted to how this run's ranks pass batches; None if it is
        for another program.

        Raises:
          PlanError: the program trains and seems to be the plan's one (same name and inputs), but differs from it; or
            its batch is divided differently.
        """
        if compute_fingerprint(program) != self.plan.fingerprint:
            # All runs of a session have the same program name; only training ones have to match the plan.
            inputs = {b.name for b in self.plan.batch_inputs}
            same = program.name == self.plan.program and inputs <= set(program.inputs)
            # `whale plan` plans the first step that has a batch and trains: if another one trains first, the script is
            # not the one that was planned.
            if (same or (self.plan.script and _has_row_inputs(program))) and trains(program) and not self.used:
                raise PlanError(
                    "the saved plan was made for another program",
                    op=program.name,
                    given=f"{self.path}, of {self.plan.program} in {' '.join(self.plan.script) or 'a script'}",
                    expected="the same script, arguments, configuration and number of ranks as when it was made",
                    action="make the plan again with `whale plan`",
                )
            return None
        self.used = True
        plan = replace(self.plan, batch_inputs=tuple(self._adapt_input(b, settings) for b in self.plan.batch_inputs))
        return self._adapt_to_own_rows(program, plan, settings) if any(b.local for b in plan.batch_inputs) else plan

    def _adapt_to_own_rows(self, program: Program, plan: Plan, settings: PlanSettings) -> Plan:
        """Returns the plan, which was made for whole batches, with layouts for ranks that each pass their own rows.

        Raises:
          PlanError: the plan has several axes or stages; these need the whole batch, which a session cannot gather.
        """
        if self.needs_whole_batches:
            raise PlanError(
                "a saved plan with several mesh axes, or with stages, needs whole batches",
                op=program.name,
                given=f"{self.path}; each rank passes its own rows",
                expected="the whole batch on every rank",
                action="feed whole batches (batch.mode=global), or leave the plan out (mesh.plan, whale run --plan)",
            )
        here = settings.but(batch__inputs=plan.batch_inputs)
        found = complete_plan(project_to_axis(program, plan.axis), here, plan)
        return replace(plan, strategies=found.strategies, returned=found.returned, reshards=found.reshards)

    def _adapt_input(self, batch: BatchInput, settings: PlanSettings) -> BatchInput:
        """Returns the batch input as this run's ranks pass it: whole on every rank, or each rank its own rows.

        Raises:
          PlanError: the ranks' own rows are not those of the plan.
        """
        sizes = settings.batch.local.get(batch.name)
        if sizes is None:
            return replace(batch, local=False)
        if not isinstance(batch.placement, Shard) or batch.placement.sizes != sizes:
            raise PlanError(
                "the ranks divide the batch differently from the saved plan",
                op=batch.name,
                given=f"{list(sizes)} rows on the ranks",
                expected=f"{list(batch.placement.sizes)} rows"
                if isinstance(batch.placement, Shard)
                else "the whole batch on every rank",
                action="make the plan again with `whale plan`, or set batch.shares to the rows of the plan",
            )
        return replace(batch, local=True)


def _has_row_inputs(program: Program) -> bool:
    return any(program.by_name[name].outputs[0].shape for name in program.inputs)


def read_saved_plan(path: str, ranks: int) -> SavedPlan | PlanFile:
    """Reads the plan file for a run of ``ranks`` ranks.

    Returns:
      a SavedPlan if the file has the plan of a program; the PlanFile itself if it is of a described model, which is
        matched with a program later.

    Raises:
      PlanError: the file cannot be read, is not a plan, or is for another number of ranks.
    """
    found = planfile.load(path)
    found.check_ranks(path, ranks)
    return found if found.plan is None else SavedPlan(path, found.plan, found.cluster)


def warn_of_other_devices(cluster: Cluster | None, gpus: Sequence[OwnGpu | None]) -> None:
    """Warns if ranks have other GPUs than the plan was made for, so that its shares of the batch would go to the wrong
    ranks.

    Args:
      cluster: that the plan was made for; its devices are those of the ranks in order. None: nothing is compared.
      gpus: each rank's GPU; GPUs that the device catalogue does not know are not compared.
    """
    pools = () if cluster is None else Machines(cluster).pools
    planned = [pool.entry.device.name for pool in pools for _ in range(pool.devices)]
    found = [None if gpu is None else _find_catalogued(gpu.name) for gpu in gpus]
    pairs = enumerate(zip(planned, found))
    other = [
        f"rank {rank} has {has}, the plan has {wanted}" for rank, (wanted, has) in pairs if has not in (None, wanted)
    ]
    if not other:
        return
    same = sorted(planned[: len(found)]) == sorted(one or "" for one in found)
    action = (
        "they are the same in another order: list them in the cluster file as nvidia-smi does (and keep "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID), then make the plan again with `whale plan`"
        if same
        else "make the plan again with `whale plan` and a cluster file that has these"
    )
    log.warning(f"the saved plan is for other GPUs: {'; '.join(other)}; {action}")


def _find_catalogued(name: str) -> str | None:
    try:
        return find_gpu(name).name
    except ClusterError:
        return None
