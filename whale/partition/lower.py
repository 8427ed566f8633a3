"""Plans a program and lowers it to what each rank runs: one way for runs, dry runs and predictions.

make_any_plan      plans a normalised program: over one group of ranks, groups of them, or stages lower_ranks
gives what ranks run under a plan: local shapes, exchanges, micro-batches, offloaded variables planned_ranks      does
both, for a program that is only asked about; first_ranks: for a program as it was captured shown_ranks        gives the
ranks' programs that reports speak of; with_memory: the plan with their bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from whale.ir.collector import no_garbage_collection
from whale.ir.mesh import chain, mesh_of
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.kernels.substitute import substitute_kernels
from whale.kernels.updates.fuse import written_together
from whale.partition.horovod_sums import give_to_horovod
from whale.partition.mesh import lower_mesh, plan_program
from whale.partition.pipeline.microbatches import InTime, in_micro_batches, own_rows
from whale.partition.pipeline.stage_groups import lower_stage_groups, plan_stage_groups
from whale.partition.ring_attention import in_blocks, without_examples
from whale.partition.spmd import partition_for_rank
from whale.passes.analysis.rank_groups import refuse_rank_groups
from whale.passes.analysis.stages import stage_groups_of
from whale.passes.memory.footprint import CATEGORIES
from whale.passes.memory.offload import offload, offloaded
from whale.passes.memory.step_bytes import step_bytes
from whale.passes.normalize.ring import in_blocks_if_large
from whale.passes.pass_manager import normalise
from whale.passes.plan_builder import FirstLayouts, expand
from whale.passes.resharding.fuse_sums import fuse_sums
from whale.passes.settings import PlanSettings

_MOST_RANKS_SHOWN = 8


def make_any_plan(program: Program, settings: PlanSettings, first: FirstLayouts | None = None) -> Plan:
    """Plans a normalised program, in stages where it has some.

    Args:
      first: of other plans of the program without stages, which may have other split scopes.

    Raises:
      PlanError: see ``plan_program`` and ``plan_stage_groups``.
    """
    stage_groups = stage_groups_of(program, settings.size, settings.mesh)
    refuse_rank_groups(program, settings.size)
    on_host = offloaded(program, settings.memory.offload)
    if stage_groups:
        plan = plan_stage_groups(program, settings, stage_groups)
    else:
        plan = plan_program(program, settings, first)
    return replace(plan, offloaded=on_host)


def lower_ranks(
    program: Program,
    plan: Plan,
    settings: PlanSettings,
    ranks: Sequence[int],
    comm: str = "",
    what: str = "",
    expanded: Program | None = None,
) -> list[Program]:
    """Makes the programs that ``ranks`` run under a plan: local shapes, exchanges, micro-batches where there are any.

    Args:
      program: normalised.
      comm: name of the communicator that they talk through.
      what: the program, for errors of its exchanges; "": its name.
      expanded: the program as the plan speaks of it, where it was made already.

    Raises:
      PlanError: the plan lacks a strategy or a reshard, or a value of all micro-batches is needed before the last one.
    """
    expanded = expanded if expanded is not None else expand(program, plan.expanded, settings)
    what = what or plan.program
    settings = settings.but(time__micro_batches=plan.micro_batches)  # which may be some more than were asked for
    with no_garbage_collection():
        if plan.stage_groups:
            lowered = lower_stage_groups(expanded, plan, ranks, comm, what, settings)
        elif plan.inner is not None:
            lowered = lower_mesh(program, plan, settings, ranks, comm, what)
        else:
            lowered = [partition_for_rank(expanded, plan, rank, comm, what) for rank in ranks]
        scores_bytes = settings.memory.scores_bytes * plan.micro_batches  # of the rows of all of them
        lowered = [in_blocks(in_blocks_if_large(p, scores_bytes)) for p in lowered]
        if plan.micro_batches > 1 and not plan.stage_groups:
            own, known = own_rows(expanded, plan), list[InTime]()
            lowered = [in_micro_batches(p, plan, rank, settings, own, known) for p, rank in zip(lowered, ranks)]
        if any(level.inner is not None for level in (plan, *plan.others)):
            keys = [r.key for one in (plan, *plan.others) for level in chain(one) for r in level.reshards]
            order = {key: i for i, key in enumerate(dict.fromkeys(keys))}
            along = [_along_axes(plan, rank) for rank in ranks]
            lowered = [fuse_sums(p, settings.exchange.group_bytes, order, axes) for p, axes in zip(lowered, along)]
        if settings.exchange.backend == "horovod" and (plan.stage_groups or plan.inner is not None):
            lowered = [give_to_horovod(p, rank, settings.size, comm) for p, rank in zip(lowered, ranks)]
        lowered = [without_examples(p) for p in lowered]
        return [offload(p, plan.offloaded) for p in lowered] if plan.offloaded else lowered


def _along_axes(plan: Plan, rank: int) -> list[tuple[int, ...]]:
    """Lists the groups of ranks with which one communicates along axes of its mesh; those along most axes first."""
    group = next((group for group in plan.stage_groups if rank in group.ranks), None)
    mesh = mesh_of(plan.of(group), group.ranks) if group is not None else mesh_of(plan, range(plan.mesh_size))
    names = [axis.name for axis in mesh.axes]
    return [mesh.along(rank, *some) for count in range(len(names), 0, -1) for some in combinations(names, count)]


def planned_ranks(program: Program, settings: PlanSettings, ranks: Sequence[int]) -> list[Program]:
    """Plans a normalised program in this process alone and returns what ``ranks`` would run.

    Raises:
      PlanError: it cannot be spread so.
    """
    return lower_ranks(program, make_any_plan(program, settings), settings, ranks)


def first_ranks(settings: PlanSettings, captured: Program) -> dict[int, Program]:
    """Plans a program as it was captured and returns what its first ranks would run, by rank.

    Raises:
      PlanError: it cannot be spread so.
    """
    ranks = _shown(settings)
    return dict(zip(ranks, substitute_kernels(planned_ranks(normalise(captured, settings), settings, ranks), settings)))


def shown_ranks(program: Program, plan: Plan, settings: PlanSettings) -> list[Program]:
    """Lowers the ranks that reports speak of: all of them, or the first ones where there are many."""
    with no_garbage_collection():
        return substitute_kernels(lower_ranks(program, plan, settings, _shown(settings)), settings)


def with_memory(plan: Plan, ranks: Sequence[Program], settings: PlanSettings) -> Plan:
    """Adds to ``plan`` the bytes that its ranks will hold, and how many of the first one's writes are done together.

    Args:
      ranks: what they run (``shown_ranks``).
    """
    each = [step_bytes(one, rank, settings.size) for rank, one in enumerate(ranks)]
    memory = {name: tuple(f[name] for f in each) for name in CATEGORIES}
    return replace(plan, memory=memory, updates=written_together(ranks[0]))


def _shown(settings: PlanSettings) -> range:
    return range(min(settings.size, _MOST_RANKS_SHOWN))
