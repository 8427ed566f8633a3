"""The list of passes: program -> normalised program -> plan.

Every pass is a pure function. The tables below say which ones there are, in which order they run, and when; the text of
the program after each pass of ``NORMALISE``, and of the plan, goes to the directory that ``WHALE_DEBUG_DUMP`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from whale.ir.collector import no_garbage_collection
from whale.ir.fingerprint import fingerprint
from whale.ir.layout import Split, Strategy
from whale.ir.plan import BatchInput, Plan
from whale.ir.program import Program
from whale.passes.dump import dump
from whale.passes.memory.gather_at_use import gather_at_use
from whale.passes.memory.hoist import hoist_reads
from whale.passes.memory.offload import TABLES
from whale.passes.memory.recompute import recompute
from whale.passes.normalize.annotate import annotate, mark_flattened, task_graphs
from whale.passes.normalize.cse_scalars import share_scalars
from whale.passes.normalize.cse_variable_reads import merge_reads
from whale.passes.normalize.embedding.block_local_gather import mark_blocks
from whale.passes.normalize.embedding.gather_all_ids import look_up_every_id
from whale.passes.normalize.embedding.owner_updates import update_by_owner
from whale.passes.normalize.embedding.variable_gather import look_up_in_variables
from whale.passes.normalize.folding.fold import fold
from whale.passes.normalize.folding.powers import powers
from whale.passes.normalize.inline import inline
from whale.passes.normalize.loss_scaling import skip_overflow
from whale.passes.normalize.mixed_precision import mixed_precision
from whale.passes.normalize.specialise import specialise
from whale.passes.normalize.unpack_grouped_ops import unpack
from whale.passes.plan_builder import FirstLayouts, PlanDraft, expand, lay_out, layouts_of
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.in_place import make_in_place
from whale.passes.propagation.partial_sums import reduce_partial_sums
from whale.passes.propagation.propagate import NOTHING
from whale.passes.propagation.reference_plan import ReferencePlan
from whale.passes.resharding.fuse_all_reduces import fuse_all_reduces
from whale.passes.resharding.horovod import give_to_horovod, refuse_horovod
from whale.passes.resharding.reshards import explicit_reshards
from whale.passes.resharding.wire_dtype import narrow
from whale.passes.settings import PlanSettings
from whale.passes.verify.check import check
from whale.passes.verify.hidden_updates import refuse_hidden_updates
from whale.passes.verify.summary import exceptions, routed, split_and_total_flops, unruled

T = TypeVar("T", Program, PlanDraft)


def always(settings: PlanSettings) -> bool:
    """The condition of a pass that runs whatever the settings are."""
    return True


@dataclass(frozen=True, slots=True)
class Pass(Generic[T]):
    """One step: from a captured program to a normalised one, or from layouts to a plan.

    Attributes:
      name: what it is called, in dumps too.
      when: whether the settings ask for it.
      run: the program, or the draft of a plan, that it makes of one.
    """

    name: str
    when: Callable[[PlanSettings], bool]
    run: Callable[[T, PlanSettings], T]


def _gathers_weights(s: PlanSettings) -> bool:
    return s.zero.level >= 3 or s.memory.offload == "parameters"


def _fewest_bytes(s: PlanSettings) -> int:
    """Of the weights that are read in front of loops and branches: none of those in the host's memory stays in one."""
    return 0 if s.memory.offload == "parameters" else s.zero.min_bytes


def _on_every_graph(
    step: Callable[[Program, GraphLayout, int], GraphLayout],
) -> Callable[[PlanDraft, PlanSettings], PlanDraft]:
    """What makes new layouts of those of the program and of each of its functions."""

    def run(draft: PlanDraft, settings: PlanSettings) -> PlanDraft:
        layouts = {g: step(draft.graph(g), layout, settings.size) for g, layout in draft.layouts.items()}
        return replace(draft, layouts=layouts)

    return run


def _explicit(draft: PlanDraft, settings: PlanSettings) -> PlanDraft:
    return replace(draft, reshards=explicit_reshards(draft.program, draft.layouts, settings.size))


def _given_to_horovod(draft: PlanDraft, settings: PlanSettings) -> PlanDraft:
    return replace(draft, reshards=give_to_horovod(draft.program, draft.layouts[""], draft.reshards))


def _narrowed(draft: PlanDraft, settings: PlanSettings) -> PlanDraft:
    dtype, layout = settings.exchange.wire_dtype, draft.layouts[""]
    return replace(draft, reshards=narrow(draft.program, layout, draft.reshards, dtype, settings.size))


def _fused(draft: PlanDraft, settings: PlanSettings) -> PlanDraft:
    in_time, group_bytes = settings.time.micro_batches > 1, settings.exchange.group_bytes
    reshards = fuse_all_reduces(draft.program, draft.layouts, draft.reshards, group_bytes, in_time)
    return replace(draft, reshards=reshards)


NORMALISE: tuple[Pass[Program], ...] = (
    Pass("inline", always, lambda p, s: inline(p)),
    Pass("fold", always, lambda p, s: fold(p)),
    Pass("powers", always, lambda p, s: powers(p)),
    Pass("specialise", always, lambda p, s: specialise(p)),
    Pass("unpack", always, lambda p, s: unpack(p)),
    Pass("share_scalars", always, lambda p, s: share_scalars(p)),
    Pass("look_up_in_variables", lambda s: s.memory.offload == TABLES, lambda p, s: look_up_in_variables(p)),
    Pass("skip_overflow", lambda s: s.precision.matmul_dtype == "float16", lambda p, s: skip_overflow(p)),
    Pass("look_up_every_id", always, lambda p, s: look_up_every_id(p)),
    Pass("mark_blocks", always, lambda p, s: mark_blocks(p)),
    Pass("annotate", always, lambda p, s: annotate(p)),
    Pass("mark_flattened", always, lambda p, s: mark_flattened(p)),
    Pass("update_by_owner", lambda s: s.size > 1, lambda p, s: update_by_owner(p)),
    Pass("recompute", lambda s: bool(s.memory.recompute), lambda p, s: recompute(p, s.memory.recompute)),
    Pass("merge_reads", lambda s: s.zero.level > 0, lambda p, s: merge_reads(p)),
    Pass("hoist_reads", _gathers_weights, lambda p, s: hoist_reads(p, _fewest_bytes(s))),
    Pass("gather_at_use", _gathers_weights, lambda p, s: gather_at_use(p, s.zero.min_bytes, s.zero.ahead)),
    Pass(
        "mixed_precision",
        lambda s: bool(s.precision.matmul_dtype),
        lambda p, s: mixed_precision(p, s.precision.matmul_dtype),
    ),
)

# What the layouts of every graph go through, once the program is laid out.
LAYOUTS: tuple[Pass[PlanDraft], ...] = (
    Pass("reduce_partial_sums", always, _on_every_graph(reduce_partial_sums)),
    Pass("make_in_place", always, _on_every_graph(make_in_place)),
)

# What moves, and who carries it.
EXCHANGES: tuple[Pass[PlanDraft], ...] = (
    Pass("explicit_reshards", always, _explicit),
    Pass("give_to_horovod", lambda s: s.exchange.backend == "horovod", _given_to_horovod),
    Pass("narrow", lambda s: bool(s.exchange.wire_dtype), _narrowed),
)

PLAN: tuple[Pass[PlanDraft], ...] = (
    *LAYOUTS,
    *EXCHANGES,
    Pass("fuse_all_reduces", always, _fused),
)

# What every plan has to pass; each raises PlanError.
CHECKS: tuple[Callable[[Program, Plan], None], ...] = (check, refuse_hidden_updates)


def normalise(program: Program, settings: PlanSettings) -> Program:
    """What ``NORMALISE`` makes of a captured program.

    Raises:
      ProgramError: the program averages its gradients through Horovod itself.
    """
    with no_garbage_collection():
        dump(settings.dump, "captured", program)
        refuse_horovod(program)
        for step in NORMALISE:
            if step.when(settings):
                program = step.run(program, settings)
                dump(settings.dump, step.name, program)
    return program


def make_plan(program: Program, settings: PlanSettings, mark: str = "", first: FirstLayouts | None = None) -> Plan:
    """The plan of a normalised program (see ``expand`` for the program that the plan speaks of).

    Args:
      mark: the fingerprint that it gets; "": that of ``program``.
      first: see ``lay_out``.

    Raises:
      PlanError: the batch cannot be split as asked, or no legal plan exists.
    """
    with no_garbage_collection():
        draft = _applied(PLAN, lay_out(program, settings, first), settings)
        plan = _as_plan(program, draft, settings, mark)
        for refuse in CHECKS:
            refuse(draft.program, plan)
        dump(settings.dump, "plan", draft.program, plan)
        return plan


def complete_plan(
    program: Program, settings: PlanSettings, model: Plan, fixed: Mapping[str, Strategy] = NOTHING
) -> Plan:
    """The plan of a program that is ``model``'s but for what belongs to the coordinate of another mesh axis.

    Nodes that both programs have lie as in ``model``, but for sizes; the rest follows by propagation.

    Args:
      settings: with the batch inputs, whose rows may be others than the model's.
      fixed: strategies of nodes that the model does not have.

    Raises:
      PlanError: no such plan is legal.
    """
    with no_garbage_collection():
        expanded = expand(program, frozenset(model.expanded), settings)
        batch = settings.batch.inputs or ()
        ours = {b.name: _sizes(b) for b in batch}
        rows = {_sizes(b): ours.get(b.name, ()) for b in model.batch_inputs}
        if all(one == other for one, other in rows.items()):
            rows = {}
        layouts = layouts_of(expanded, batch, settings, fixed, model=ReferencePlan(model.strategies, rows))
        plan = _as_plan(expanded, _as_in(model, expanded, layouts, settings), settings, model.fingerprint)
        plan = replace(plan, expanded=model.expanded)
        for refuse in CHECKS:
            refuse(expanded, plan)
        return plan


def plan_of_part(part: Program, settings: PlanSettings, model: Plan, ends: Mapping[str, Strategy]) -> Plan:
    """The plan of one stage group's part of an expanded program, of which ``model`` is the plan.

    Args:
      ends: how tensors come in and go out.
    """
    with no_garbage_collection():
        known = ReferencePlan(model.strategies)
        kept = known.layout_of_part(part, ends)
        layouts = {"": kept} if kept else layouts_of(part, settings.batch.inputs or (), settings, ends, model=known)
        draft = _as_in(model, part, layouts, settings)
        return replace(
            model,
            batch_inputs=draft.batch,
            strategies={g: layout.strategies for g, layout in layouts.items()},
            returned={g: layout.outputs for g, layout in layouts.items()},
            reshards=draft.reshards,
        )


def _as_in(model: Plan, program: Program, layouts: Mapping[str, GraphLayout], settings: PlanSettings) -> PlanDraft:
    """The draft with these layouts, whose sums travel together as the model's do."""
    draft = PlanDraft(program, frozenset(model.expanded), settings.batch.inputs or (), model.variables, layouts)
    draft = _applied(EXCHANGES, draft, settings)
    # Less depends on less here, where a partial sum begins with zeros; but what travels together must not wait, by
    # way of the other axis, for what the model has behind it.
    together = {r.key: r.group for r in model.reshards}
    reshards = tuple(replace(r, group=together.get(r.key, -1)) for r in draft.reshards)
    return replace(draft, reshards=reshards)


def _sizes(b: BatchInput) -> tuple[int, ...]:
    return b.placement.sizes if isinstance(b.placement, Split) else ()


def _applied(passes: Iterable[Pass[PlanDraft]], draft: PlanDraft, settings: PlanSettings) -> PlanDraft:
    for step in passes:
        if step.when(settings):
            draft = step.run(draft, settings)
    return draft


def _as_plan(program: Program, draft: PlanDraft, settings: PlanSettings, mark: str = "") -> Plan:
    """The plan that the draft has become.

    Args:
      program: before its composite ops were expanded.
      mark: the fingerprint that it has; "": that of ``program``.
    """
    expanded, layouts = draft.program, draft.layouts
    divided, total = split_and_total_flops(expanded, layouts)
    return Plan(
        program=program.name,
        fingerprint=mark or fingerprint(program),
        size=settings.size,
        devices=settings.devices or tuple(f"rank {i}" for i in range(settings.size)),
        task_graphs=task_graphs(expanded, tuple(range(settings.size))),
        batch_inputs=draft.batch,
        strategies={g: layout.strategies for g, layout in layouts.items()},
        returned={g: layout.outputs for g, layout in layouts.items()},
        reshards=draft.reshards,
        variables=draft.variables,
        expanded=tuple(n.name for n in program.nodes if n.name in draft.expanded),
        routed=routed(expanded, layouts, settings.size),
        unruled=unruled(expanded, layouts, draft.reshards),
        exceptions=exceptions(expanded, layouts[""]) if settings.size > 1 else (),
        split_flops=divided,
        total_flops=total,
        micro_batches=settings.time.micro_batches if draft.batch else 1,
    )
