"""What ways to spread a captured program are judged by: who computes how fast, and what fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cost_model.captured.machine import (
    Machine,
    Rates,
    cluster_machine,
    cluster_rates,
    measured_machine,
    rated_machine,
)
from cost_model.captured.predict import rank_seconds
from cost_model.captured.table import Table
from cost_model.machines.cluster import Cluster
from whale.ir.fingerprint import fingerprint
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.passes.lay_out import FirstLayouts
from whale.passes.settings import PlanSettings

UNEQUAL = 1.25  # ranks whose speeds differ by less are taken to be equal
# An exchange reads what it sends, adds it up and writes it: so many passes over memory, where nobody is waited for.
PASSES_OF_AN_EXCHANGE = 3

# The plan of a normalised program, which may be one of several (see ``whale.passes.lay_out.lay_out``).
MakePlan = Callable[[Program, PlanSettings, FirstLayouts | None], Plan]
# What some ranks would run under it: (program, plan, settings, ranks) -> their programs.
Lower = Callable[[Program, Plan, PlanSettings, Sequence[int]], list[Program]]
# Ranks' programs as they run, with their updates fused where the settings say so.
AsRun = Callable[[list[Program], PlanSettings], list[Program]]
# Which settings would make the step fit into so many bytes of a rank, in words.
Options = Callable[[float], str]
# The program as it was captured, normalised under other settings.
Again = Callable[[PlanSettings], Program]


@dataclass(frozen=True)
class Ground:
    """What ways are judged by.

    Attributes:
      rates: of each rank.
      on: what then prices operations and exchanges instead of the rates: a file that `whale profile` wrote, or the
        cluster of which these are the first devices; None: nothing.
      plan: plans a program; lower, as_run: make what ranks would run.
      limits_bytes: memory that each rank has for a step.
      options: what would make a step fit.
      again: None: the program cannot be captured with its gradients marked, which recomputation needs.
    """

    rates: Sequence[Rates]
    on: Table | Cluster | None
    plan: MakePlan
    lower: Lower
    as_run: AsRun
    limits_bytes: Sequence[float]
    options: Options
    again: Again | None

    @classmethod
    def described(
        cls,
        cluster: Cluster,
        program: Program,
        size: int,
        plan: MakePlan,
        lower: Lower,
        as_run: AsRun,
        options: Options,
        again: Again | None,
    ) -> Ground:
        """The first devices of a cluster, as the catalogue has them.

        Raises:
          ClusterError: it has fewer.
        """
        machine = cluster_machine(cluster)
        machine.check_holds(size)
        weights = [v.type for v in program.variables if len(v.type.shape or ()) >= 2]
        dtype = max(weights, key=lambda t: t.bytes).dtype if weights else "float32"
        rates, memory_bytes = cluster_rates(cluster, dtype)[:size], machine.memory_bytes[:size]
        return cls(rates, cluster, plan, lower, as_run, memory_bytes, options, again)

    @property
    def origin(self) -> str:
        """Where the figures come from, in words."""
        return f"{self.on.host} as `whale profile` measured it" if isinstance(self.on, Table) else self.rates[0].origin

    def machine(self, program: Program) -> Machine:
        """What prices the operations of ranks that run ``program``."""
        if isinstance(self.on, Table):
            return measured_machine(self.on, len(self.rates), [fingerprint(program)])
        return rated_machine(self.rates) if self.on is None else cluster_machine(self.on)

    def lacking_bytes(self, held: Mapping[int, int]) -> float:
        """By how much ranks that take so much do not fit, the one that lacks most; below 0: they do."""
        return max(size - self.limits_bytes[rank] for rank, size in held.items())

    def seconds_of_each(self, program: Program, stands_for: int) -> list[float]:
        """Seconds that each rank would take for what rank ``stands_for`` runs, if nobody waited for another."""
        size, kinds = len(self.rates), list(dict.fromkeys(self.rates))
        seconds = rank_seconds(program, stands_for, size, [_without_waiting([one] * size) for one in kinds])
        of_kind = dict(zip(kinds, seconds))
        return [of_kind[one] for one in self.rates]


def unequal(rates: Sequence[Rates], by: float = UNEQUAL) -> bool:
    """Whether ranks differ by more than what is taken to be noise."""
    speeds = [min(one.flops_per_s / rates[0].flops_per_s, one.bytes_per_s / rates[0].bytes_per_s) for one in rates]
    return max(speeds) > by * min(speeds)


def _without_waiting(rates: Sequence[Rates]) -> Machine:
    """Of exchanges, what is work of the rank's own core: all that it sends is read, added and written."""
    return rated_machine([
        replace(
            one,
            exchange_s=0.0,
            exchanged_bytes_per_s=max(one.exchanged_bytes_per_s, one.bytes_per_s / PASSES_OF_AN_EXCHANGE),
            devices=None,
        )
        for one in rates
    ])  # fmt: skip
