"""The passes that make a plan: program -> normalised program (``NORMALIZE``) -> plan (``PLAN``).

Every pass is a pure function. The tables below say which ones there are, what each does, in which order they run, and
when. ``whale.passes.run_passes`` runs them; PARTITION and REWRITE (``whale.partition.lower``,
``whale.kernels.substitute``) follow on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from whale.ir.collector import suspend_garbage_collection
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.layout import Shard, Strategy
from whale.ir.plan import BatchInput, Plan
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.ir.text import format_program
from whale.ir.verify import verify
from whale.passes.memory.gather_at_use import gather_at_use, hoist_reads
from whale.passes.memory.offload import TABLES
from whale.passes.memory.recompute import recompute
from whale.passes.normalize.annotate import annotate, mark_flattened, mark_streams, task_graphs
from whale.passes.normalize.collapse_updates import collapse_updates
from whale.passes.normalize.cse import merge_reads, share_scalars
from whale.passes.normalize.embedding.block_local_gather import mark_blocks
from whale.passes.normalize.embedding.gather_all_ids import gather_all_ids
from whale.passes.normalize.embedding.owner_updates import update_on_owners
from whale.passes.normalize.embedding.variable_gather import gather_from_variables
from whale.passes.normalize.folding.fold import fold, powers
from whale.passes.normalize.inline import inline, specialise
from whale.passes.normalize.loss_scaling import skip_overflow
from whale.passes.normalize.mixed_precision import lower_precision
from whale.passes.normalize.side_effects import run_python_everywhere, share_hidden_updates
from whale.passes.normalize.unpack_grouped_ops import unpack
from whale.passes.plan_builder import FirstLayouts, PlanDraft, build_plan_draft, expand, layouts_of
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.partial_sums import reduce_partial_sums
from whale.passes.propagation.propagate import NOTHING
from whale.passes.propagation.reference_plan import ReferencePlan
from whale.passes.resharding.fuse_all_reduces import fuse_all_reduces
from whale.passes.resharding.horovod import give_to_horovod, refuse_horovod
from whale.passes.resharding.on_devices import DEVICE_BACKENDS
from whale.passes.resharding.reshards import explicit_reshards, make_in_place
from whale.passes.resharding.wire_dtype import narrow
from whale.passes.run_passes import Pass, PassObserver, Table, When, dump, program_changes, run_passes
from whale.passes.settings import PlanSettings
from whale.passes.verify.check import check
from whale.passes.verify.hidden_updates import refuse_hidden_updates
from whale.passes.verify.summary import count_routed, count_unruled, exceptions, split_and_total_flops


def _gathers_weights(s: PlanSettings) -> bool:
    return s.zero.level >= 3 or s.memory.offload == "parameters"


def _collapses_updates(s: PlanSettings) -> bool:
    return s.fuse.updates and s.precision.matmul_dtype != "float16"  # whose updates are left out, one by one


def _fewest_bytes(s: PlanSettings) -> int:
    """Returns the least bytes of weights whose reads are hoisted out of loops and branches; 0 with offloaded
    weights.
    """
    return 0 if s.memory.offload == "parameters" else s.zero.min_bytes


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The inputs that all passes of a plan share, beside the draft.

    Attributes:
      first: see ``build_plan_draft``.
    """

    settings: PlanSettings
    first: FirstLayouts | None = None


_DraftPass = Pass[PlanDraft, PlanContext]


def _on_every_graph(
    step: Callable[[Program, GraphLayout, int], GraphLayout],
) -> Callable[[PlanDraft, PlanContext], PlanDraft]:
    """Returns a pass that applies ``step`` to the layouts of the program and of each of its functions."""

    def run(draft: PlanDraft, context: PlanContext) -> PlanDraft:
        size = context.settings.size
        layouts = {g: step(draft.graph(g), layout, size) for g, layout in draft.layouts.items()}
        return replace(draft, layouts=layouts)

    return run


def _explicit(draft: PlanDraft, context: PlanContext) -> PlanDraft:
    return replace(draft, reshards=explicit_reshards(draft.program, draft.layouts, context.settings.size))


def _give_to_horovod(draft: PlanDraft, context: PlanContext) -> PlanDraft:
    return replace(draft, reshards=give_to_horovod(draft.program, draft.layouts[""], draft.reshards))


def _narrow(draft: PlanDraft, context: PlanContext) -> PlanDraft:
    dtype, layout = context.settings.exchange.wire_dtype, draft.layouts[""]
    return replace(draft, reshards=narrow(draft.program, layout, draft.reshards, dtype, context.settings.size))


def _fuse(draft: PlanDraft, context: PlanContext) -> PlanDraft:
    settings = context.settings
    microbatched, group_bytes = settings.time.micro_batches > 1, settings.exchange.group_bytes
    gathers = settings.exchange.backend not in DEVICE_BACKENDS
    reshards = fuse_all_reduces(draft.program, draft.layouts, draft.reshards, group_bytes, microbatched, gathers)
    return replace(draft, reshards=reshards)


_GATHERED_WEIGHTS = When("memory.zero=3 or memory.offload=parameters", _gathers_weights)

NORMALIZE = Table(
    "NORMALIZE",
    (
        Pass("inline", "puts the bodies of called functions in the place of the calls", lambda p, s: inline(p)),
        Pass("fold", "computes shape arithmetic and other constants", lambda p, s: fold(p)),
        Pass("powers", "writes powers as simpler operations", lambda p, s: powers(p)),
        Pass(
            "specialise",
            "gives nodes the static shapes that follow from those of the inputs",
            lambda p, s: specialise(p),
        ),
        Pass("unpack", "takes operations on many tensors at once apart", lambda p, s: unpack(p)),
        Pass("share_scalars", "computes equal scalars once", lambda p, s: share_scalars(p)),
        Pass(
            "collapse_updates",
            "makes one operation of each variable's update, where there are many",
            lambda p, s: collapse_updates(p),
            When("kernels=updates, but for float16", _collapses_updates),
        ),
        Pass(
            "gather_from_variables",
            "looks rows of tables up in the variable, not in its value",
            lambda p, s: gather_from_variables(p, s.memory.offload == TABLES),
        ),
        Pass(
            "skip_overflow",
            "leaves a step out in which a scaled gradient is not finite",
            lambda p, s: skip_overflow(p),
            When("precision.compute_dtype=float16", lambda s: s.precision.matmul_dtype == "float16"),
        ),
        Pass(
            "gather_all_ids",
            "writes lookups so that they may run where the rows are",
            lambda p, s: gather_all_ids(p),
        ),
        Pass(
            "mark_blocks",
            "marks lookups and sums whose indices stay within blocks of rows",
            lambda p, s: mark_blocks(p),
        ),
        Pass(
            "annotate",
            "completes scopes: every node gets one that follows from its neighbours",
            lambda p, s: annotate(p),
        ),
        Pass(
            "mark_flattened",
            "marks reshapes through which dimensions can be cut in runs",
            lambda p, s: mark_flattened(p),
        ),
        Pass(
            "update_on_owners",
            "lets the owner of a table's rows sum and apply their gradients",
            lambda p, s: update_on_owners(p),
            When("more than one rank", lambda s: s.size > 1),
        ),
        Pass(
            "share_hidden_updates",
            "gives all ranks what functions of datasets assign on the first one",
            lambda p, s: share_hidden_updates(p),
            When("more than one rank", lambda s: s.size > 1),
        ),
        Pass(
            "run_python_everywhere",
            "calls Python functions, changes tables and queues on every rank, and takes the first one's results",
            lambda p, s: run_python_everywhere(p),
            When("ranks that are processes", lambda s: s.size > 1 and s.own_processes),
        ),
        Pass(
            "mark_streams",
            "names the stream of each random operation, by which programs of other shapes know it",
            lambda p, s: mark_streams(p),
        ),
        Pass(
            "recompute",
            "computes activations again for the gradients, instead of holding them",
            lambda p, s: recompute(p, s.memory.recompute),
            When("memory.recompute", lambda s: bool(s.memory.recompute)),
        ),
        Pass(
            "merge_reads",
            "reads each variable once between two of its updates",
            lambda p, s: merge_reads(p),
            When("memory.zero", lambda s: s.zero.level > 0),
        ),
        Pass(
            "hoist_reads",
            "reads weights in front of the loops and branches that use them",
            lambda p, s: hoist_reads(p, _fewest_bytes(s)),
            _GATHERED_WEIGHTS,
        ),
        Pass(
            "gather_at_use",
            "gathers weights where they are used, forward and backward",
            lambda p, s: gather_at_use(p, s.zero.min_bytes, s.zero.ahead),
            _GATHERED_WEIGHTS,
        ),
        Pass(
            "mixed_precision",
            "computes products and convolutions in a type of 16 bits",
            lambda p, s: lower_precision(p, s.precision.matmul_dtype),
            When("precision.compute_dtype", lambda s: bool(s.precision.matmul_dtype)),
        ),
    ),
    programs=lambda p: (p,),
    text=lambda p, s: format_program(p),
    changes=program_changes,
)

# What the layouts of every graph go through, once the program is laid out.
LAYOUTS: tuple[_DraftPass, ...] = (
    Pass(
        "reduce_partial_sums",
        "decides where partial sums are reduced, by a minimum cut",
        _on_every_graph(reduce_partial_sums),
    ),
    Pass("make_in_place", "lets operands be produced as their reader wants them", _on_every_graph(make_in_place)),
)

# What moves, and who carries it.
EXCHANGES: tuple[_DraftPass, ...] = (
    Pass("explicit_reshards", "makes every change of layout a reshard", _explicit),
    Pass(
        "give_to_horovod",
        "gives sums of gradients to Horovod",
        _give_to_horovod,
        When("communication.backend=horovod", lambda c: c.settings.exchange.backend == "horovod"),
    ),
    Pass(
        "narrow",
        "rounds gradients on the way to a type of fewer bits",
        _narrow,
        When("communication.wire_dtype", lambda c: bool(c.settings.exchange.wire_dtype)),
    ),
)

PLAN: Table[PlanDraft, PlanContext] = Table(
    "PLAN",
    (
        Pass(
            "build_plan_draft",
            "finds the batch, what is divided, and how every tensor lies",
            lambda d, c: build_plan_draft(d.program, c.settings, c.first),
        ),
        *LAYOUTS,
        *EXCHANGES,
        Pass("fuse_all_reduces", "lets small sums and gathers of gradients travel together", _fuse),
    ),
    programs=lambda d: (d.program,),
    text=lambda d, c: format_plan(_as_plan(d.program, d, c.settings)),
    changes=lambda before, after: _draft_changes(before, after),
)

# What every plan has to pass; each raises PlanError.
CHECKS: tuple[Callable[[Program, Plan], None], ...] = (check, refuse_hidden_updates)


def normalise(program: Program, settings: PlanSettings) -> Program:
    """Runs the passes of ``NORMALIZE`` on a captured program.

    Raises:
      ProgramError: the program averages its gradients through Horovod itself.
    """
    with suspend_garbage_collection():
        if settings.observer.dump:
            dump(settings.observer.dump, "captured", program.name, format_program(program))
        if settings.observer.verifies:
            verify(program, "capture")
        refuse_horovod(program)
        return run_passes(NORMALIZE, program, settings, settings.observer)


def make_plan(program: Program, settings: PlanSettings, mark: str = "", first: FirstLayouts | None = None) -> Plan:
    """Plans a normalised program; the plan refers to the program that ``expand`` returns.

    Args:
      mark: the fingerprint to store in the plan; "": that of ``program``.
      first: see ``build_plan_draft``.

    Raises:
      PlanError: the batch cannot be split as asked, or no legal plan exists.
    """
    with suspend_garbage_collection():
        begun = PlanDraft(program, frozenset(), (), {}, {})
        draft = run_passes(PLAN, begun, PlanContext(settings, first), settings.observer)
        plan = _as_plan(program, draft, settings, mark)
        for refuse in CHECKS:
            refuse(draft.program, plan)
        if settings.observer.dump:
            dump(settings.observer.dump, "plan", program.name, format_plan(plan))
        return plan


def complete_plan(
    program: Program, settings: PlanSettings, model: Plan, fixed: Mapping[str, Strategy] = NOTHING
) -> Plan:
    """Plans a program that equals another one, whose plan is ``model``, but for nodes that depend on another mesh axis.

    Nodes of both programs have the layouts of ``model``, but for sizes; the others follow by propagation.

    Args:
      settings: with the batch inputs, whose rows may differ from the model's.
      fixed: strategies of nodes that the model does not have.

    Raises:
      PlanError: no such plan is legal.
    """
    with suspend_garbage_collection():
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
    """Plans the part of an expanded program that one stage group runs, by the plan ``model`` of the program.

    Args:
      ends: the placements of tensors that enter and leave the part.
    """
    with suspend_garbage_collection():
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
    """Returns a draft with ``layouts`` whose all-reduces are fused into the same groups as those of the plan
    ``model``.
    """
    draft = PlanDraft(program, frozenset(model.expanded), settings.batch.inputs or (), model.variables, layouts)
    # What is planned like another plan is not watched: each rank of a mesh asks for it.
    draft = run_passes(PLAN, draft, PlanContext(settings), PassObserver(), EXCHANGES)
    # Less depends on less here, where a partial sum begins with zeros; but what travels together must not wait, by
    # way of the other axis, for what the model has behind it.
    together = {r.key: r.group for r in model.reshards}
    reshards = tuple(replace(r, group=together.get(r.key, -1)) for r in draft.reshards)
    return replace(draft, reshards=reshards)


def _sizes(b: BatchInput) -> tuple[int, ...]:
    return b.placement.sizes if isinstance(b.placement, Shard) else ()


def _draft_changes(before: PlanDraft, after: PlanDraft) -> str:
    """Describes how many layouts and reshards of a draft a pass has changed."""
    strategies = sum(
        layout.strategies[name] != (known.strategies.get(name) if (known := before.layouts.get(graph)) else None)
        for graph, layout in after.layouts.items()
        for name in layout.strategies
    )
    was = set(before.reshards)
    reshards = sum(r not in was for r in after.reshards) if after.reshards is not before.reshards else 0
    said = [f"{n} {what}" for n, what in ((strategies, "layouts of nodes"), (reshards, "reshards")) if n]
    return ", ".join(said) or "nothing"


def _as_plan(program: Program, draft: PlanDraft, settings: PlanSettings, mark: str = "") -> Plan:
    """Creates the plan from a finished draft.

    Args:
      program: before its composite ops were expanded.
      mark: the fingerprint to store in the plan; "": that of ``program``.
    """
    expanded, layouts = draft.program, draft.layouts
    divided, total = split_and_total_flops(expanded, layouts)
    return Plan(
        program=program.name,
        fingerprint=mark or compute_fingerprint(program),
        size=settings.size,
        devices=settings.devices or tuple(f"rank {i}" for i in range(settings.size)),
        task_graphs=task_graphs(expanded, tuple(range(settings.size))),
        batch_inputs=draft.batch,
        strategies={g: layout.strategies for g, layout in layouts.items()},
        returned={g: layout.outputs for g, layout in layouts.items()},
        reshards=draft.reshards,
        variables=draft.variables,
        expanded=tuple(n.name for n in program.nodes if n.name in draft.expanded),
        routed=count_routed(expanded, layouts, settings.size),
        unruled=count_unruled(expanded, layouts, draft.reshards),
        exceptions=exceptions(expanded, layouts[""]) if settings.size > 1 else (),
        split_flops=divided,
        total_flops=total,
        micro_batches=settings.time.micro_batches if draft.batch else 1,
    )
