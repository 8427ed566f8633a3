"""Predicts step time and memory of a program under a plan by simulating the ranks' programs with the cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.cluster.cluster_file import Cluster
from cost_model.graph.machine import Machine, cluster_machine, make_measured_machine
from cost_model.graph.machine_profile import MachineProfile
from cost_model.graph.predict import CapturedPrediction, predict_ranks
from cost_model.kernels.interval import OWN_RUNS, compute_interval_s
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.plan import Plan
from whale.ir.prediction import Prediction, RankPrediction
from whale.ir.program import Program
from whale.kernels.substitute import substitute_kernels
from whale.partition.lower import lower_ranks
from whale.passes.normalize.inline import inline
from whale.passes.resharding.on_devices import mark_device_exchanges
from whale.passes.settings import PlanSettings


@dataclass(frozen=True)
class Planned:
    """Holds a normalised program, its plan, and the settings it was planned with.

    Attributes:
      ranks: the programs of the first ranks, if they were lowered already; (): they are lowered when needed.
    """

    program: Program
    plan: Plan
    settings: PlanSettings
    ranks: tuple[Program, ...] = ()


def rank_programs(planned: Planned) -> list[Program]:
    """Returns the program of every rank, with calls of micro-batch functions inlined.

    Raises:
      PlanError: the plan lacks a strategy or a reshard.
    """
    program, plan, settings = planned.program, planned.plan, planned.settings
    known = planned.ranks
    if len(known) != plan.ranks:
        known = tuple(substitute_kernels(lower_ranks(program, plan, settings, range(plan.ranks)), settings))
    # Micro-batches are calls of a function; the simulator needs their nodes inline.
    return [inline(r) for r in known]


def predict_plan(
    planned: Planned,
    on: MachineProfile | Cluster,
    counted_from_bytes: int = 0,
    with_timelines: bool = False,
    programs: Sequence[Program] = (),
) -> CapturedPrediction:
    """Predicts a step on a machine that `whale profile` has measured, or on a cluster by the catalogue's formulas.

    Args:
      counted_from_bytes: tensors smaller than this do not count as memory, as TensorFlow's counters of host memory omit
          them.
      with_timelines: also return each rank's timeline, and its memory over time.
      programs: the ranks' programs, if lowered already.

    Raises:
      PlanError: data decide how often a loop or branch of the program runs.
      ClusterError: too few devices, or the profile lacks operations of the program.
    """
    programs = programs or rank_programs(planned)
    carried = as_carried(programs, planned.settings)
    # A measured step of a rank's own program comes first: one of the whole batch uses the caches differently.
    marks = [compute_fingerprint(programs[0]), compute_fingerprint(planned.program)]
    return predict_ranks(carried, machine(on, len(programs), marks, counted_from_bytes), with_timelines)


def as_carried(programs: Sequence[Program], settings: PlanSettings) -> list[Program]:
    """Marks exchanges that devices carry out themselves (NCCL) in the ranks' programs: they are priced differently."""
    return [mark_device_exchanges(program, settings.exchange.backend) for program in programs]


def predict_on(planned: Planned, on: MachineProfile | Cluster) -> Prediction:
    """Predicts a step on a measured machine or a cluster, in the form that a plan stores; raises as `predict_plan`
    does.
    """
    measured = isinstance(on, MachineProfile)
    if isinstance(on, MachineProfile):
        where = f"{on.host} as `whale profile` measured it"
    else:
        where = f"{on.name}, by the catalogue's figures"
    limits = machine(on, planned.plan.ranks).memory_bytes
    return keep_prediction(predict_plan(planned, on), where, measured, limits)


def machine(
    on: MachineProfile | Cluster, ranks: int, marks: Sequence[str] = (), counted_from_bytes: int = 0
) -> Machine:
    """Returns the machine model of the ranks.

    Args:
      on: a profile of `whale profile`, or a cluster.
      marks: fingerprints of programs whose measured steps the profile may contain.
      counted_from_bytes: tensors smaller than this do not count as memory.
    """
    return (
        make_measured_machine(on, ranks, marks, counted_from_bytes)
        if isinstance(on, MachineProfile)
        else cluster_machine(on)
    )


def keep_prediction(
    found: CapturedPrediction, where: str, measured: bool = False, limits_bytes: Sequence[float] = ()
) -> Prediction:
    """Converts a prediction of the cost model into the form that a plan stores.

    Args:
      where: describes the machine.
      measured: the machine was measured by `whale profile`, so that the error of predictions is known.
      limits_bytes: memory of each rank's device; (): unknown.
    """
    limits = [round(limit) if math.isfinite(limit) else 0 for limit in limits_bytes] or [0] * len(found.ranks)
    ranks = tuple(
        RankPrediction(r.end_s, r.compute_s, r.exchange_s, round(r.peak_bytes), round(r.resident_bytes), limit)
        for r, limit in zip(found.ranks, limits)
    )
    slowest = max(ranks, key=lambda rank: rank.end_s)
    compute_s = min(found.step_s, slowest.compute_s)
    communication_s = min(found.step_s - compute_s, slowest.exchange_s)
    return Prediction(
        where,
        found.step_s,
        ranks,
        compute_interval_s(found.step_s, OWN_RUNS) if measured else None,
        compute_s=compute_s,
        communication_s=communication_s,
        bubble_s=found.step_s - compute_s - communication_s,
        lacking_bytes=max((r.peak_bytes - r.limit_bytes for r in ranks if r.limit_bytes), default=0.0),
    )
