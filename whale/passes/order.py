"""The list of passes: program -> normalised program -> plan. Pure functions; ``WHALE_DUMP`` writes their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cost_model.ops import executions
from whale.errors import PlanError
from whale.ir.collector import no_garbage_collection
from whale.ir.fingerprint import fingerprint
from whale.ir.layout import PerRank, Placement, Split, Strategy
from whale.ir.plan import BatchInput, Plan
from whale.ir.program import Program, Ref
from whale.passes.exchange.device_sums import DEVICE_BACKENDS, give_to_device
from whale.passes.exchange.fuse_all_reduces import group
from whale.passes.exchange.horovod import give_to_horovod, refuse_horovod
from whale.passes.exchange.reshards import explicit_reshards
from whale.passes.exchange.wire_dtype import narrow
from whale.passes.facts.batch import batch_inputs
from whale.passes.facts.cost import matmul_flops
from whale.passes.facts.scopes import split_scope
from whale.passes.judge.check import check
from whale.passes.judge.hidden_updates import refuse_hidden_updates
from whale.passes.layout.graph_layout import GraphLayout
from whale.passes.layout.in_place import make_in_place
from whale.passes.layout.local_statistics import half_own, own_statistics
from whale.passes.layout.partial_sums import place_reductions
from whale.passes.layout.per_rank import Semantics
from whale.passes.layout.propagate import propagate
from whale.passes.layout.split import divide
from whale.passes.memory.gather_at_use import separate_uses
from whale.passes.memory.hoist import hoist_reads
from whale.passes.memory.recompute import recompute
from whale.passes.memory.zero import state_at_rest, update_strategies
from whale.passes.normalise.annotate import annotate, task_graphs
from whale.passes.normalise.decompose import decompose, has_split_form, is_composite
from whale.passes.normalise.folding.fold import fold
from whale.passes.normalise.inline import inline
from whale.passes.normalise.loss_scaling import skip_overflow
from whale.passes.normalise.mixed_precision import mixed_precision
from whale.passes.normalise.reads import merge_reads
from whale.passes.normalise.specialise import specialise
from whale.passes.normalise.unpack import unpack
from whale.passes.settings import PlanSettings
from whale.rules import rule_of

NORMALISE: tuple[Callable[[Program], Program], ...] = (inline, fold, specialise, unpack, annotate)


def normalise(program: Program, settings: PlanSettings) -> Program:
    """Functions inlined, shape chains folded, dead nodes dropped, task graphs completed.

    Raises:
      ProgramError: the program averages its gradients through Horovod itself.
    """
    with no_garbage_collection():
        _dump(settings, "captured", program)
        refuse_horovod(program)
        for step in NORMALISE:
            if step is annotate and settings.precision.matmul_dtype == "float16":
                program = skip_overflow(program)
                _dump(settings, "skip_overflow", program)
            program = step(program)
            _dump(settings, step.__name__, program)
        if settings.memory.recompute:
            program = recompute(program, settings.memory.recompute)
            _dump(settings, "recompute", program)
        if settings.zero.level:
            program = merge_reads(program)
            _dump(settings, "merge_reads", program)
        if settings.zero.level >= 3 or settings.memory.offload == "v0":
            program = hoist_reads(program, settings.zero.min_bytes)
            _dump(settings, "hoist_reads", program)
            program = separate_uses(program, settings.zero.min_bytes, settings.zero.ahead)
            _dump(settings, "separate_uses", program)
        if settings.precision.matmul_dtype:
            program = mixed_precision(program, settings.precision.matmul_dtype)
            _dump(settings, "mixed_precision", program)
    return program


def make_plan(program: Program, settings: PlanSettings) -> Plan:
    """The plan of a normalised program (see ``expand`` for the program that the plan speaks of).

    Raises:
      PlanError: the batch cannot be split as asked, or no legal plan exists.
    """
    with no_garbage_collection():
        batch = _batch(program, settings) if settings.batch.inputs is None else settings.batch.inputs
        composites = _of_divided_batches(program, batch, settings)
        expanded, composites, layouts, variables = _lay_out(program, batch, composites, settings)
        layouts = {
            g: place_reductions(expanded if g == "" else expanded.functions[g], layout, settings.size)
            for g, layout in layouts.items()
        }
        layouts = {
            g: make_in_place(expanded if g == "" else expanded.functions[g], layout, settings.size)
            for g, layout in layouts.items()
        }
        return _finished(program, expanded, layouts, batch, variables, composites, settings, None)


def complete_plan(program: Program, settings: PlanSettings, model: Plan) -> Plan:
    """The plan of a program that is ``model``'s but for what belongs to the coordinate of another mesh axis.

    Nodes that both programs have lie as in ``model``; the rest follows by propagation.

    Raises:
      PlanError: no such plan is legal.
    """
    with no_garbage_collection():
        composites = frozenset(model.expanded)
        expanded = expand(program, composites, settings)
        given = model.strategies[""]
        fixed = {n.name: given[n.name] for n in expanded.nodes if n.name in given}
        fixed = {name: fixed[name] for name in fixed if len(fixed[name].inputs) == len(expanded.by_name[name].inputs)}
        layouts = _layouts(expanded, model.batch_inputs, settings, fixed)
        # Less depends on less here, where a partial sum begins with zeros; but what travels together must not wait, by
        # way of the other axis, for what the model has behind it.
        together = {r.key: r.group for r in model.reshards}
        plan = _finished(
            expanded, expanded, layouts, model.batch_inputs, model.variables, composites, settings, together
        )
        return replace(plan, fingerprint=model.fingerprint, expanded=model.expanded)


def _finished(
    program: Program,
    expanded: Program,
    layouts: dict[str, GraphLayout],
    batch: tuple[BatchInput, ...],
    variables: Mapping[str, Placement],
    composites: Collection[str],
    settings: PlanSettings,
    together: Mapping[str, int] | None,
) -> Plan:
    """The checked plan with these layouts, its changes of layout made explicit.

    Args:
      together: key of a reshard -> number of the group that it travels with; None: to be found.
    """
    reshards = explicit_reshards(expanded, layouts, settings.size)
    if settings.exchange.backend == "horovod":
        reshards = give_to_horovod(expanded, layouts[""], reshards)
    elif settings.exchange.backend in DEVICE_BACKENDS:
        reshards = give_to_device(expanded, reshards)
    if settings.exchange.wire_dtype:
        reshards = narrow(expanded, layouts[""], reshards, settings.exchange.wire_dtype, settings.size)
    if together is None:
        # What has the rows of a batch travels for each micro-batch, counts before the first one, gradients after the
        # last one: not together.
        apart = (
            {b.placement.extent for b in batch if isinstance(b.placement, Split)}
            if settings.time.micro_batches > 1
            else ()
        )
        reshards = group(expanded, layouts, reshards, settings.exchange.group_bytes, apart)
    else:
        reshards = tuple(replace(r, group=together.get(r.key, -1)) for r in reshards)
    divided, total = _flops(expanded, layouts)
    plan = Plan(
        program=program.name,
        fingerprint=fingerprint(program),
        size=settings.size,
        devices=settings.devices or tuple(f"rank {i}" for i in range(settings.size)),
        task_graphs=task_graphs(expanded, tuple(range(settings.size))),
        batch_inputs=batch,
        strategies={g: layout.strategies for g, layout in layouts.items()},
        returned={g: layout.outputs for g, layout in layouts.items()},
        reshards=reshards,
        variables=variables,
        expanded=tuple(n.name for n in program.nodes if n.name in composites),
        unruled=_unruled(expanded, layouts, reshards),
        exceptions=_exceptions(expanded, layouts[""]) if settings.size > 1 else (),
        split_flops=divided,
        total_flops=total,
        micro_batches=settings.time.micro_batches if batch else 1,
    )
    check(expanded, plan)
    refuse_hidden_updates(expanded, plan)
    _dump(settings, "plan", expanded, plan)
    return plan


def _batch(program: Program, settings: PlanSettings) -> tuple[BatchInput, ...]:
    """The batch inputs as the user asks; none where nothing would be divided, whatever the sizes of the inputs.

    A run that loads a variable, or starts an iterator over what it is fed, has inputs but no batch.
    """
    try:
        return batch_inputs(program, settings.size, settings.batch.shares, settings.batch.marked, settings.batch.local)
    except PlanError:
        if settings.batch.local:
            raise
        anyway = {b.name: b.placement for b in batch_inputs(program, settings.size)}
        layouts = propagate(program, settings.size, anyway)
        if any(isinstance(p, Split) for g in layouts.values() for s in g.strategies.values() for p in s.outputs):
            raise
        return ()


def expand(program: Program, composites: Collection[str], settings: PlanSettings) -> Program:
    """``program`` with the named composite ops replaced by simple ones; the rest stays fused."""
    if not composites:
        return program
    result = decompose(program, lambda node: node.name in composites)
    _dump(settings, "decompose", result)
    return result


def _lay_out(
    program: Program, batch: Sequence, composites: frozenset[str], settings: PlanSettings
) -> tuple[Program, frozenset[str], dict[str, GraphLayout], Mapping[str, Placement]]:
    """The expanded program, its composite nodes that were expanded, the layouts, and the variables that lie split."""
    if settings.size == 1 or not settings.split.scopes:
        expanded = expand(program, composites, settings)
        return expanded, composites, _layouts(expanded, batch, settings, {}), {}
    losses = frozenset(n.name for n in program.nodes if split_scope(n.scope) and has_split_form(program, n))
    while True:
        expanded = expand(program, composites | losses, settings)
        layouts = _layouts(expanded, batch, settings, {})
        at_rest = settings.split.at_rest and not settings.split.state_only
        division = divide(expanded, layouts[""], settings.size, settings.split.known, at_rest)
        whole = frozenset(name for name in losses if not _classes_split(expanded, name, division.strategies))
        if not whole:
            break
        losses -= whole
    strategies, variables = dict(division.strategies), dict(division.variables)
    outside: dict[str, Placement] = {}  # variables that lie split for the optimizer's sake
    if settings.zero.level:
        inside = {
            v.node for v in expanded.variables
            if any(n.name in strategies for n, _ in expanded.consumers.get(Ref(v.node), ()))
        }  # fmt: skip
        state = _state(expanded, settings, inside)
        strategies.update((name, Strategy((), (p,), "zero.level: state lies split")) for name, p in state.items())
        variables.update(state)
        outside = {name: p for name, p in variables.items() if name not in inside}
    if outside:
        alike = place_reductions(expanded, layouts[""], settings.size)
        strategies.update(update_strategies(expanded, alike, outside, settings.size))
    if strategies:
        layouts = _layouts(expanded, batch, settings, strategies, outside)
    return expanded, composites | losses, layouts, variables


def _state(program: Program, settings: PlanSettings, inside: Collection[str]) -> dict[str, Split]:
    """The optimizers' state that comes to lie split, outside of split scopes.

    Raises:
      PlanError: the run cannot hold variables that lie split.
    """
    state = state_at_rest(
        program, settings.size, settings.zero.min_bytes, inside, settings.split.known, settings.zero.level >= 3
    )
    if state and not settings.split.at_rest:
        raise PlanError(
            "variables cannot lie split in a session with stages, or whose plan auto_parallel chooses",
            given=f"zero.level={settings.zero.level}",
            expected="zero.level=0, a session without these, or a step that is a wh.function",
            action="leave zero.level out, or write the step as a wh.function",
        )
    return state


def _classes_split(program: Program, loss: str, strategies: Mapping[str, Strategy]) -> bool:
    """Whether the classes of an expanded softmax, or of the search for an extremum, are split."""
    strategy = strategies.get(f"{loss}/whale_max")
    axes = program.const(program.by_name[f"{loss}/whale_max"].inputs[1])
    cut = strategy.inputs[0] if strategy is not None else None
    return isinstance(cut, Split) and axes is not None and cut.dim in axes


def _of_divided_batches(program: Program, batch: Sequence, settings: PlanSettings) -> frozenset[str]:
    """The batch normalisations of divided batches that need the statistics of the whole batch."""
    if settings.size == 1 or settings.batch.local_statistics or not any(is_composite(n) for n in program.nodes):
        return frozenset()
    layout = _layouts(program, batch, settings, {})[""]
    divided = {
        n.name for n in program.nodes if is_composite(n) and any(isinstance(layout.place(r), Split) for r in n.inputs)
    }
    # Forward and gradient go together: the gradient reads what the decomposed forward saved.
    while True:
        more = {
            n.name
            for n in program.nodes
            if is_composite(n) and n.name not in divided
            and any(r.node in divided or _reads(program, d, n.name) for r in n.inputs for d in divided)
        }  # fmt: skip
        if not more:
            return frozenset(divided)
        divided |= more


def _reads(program: Program, reader: str, producer: str) -> bool:
    return any(r.node == producer for r in program.by_name[reader].inputs)


def _layouts(
    program: Program,
    batch: Sequence,
    settings: PlanSettings,
    fixed: Mapping[str, Strategy],
    gathered: Collection[str] = frozenset(),
) -> dict[str, GraphLayout]:
    divided = {b.name: b.placement for b in batch} if settings.size > 1 else {}
    local = frozenset(b.name for b in batch if b.local)
    whole: set[Ref] = set()
    while True:
        statistics = own_statistics(program, whole) if settings.batch.local_statistics and divided else None
        semantics = Semantics(statistics, settings.batch.local_streams)
        layouts = propagate(program, settings.size, divided, semantics, local, fixed, gathered)
        mixed = half_own(program, layouts[""], statistics) if statistics is not None else set()
        if not mixed:
            return layouts
        whole |= mixed


def _exceptions(program: Program, layout: GraphLayout) -> tuple[str, ...]:
    """What the run computes otherwise than one device, in words."""
    statistics = [
        n for n in program.nodes if is_composite(n) and any(type(layout.produced[r]) is PerRank for r in n.refs())
    ]
    means = [r for r, p in layout.preferred.items() if type(p) is PerRank]
    drawn = [
        n
        for n in program.nodes
        if (rule := rule_of(n.op)) is not None
        and rule.own_stream
        and any(type(p) is Split for p in layout.strategies[n.name].outputs)
    ]
    fused = sum("Grad" not in n.op for n in statistics)
    found = []
    if means or fused:
        found.append(
            f"batch statistics of each rank's own rows in {fused + len(means) // 2} normalisations"
            " (sync_batch_norm=true: of the whole batch)"
        )
    if drawn:
        found.append(f"{len(drawn)} random tensors drawn by each rank for its own rows (random=global: as one device)")
    return tuple(found)


def _flops(program: Program, layouts: dict[str, GraphLayout]) -> tuple[int, int]:
    """(divided, all) FLOPs of matrix products and convolutions; a loop whose turns are not known counts as one turn."""
    divided = total = 0
    often = executions(program)
    for graph, layout in layouts.items():
        body = program if graph == "" else program.functions[graph]
        for node in body.nodes:
            flops = matmul_flops(node, [body.type_of(r) for r in node.inputs]) * (often[graph] if graph else 1)
            strategy = layout.strategies[node.name]
            total += flops
            if any(isinstance(p, Split) for p in strategy.inputs + strategy.outputs):
                divided += flops
    return divided, total


def _unruled(program: Program, layouts: dict[str, GraphLayout], reshards: Sequence) -> dict[str, int]:
    """Nodes whose op has no rule -> logical bytes moved to bring their operands together."""
    result: dict[str, int] = {}
    for graph, layout in layouts.items():
        body = program if graph == "" else program.functions[graph]
        moved = {r.ref: r.bytes for r in reshards if r.graph == graph}
        for name in layout.unruled:
            node = body.by_name[name]
            result[f"{graph}/{name} ({node.op})".lstrip("/")] = sum(moved.get(r, 0) for r in node.inputs)
    return result


def _dump(settings: PlanSettings, name: str, program: Program, plan: Plan | None = None) -> None:
    if not settings.dump:
        return
    from whale.ir.plan_text import format_plan
    from whale.ir.text import format_program

    folder = Path(settings.dump) / "".join(c if c.isalnum() or c in "._-" else "_" for c in program.name or "program")
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.txt")))
    text = format_program(replace(program)) if plan is None else format_plan(plan)
    (folder / f"{number:02d}-{name}.txt").write_text(text)
