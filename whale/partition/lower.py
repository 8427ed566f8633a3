"""Plans a program and lowers it to the ranks' programs; runs, dry runs and predictions all use these functions.

make_any_plan        plans a normalised program, in stages if it has any
PARTITION            the passes that turn a program and its plan into the ranks' programs
decompose            runs only the first of these passes, which decomposes composite ops
lower_ranks          runs all of them, for some ranks
lower_planned_ranks  plans a normalised program and lowers it
lower_first_ranks    normalises a captured program, plans it and lowers it for the first ranks
lower_shown_ranks    lowers the ranks that reports show
add_memory           adds the predicted bytes of the ranks to the plan

Decisions: 0086, 0132.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from zlib import crc32

from whale.ir.collector import suspend_garbage_collection
from whale.ir.emitter import Emitter
from whale.ir.layout import B, Partial
from whale.ir.mesh import iterate_levels, make_mesh
from whale.ir.ops import ALL_REDUCE
from whale.ir.plan import Plan, Reshard
from whale.ir.program import Node, Program, Ref, rewire
from whale.ir.text import format_program
from whale.kernels.substitute import substitute_kernels
from whale.kernels.updates import count_written_together
from whale.kernels.xla import XlaKernels
from whale.partition.axis_partitioner import make_prefix
from whale.partition.mesh import lower_mesh, plan_program
from whale.partition.pipeline.microbatches import MicrobatchProgram, divide_in_micro_batches, find_own_rows
from whale.partition.pipeline.stage_groups import lower_stage_groups, plan_stage_groups
from whale.partition.resharding import find_fused_result, make_reshard_name
from whale.partition.ring_attention import divide_attention_in_blocks, remove_examples
from whale.partition.spmd import partition_for_rank
from whale.passes.analysis.rank_groups import refuse_rank_groups
from whale.passes.analysis.stages import stage_groups_of
from whale.passes.analysis.uses import CATEGORIES, is_taken_by_updates
from whale.passes.memory.offload import find_offloaded, offload
from whale.passes.memory.step_bytes import step_bytes_of_ranks
from whale.passes.normalize.attention_as_one import in_blocks_if_large
from whale.passes.pass_manager import normalise
from whale.passes.plan_builder import FirstLayouts, expand
from whale.passes.resharding.fuse_all_reduces import fuse_sums, is_all_reduce, order_sums
from whale.passes.resharding.horovod import HOROVOD_DTYPES
from whale.passes.run_passes import Pass, PassObserver, Table, When, program_changes, run_passes
from whale.passes.settings import PlanSettings

_MOST_RANKS_SHOWN = 8


def make_any_plan(program: Program, settings: PlanSettings, first: FirstLayouts | None = None) -> Plan:
    """Plans a normalised program, as a pipeline if it has stages.

    Args:
      first: cache of layouts from earlier plans of the program without stages, which may have had other split scopes.

    Raises:
      PlanError: see ``plan_program`` and ``plan_stage_groups``.
    """
    stage_groups = stage_groups_of(program, settings)
    refuse_rank_groups(program, settings.size)
    on_host = find_offloaded(program, settings.memory.offload)
    if stage_groups:
        plan = plan_stage_groups(program, settings, stage_groups)
    else:
        plan = plan_program(program, settings, first)
    return replace(plan, offloaded=on_host)


@dataclass(frozen=True, slots=True)
class RankPrograms:
    """Holds what the passes of ``PARTITION`` have made so far of a program and its plan.

    Attributes:
      expanded: the program with composite ops decomposed for the plan.
      ranks: the program of each rank; () before the pass that makes them.
    """

    expanded: Program
    ranks: tuple[Program, ...] = ()

    @property
    def programs(self) -> tuple[Program, ...]:
        """Returns the latest programs: those of the ranks, or else the expanded program."""
        return self.ranks or (self.expanded,)


@dataclass(frozen=True, slots=True)
class PartitionContext:
    """Holds the inputs that all passes of ``PARTITION`` share, beside the programs.

    Attributes:
      program: the normalised program for which the plan was made.
      plan: the plan.
      settings: the settings, with as many micro-batches as the plan has.
      ranks: the ranks whose programs are wanted.
      comm: name of the ranks' communicator.
      what: description of the program, for error messages of its exchanges.
    """

    program: Program
    plan: Plan
    settings: PlanSettings
    ranks: Sequence[int] = ()
    comm: str = ""
    what: str = ""


_PartitionPass = Pass[RankPrograms, PartitionContext]


def _apply_to_each(
    change: Callable[[Program, PartitionContext], Program],
) -> Callable[[RankPrograms, PartitionContext], RankPrograms]:
    """Returns a pass that applies ``change`` to each rank's program."""

    def run(made: RankPrograms, context: PartitionContext) -> RankPrograms:
        return replace(made, ranks=tuple([change(program, context) for program in made.ranks]))

    return run


def _expand(made: RankPrograms, c: PartitionContext) -> RankPrograms:
    return replace(made, expanded=expand(made.expanded, c.plan.expanded, c.settings))


def _lower_along_one_axis(made: RankPrograms, c: PartitionContext) -> RankPrograms:
    return replace(
        made, ranks=tuple([partition_for_rank(made.expanded, c.plan, rank, c.comm, c.what) for rank in c.ranks])
    )


def _lower_along_mesh(made: RankPrograms, c: PartitionContext) -> RankPrograms:
    return replace(made, ranks=tuple(lower_mesh(c.program, c.plan, c.settings, c.ranks, c.comm, c.what)))


def _lower_in_stages(made: RankPrograms, c: PartitionContext) -> RankPrograms:
    lowered = lower_stage_groups(made.expanded, c.plan, c.ranks, c.comm, c.what, c.settings)
    return replace(made, ranks=tuple(lowered))


def _divide_large_attention(program: Program, c: PartitionContext) -> Program:
    # The program has the rows of all micro-batches here.
    return in_blocks_if_large(program, c.settings.memory.scores_bytes * c.plan.micro_batches)


def _divide_in_micro_batches(made: RankPrograms, c: PartitionContext) -> RankPrograms:
    own, known = find_own_rows(made.expanded, c.plan), list[MicrobatchProgram]()
    ranks = zip(made.ranks, c.ranks)
    return replace(made, ranks=tuple([divide_in_micro_batches(p, c.plan, r, c.settings, own, known) for p, r in ranks]))


def _fuse_sums(made: RankPrograms, c: PartitionContext) -> RankPrograms:
    order = order_sums(made.expanded, _list_sums(made.expanded, (c.plan, *c.plan.others)))
    group_bytes, along = c.settings.exchange.group_bytes, [_list_axis_groups(c.plan, rank) for rank in c.ranks]
    return replace(made, ranks=tuple([fuse_sums(p, group_bytes, order, a) for p, a in zip(made.ranks, along)]))


def _list_sums(program: Program, plans: Sequence[Plan]) -> dict[str, Ref]:
    """Returns the key of each all-reduce of the main graph -> the tensor of ``program`` that it sums, where it is one.

    Args:
      program: the program that all ranks together run.
      plans: the plan, and those of other groups of ranks.
    """
    tensors: dict[Ref, Ref] = {}  # a tensor in another placement -> the tensor
    sums: dict[str, Ref] = {}
    for plan in plans:
        for level, one in enumerate(iterate_levels(plan)):
            for r in one.reshards:
                if r.graph != "":
                    continue
                prefix = make_prefix(level)
                if r.group >= 0:
                    tensors[find_fused_result(prefix, r, one.place_in_group[r.group, r.key])] = r.ref
                else:
                    tensors[Ref(make_reshard_name(prefix, r.ref, r.target))] = r.ref
                if is_all_reduce(r):
                    sums[r.key] = r.ref
    found = {}
    for key, ref in sums.items():
        while ref.node not in program.by_name and ref in tensors:
            ref = tensors[ref]
        if ref.node in program.by_name:
            found[key] = ref
    return found


def _give_sums_to_horovod(made: RankPrograms, c: PartitionContext) -> RankPrograms:
    ranks = zip(made.ranks, c.ranks)
    return replace(made, ranks=tuple([give_to_horovod(p, rank, c.settings.size, c.comm) for p, rank in ranks]))


DECOMPOSE: tuple[_PartitionPass, ...] = (
    Pass(
        "decompose",
        "decomposes composite operations that the plan needs as simple ones",
        _expand,
        When("a plan that names some", lambda c: bool(c.plan.expanded)),
    ),
)

PARTITION: Table[RankPrograms, PartitionContext] = Table(
    "PARTITION",
    (
        *DECOMPOSE,
        Pass(
            "partition",
            "gives each rank local shapes, and exchanges where a layout changes",
            _lower_along_one_axis,
            When("a plan of one axis", lambda c: not (c.plan.stage_groups or c.plan.inner or c.plan.rank_order)),
        ),
        Pass(
            "partition_mesh",
            "gives each rank local shapes and exchanges, one mesh axis after the other",
            _lower_along_mesh,
            When("mesh", lambda c: not c.plan.stage_groups and bool(c.plan.inner or c.plan.rank_order)),
        ),
        Pass(
            "partition_stages",
            "gives each rank the part of its stages, in micro-batches by the schedule",
            _lower_in_stages,
            When("wh.stage, mesh", lambda c: bool(c.plan.stage_groups)),
        ),
        Pass(
            "attention_as_one",
            "makes attentions with large scores one operation each",
            _apply_to_each(_divide_large_attention),
            When("memory.attention_scores_bytes", lambda c: bool(c.settings.memory.scores_bytes)),
        ),
        Pass(
            "attention_in_blocks",
            "rewrites these attentions to process their queries block by block",
            _apply_to_each(lambda p, c: divide_attention_in_blocks(p)),
        ),
        Pass(
            "micro_batches",
            "moves what each micro-batch computes into a function, which is called for each",
            _divide_in_micro_batches,
            When("pipeline.micro_batches", lambda c: c.plan.micro_batches > 1 and not c.plan.stage_groups),
        ),
        Pass(
            "fuse_sums",
            "fuses all-reduces along all axes of a mesh",
            _fuse_sums,
            When("mesh", lambda c: any(p.inner is not None for p in (c.plan, *c.plan.others))),
        ),
        Pass(
            "sums_to_horovod",
            "replaces all-reduces over all ranks by Horovod's",
            _give_sums_to_horovod,
            When(
                "communication.backend=horovod with a mesh or stages",
                lambda c: (
                    c.settings.exchange.backend == "horovod" and bool(c.plan.stage_groups or c.plan.inner is not None)
                ),
            ),
        ),
        Pass(
            "bare_receives",
            "removes the operands from which receives of ring attention took their placement",
            _apply_to_each(lambda p, c: remove_examples(p)),
        ),
        Pass(
            "offload",
            "runs operations on offloaded variables in the host's memory, and copies tensors that cross",
            _apply_to_each(lambda p, c: offload(p, c.plan.offloaded)),
            When("memory.offload", lambda c: bool(c.plan.offloaded)),
        ),
    ),
    programs=lambda made: made.programs,
    text=lambda made, c: format_program(made.programs[0]),
    changes=lambda before, after: program_changes(before.programs[0], after.programs[0]),
)


def decompose(program: Program, plan: Plan, settings: PlanSettings) -> Program:
    """Returns a normalised program with some composite ops decomposed: those that its plan lists as ``expanded``."""
    context = PartitionContext(program, plan, settings)
    return run_passes(PARTITION, RankPrograms(program), context, settings.observer, DECOMPOSE).expanded


def lower_ranks(
    program: Program,
    plan: Plan,
    settings: PlanSettings,
    ranks: Sequence[int],
    comm: str = "",
    what: str = "",
    expanded: Program | None = None,
) -> list[Program]:
    """Lowers a program under a plan to the programs of ``ranks``, with local shapes, exchanges and micro-batches.

    Args:
      program: the normalised program.
      comm: name of the ranks' communicator.
      what: description of the program, for error messages of its exchanges; "": its name.
      expanded: the result of ``decompose``, if the caller has it; None: it is computed here.

    Raises:
      PlanError: the plan lacks a strategy or a reshard, or a value of all micro-batches is needed before the last one.
    """
    expanded = expanded if expanded is not None else decompose(program, plan, settings)
    # A plan may have some more micro-batches than were asked for.
    context = PartitionContext(
        program, plan, settings.but(time__micro_batches=plan.micro_batches), ranks, comm, what or plan.program
    )
    with suspend_garbage_collection():
        passes = PARTITION.passes[len(DECOMPOSE) :]
        return list(run_passes(PARTITION, RankPrograms(expanded), context, settings.observer, passes).ranks)


def _list_axis_groups(plan: Plan, rank: int) -> list[tuple[int, ...]]:
    """Lists the groups of ranks with which ``rank`` may communicate: first its group along all mesh axes together, then
    its groups along some of the axes.
    """
    group = next((group for group in plan.stage_groups if rank in group.ranks), None)
    mesh = (
        make_mesh(plan.find_group_plan(group), group.ranks) if group is not None else make_mesh(plan, plan.mesh_ranks)
    )
    names = [axis.name for axis in mesh.axes]
    return [
        mesh.list_ranks_along(rank, *some) for count in range(len(names), 0, -1) for some in combinations(names, count)
    ]


def lower_planned_ranks(program: Program, settings: PlanSettings, ranks: Sequence[int]) -> list[Program]:
    """Plans a normalised program, without asking other ranks, and returns the programs of ``ranks``.

    Raises:
      PlanError: the settings cannot be applied to the program.
    """
    return lower_ranks(program, make_any_plan(program, settings), settings, ranks)


def lower_first_ranks(settings: PlanSettings, captured: Program) -> dict[int, Program]:
    """Normalises, plans and lowers a captured program; returns rank -> program with kernels substituted, for up to 8
    ranks.

    Raises:
      PlanError: the settings cannot be applied to the program.
    """
    ranks = _list_shown(settings)
    return dict(
        zip(ranks, substitute_kernels(lower_planned_ranks(normalise(captured, settings), settings, ranks), settings))
    )


def lower_shown_ranks(
    program: Program,
    plan: Plan,
    settings: PlanSettings,
    find_xla: Callable[[Sequence[Program]], XlaKernels | None] = lambda programs: None,
) -> list[Program]:
    """Lowers the ranks that reports show, up to the first eight, with the kernels that predictions assume.

    Args:
      find_xla: returns XLA's kernels if a run lets XLA compile parts of these programs, else None; called only if
        passes are observed.
    """
    with suspend_garbage_collection():
        ranks = lower_ranks(program, plan, settings, _list_shown(settings))
        if not settings.observer.is_on or (xla := find_xla(ranks)) is None:
            return substitute_kernels(ranks, settings)
        substitute_kernels(ranks[:1], settings, xla=xla)
        return substitute_kernels(ranks, settings.but(observer=PassObserver()))


def add_memory(plan: Plan, ranks: Sequence[Program], settings: PlanSettings) -> Plan:
    """Returns ``plan`` with the predicted bytes of its ranks, and with the number of fused updates of the first rank.

    Args:
      ranks: the result of ``lower_shown_ranks``.
    """
    each = step_bytes_of_ranks(ranks, settings.size)
    memory = {name: tuple(f[name] for f in each) for name in CATEGORIES}
    return replace(plan, memory=memory, updates=count_written_together(ranks[0]))


def _list_shown(settings: PlanSettings) -> range:
    return range(min(settings.size, _MOST_RANKS_SHOWN))


# Used where a step runs over several mesh axes or in stages. In a plan of one axis each reshard has its own backend
# (``whale.passes.resharding``). Horovod connects all ranks, so that it cannot sum over some of them.
def give_to_horovod(program: Program, rank: int, size: int, comm: str) -> Program:
    """Replaces the sums over all ranks in a rank's program by Horovod's op, where possible.

    Horovod gets only sums that an update reads, that is gradients: all ranks wait for the same nodes before these. Sums
    in loops, branches and micro-batches stay with Whale, and so do sums over some of the ranks.
    """
    emitter = Emitter(rank, size, comm)
    moved: dict[Ref, Ref] = {}
    for node in program.nodes:
        if not _can_go(program, node, size):
            emitter.nodes[node.name] = node
            continue
        key = str(node.attrs["key"])
        name = f"whale/by_all/{re.sub('[^A-Za-z0-9_]', '_', key)}_{crc32(key.encode()):08x}"  # equal on all ranks
        r = Reshard("", Ref(node.name), Partial("sum"), B, key, 0, backend="horovod")
        emitter.all_reduce(name, node.inputs[1:], node.outputs, r, key)
        emitter.nodes[name] = replace(emitter.nodes[name], controls=node.controls)
        moved.update((ref, Ref(name, ref.index)) for ref in node.list_refs())
    return rewire(program, emitter.nodes, moved) if moved else program


def _can_go(program: Program, node: Node, size: int) -> bool:
    if node.op != ALL_REDUCE or node.attrs["reduction"] != "sum" or len(node.attrs["ranks"]) not in (0, size):
        return False
    if any(t.dtype not in HOROVOD_DTYPES for t in node.outputs):
        return False
    return "wire_dtype" not in node.attrs and all(is_taken_by_updates(program, ref) for ref in node.list_refs())
