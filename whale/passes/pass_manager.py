"""Defines the passes that make a plan: captured program -> normalised program (``NORMALIZE``) -> plan (``PLAN``).

The tables below list the passes in the order in which they run, with what each does and the condition under which it
runs. Every pass is a pure function. ``whale.passes.run_passes`` runs a table. Two more tables run afterwards and turn a
plan into the ranks' programs: PARTITION (``whale.partition.lower``) and REWRITE (``whale.kernels.substitute``).

``normalise`` and ``make_plan`` are the entry points for a whole program. ``complete_plan`` and ``plan_of_part`` derive
the plan of a related program (another axis of the mesh, a stage group) from a finished plan.
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
from whale.passes.analysis.stages import has_stages
from whale.passes.memory.gather_at_use import gather_at_use, hoist_reads
from whale.passes.memory.offload import TABLES
from whale.passes.memory.recompute import recompute
from whale.passes.normalize.annotate import annotate, mark_flattened, mark_streams, task_graphs
from whale.passes.normalize.collapse_updates import collapse_called_updates, collapse_updates
from whale.passes.normalize.cse import merge_reads, share_scalars
from whale.passes.normalize.divide_conditions import divide_conditions
from whale.passes.normalize.embedding.block_local_gather import mark_blocks
from whale.passes.normalize.embedding.gather_all_ids import gather_all_ids
from whale.passes.normalize.embedding.owner_updates import update_on_owners
from whale.passes.normalize.embedding.variable_gather import gather_from_variables
from whale.passes.normalize.folding.fold import fold, powers
from whale.passes.normalize.folding.single_rows import sum_single_rows
from whale.passes.normalize.inline import inline, specialise
from whale.passes.normalize.loss_scaling import skip_overflow
from whale.passes.normalize.mixed_precision import lower_precision
from whale.passes.normalize.side_effects import run_python_everywhere, share_hidden_updates, use_shared_objects_once
from whale.passes.normalize.unpack_optionals import unpack_optionals
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
    # With float16 a step with a gradient that overflowed leaves out each variable's update by itself.
    return s.fuse.updates and s.precision.matmul_dtype != "float16"


def _fewest_bytes(s: PlanSettings) -> int:
    """Returns the size in bytes from which a weight's read is hoisted out of loops and branches; 0 (every weight) with
    offloaded weights.
    """
    return 0 if s.memory.offload == "parameters" else s.zero.min_bytes


@dataclass(frozen=True, slots=True)
class PlanContext:
    """Holds the inputs that all passes of the PLAN table read beside the draft.

    Attributes:
      settings: the ranks and the user's choices.
      first: cache of layouts shared with other plans of the program (see ``build_plan_draft``); None: no cache.
    """

    settings: PlanSettings
    first: FirstLayouts | None = None


_DraftPass = Pass[PlanDraft, PlanContext]


def _on_every_graph(
    step: Callable[[Program, GraphLayout, int], GraphLayout],
) -> Callable[[PlanDraft, PlanContext], PlanDraft]:
    """Wraps ``step``, which changes the layouts of one graph, as a pass over the layouts of the program and of each of
    its functions.
    """

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
        Pass(
            "collapse_called_updates",
            "makes one operation of each variable's update in functions that many updates call",
            lambda p, s: collapse_called_updates(p),
            When("kernels=updates, but for float16", _collapses_updates),
        ),
        Pass("inline", "puts the bodies of called functions in the place of the calls", lambda p, s: inline(p)),
        Pass("fold", "computes shape arithmetic and other constants", lambda p, s: fold(p)),
        Pass("powers", "writes powers as simpler operations", lambda p, s: powers(p)),
        Pass(
            "sum_single_rows",
            "sums gradients of what is broadcast over a batch of one row as those over larger batches",
            lambda p, s: sum_single_rows(p),
        ),
        Pass(
            "specialise",
            "gives nodes the static shapes that follow from those of the inputs",
            lambda p, s: specialise(p),
        ),
        Pass(
            "unpack_optionals",
            "passes values that branches save for gradients as tensors",
            lambda p, s: unpack_optionals(p),
        ),
        Pass("share_scalars", "computes equal scalars once", lambda p, s: share_scalars(p)),
        Pass(
            "collapse_updates",
            "makes one operation of each variable's update, in steps with many updates",
            lambda p, s: collapse_updates(p),
            When("kernels=updates, but for float16", _collapses_updates),
        ),
        Pass(
            "gather_from_variables",
            "gathers rows of tables from the variable, not from its value",
            lambda p, s: gather_from_variables(p, s.memory.offload == TABLES),
        ),
        Pass(
            "skip_overflow",
            "skips the update of a step in which a scaled gradient is not finite",
            lambda p, s: skip_overflow(p),
            When("precision.compute_dtype=float16", lambda s: s.precision.matmul_dtype == "float16"),
        ),
        Pass(
            "gather_all_ids",
            "rewrites lookups so that they can run on the ranks that hold the rows",
            lambda p, s: gather_all_ids(p),
        ),
        Pass(
            "mark_blocks",
            "marks lookups and sums whose indices stay within blocks of rows",
            lambda p, s: mark_blocks(p),
        ),
        Pass(
            "read_before_bodies",
            "reads variables in front of loops and branches, which may then be in another stage than what updates them",
            lambda p, s: hoist_reads(p) if has_stages(p) else p,
        ),
        Pass(
            "divide_conditions",
            "divides conditions under which variables of several stages are updated into one for each stage",
            lambda p, s: divide_conditions(p),
            When("more than one rank", lambda s: s.size > 1),
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
            "gives all ranks the values that functions of datasets assign on the first rank",
            lambda p, s: share_hidden_updates(p),
            When("more than one rank", lambda s: s.size > 1),
        ),
        Pass(
            "run_python_everywhere",
            "runs Python functions and changes of tables and queues on every rank; uses the first rank's results",
            lambda p, s: run_python_everywhere(p),
            When("ranks that are processes", lambda s: s.size > 1 and s.own_processes),
        ),
        Pass(
            "use_shared_objects_once",
            "runs what uses tables, queues and other shared objects on the first rank only",
            lambda p, s: use_shared_objects_once(p),
            When("ranks that are threads", lambda s: s.size > 1 and not s.own_processes),
        ),
        Pass(
            "mark_streams",
            "names the stream of each random operation, equally in programs of other shapes",
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

# The passes of PLAN that refine the layouts of every graph.
LAYOUTS: tuple[_DraftPass, ...] = (
    Pass(
        "reduce_partial_sums",
        "decides where partial sums are reduced, by a minimum cut",
        _on_every_graph(reduce_partial_sums),
    ),
    Pass("make_in_place", "produces operands in the layout that their reader wants", _on_every_graph(make_in_place)),
)

# The passes of PLAN that decide which tensors are resharded, and through which library.
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
            "finds the batch, what is divided, and the layout of every tensor",
            lambda d, c: build_plan_draft(d.program, c.settings, c.first),
        ),
        *LAYOUTS,
        *EXCHANGES,
        Pass("fuse_all_reduces", "fuses small all-reduces and all-gathers of gradients into buckets", _fuse),
    ),
    programs=lambda d: (d.program,),
    text=lambda d, c: format_plan(_as_plan(d.program, d, c.settings)),
    changes=lambda before, after: _draft_changes(before, after),
)

# In place of a fingerprint: the plan is a candidate of a search, which proves only the one that it takes.
CANDIDATE = "candidate"

# What every plan has to pass; each raises PlanError.
CHECKS: tuple[Callable[[Program, Plan], None], ...] = (check, refuse_hidden_updates)


def normalise(program: Program, settings: PlanSettings) -> Program:
    """Runs the ``NORMALIZE`` passes on a captured program, so that it can be planned: calls inlined, constants folded,
    grouped ops unpacked, every node with a scope.

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
    """Plans a normalised program: runs the ``PLAN`` passes, then checks that the plan is legal.

    The plan's node names are those of the program that ``expand`` returns, where some composite ops (batch norm,
    softmax) are replaced by simple ones.

    Args:
      mark: the fingerprint to store in the plan; "": that of ``program``. `CANDIDATE`: the plan is not proved legal,
        which takes a tenth of its time (see ``whale.partition.mesh.complete_candidate``).
      first: cache of layouts shared with other plans of the program (see ``build_plan_draft``); None: no cache.

    Raises:
      PlanError: the batch cannot be split as asked, or no legal plan exists.
    """
    with suspend_garbage_collection():
        begun = PlanDraft(program, frozenset(), (), {}, {})
        draft = run_passes(PLAN, begun, PlanContext(settings, first), settings.observer)
        plan = _as_plan(program, draft, settings, mark)
        for refuse in CHECKS:
            if mark != CANDIDATE or refuse is not check:
                refuse(draft.program, plan)
        if settings.observer.dump:
            dump(settings.observer.dump, "plan", program.name, format_plan(plan))
        return plan


def complete_plan(
    program: Program, settings: PlanSettings, model: Plan, fixed: Mapping[str, Strategy] = NOTHING
) -> Plan:
    """Plans a program by copying the decisions of ``model``, the plan of a nearly equal program.

    On a mesh of several axes the coordinates of one axis have programs that differ only in a few nodes and sizes. One
    of these programs is planned in full; the others get its layouts, with their own sizes. Propagation finds the
    layouts of nodes that the model's program does not have.

    Args:
      settings: must hold the batch inputs of ``program``, whose rows per rank may differ from the model's.
      fixed: strategies of nodes that the model's program does not have, by name.

    Raises:
      PlanError: the copied plan is not legal for ``program``.
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
    """Plans the part of an expanded program that one stage group runs, with the layouts of ``model``, the plan of the
    whole program.

    Args:
      part: the stage group's program, in which tensors of other stages are stage inputs and outputs.
      ends: strategies of the stage inputs and outputs, by node name.
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
    """Creates a draft from layouts copied from the plan ``model``, and adds the reshards they need.

    All-reduces are fused into the same groups as in ``model``, by their keys.

    Args:
      program: the program to plan, nearly equal to that of ``model``, expanded.
      layouts: of the program (key "") and of its functions.
    """
    draft = PlanDraft(program, frozenset(model.expanded), settings.batch.inputs or (), model.variables, layouts)
    # Not dumped or logged: each rank of a mesh derives such plans from the same model.
    draft = run_passes(PLAN, draft, PlanContext(settings), PassObserver(), EXCHANGES)
    # Groups are copied, not chosen again: this program has fewer dependences than the model's (partial sums of the
    # other axis begin with zeros), and a group chosen by them could wait for itself by way of the other axis.
    # A tensor that is partial there and sharded here is exchanged by itself.
    together = {(r.key, type(r.source)): r.group for r in model.reshards}
    reshards = tuple(replace(r, group=together.get((r.key, type(r.source)), -1)) for r in draft.reshards)
    return replace(draft, reshards=reshards)


def _sizes(b: BatchInput) -> tuple[int, ...]:
    return b.placement.sizes if isinstance(b.placement, Shard) else ()


def _draft_changes(before: PlanDraft, after: PlanDraft) -> str:
    """Describes how many node layouts and reshards a pass has changed in a draft, such as "3 layouts of nodes, 1
    reshards".
    """
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
      program: the normalised program before its composite ops were expanded.
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
