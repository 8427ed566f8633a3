"""Chooses layouts for a normalised program: its batch, its composite ops, its split scopes, and split optimizer state.

These choices depend on each other. Which composite ops have to be expanded depends on which tensors the batch divides,
the division of a split scope depends on the placements of tensors that enter it, and a loss is expanded along its
classes only if a scope divides them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from whale.errors import PlanError
from whale.ir.layout import Placement, Shard, Strategy
from whale.ir.plan import BatchInput, Reshard
from whale.ir.program import Program, Ref
from whale.passes.analysis.axes import batch_of
from whale.passes.analysis.batch import batch_inputs
from whale.passes.analysis.rank_groups import map_named_ranks
from whale.passes.analysis.scopes import split_scope
from whale.passes.autoshard.divide import divide
from whale.passes.memory.zero import state_at_rest, update_strategies
from whale.passes.normalize.attention_as_one import choose_for_rings, in_rings
from whale.passes.normalize.decompose import decompose, has_split_form, is_composite
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.partial_sums import reduce_partial_sums
from whale.passes.propagation.propagate import NOTHING, propagate, settle_layouts
from whale.passes.propagation.reference_plan import ReferencePlan
from whale.passes.settings import PlanSettings


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """A plan under construction.

    Attributes:
      program: normalised, with those composite ops expanded that the plan needs as simple ops.
      expanded: the names of these ops.
      batch: the inputs that carry the batch.
      variables: placements of the variables that are split between steps, by handle node.
      layouts: of the program (key "") and of each function body that it calls.
      reshards: the changes of layout, once they are explicit.
    """

    program: Program
    expanded: frozenset[str]
    batch: tuple[BatchInput, ...]
    variables: Mapping[str, Placement]
    layouts: Mapping[str, GraphLayout]
    reshards: tuple[Reshard, ...] = ()

    def graph(self, name: str) -> Program:
        """Returns the program (name ""), or one of its functions."""
        return self.program.functions[name] if name else self.program


class FirstLayouts:
    """The layouts of a program without split scopes, cached for all plans that are made of the program.

    The programs of these plans may differ in their split scopes: along an axis that divides rows, propagation ignores
    all scopes that do not name ranks.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, dict[str, GraphLayout]] = {}

    def find(
        self, expanded: Program, composites: Collection[str], batch: tuple[BatchInput, ...], settings: PlanSettings
    ) -> dict[str, GraphLayout]:
        """Returns the layouts of the program of which ``composites`` were decomposed."""
        if not any(isinstance(b.placement, Shard) for b in batch) or map_named_ranks(expanded):
            return layouts_of(expanded, batch, settings)
        meant = settings.batch.local_statistics, settings.batch.local_streams
        key = frozenset(composites), batch, settings.size, *meant
        if key not in self._found:
            self._found[key] = layouts_of(expanded, batch, settings)
        return self._found[key]


def build_plan_draft(program: Program, settings: PlanSettings, first: FirstLayouts | None = None) -> PlanDraft:
    """Chooses layouts for a normalised program according to the user's settings.

    Args:
      first: cached layouts from other plans of the program, which may have other split scopes.

    Raises:
      PlanError: the batch cannot be split as asked, or nothing under a split scope can be divided.
    """
    batch = _batch(program, settings) if settings.batch.inputs is None else settings.batch.inputs
    first = first or FirstLayouts()
    composites = _find_divided_norms(program, batch, settings, first)
    if settings.size == 1 or not settings.split.scopes:
        expanded = expand(program, composites, settings)
        return PlanDraft(expanded, composites, batch, {}, first.find(expanded, composites, batch, settings))
    composites |= frozenset(choose_for_rings(program, settings.size, settings.memory.limit_bytes))
    round_ = in_rings(program, composites)
    losses = frozenset(n.name for n in round_.nodes if split_scope(n.scope) and has_split_form(round_, n))
    tables = settings.split.tables and settings.time.micro_batches == 1  # micro-batches are an axis as well
    at_rest, division = not settings.split.state_only, None
    while True:
        expanded = expand(program, composites | losses, settings)
        layouts = first.find(expanded, composites | losses, batch, settings)
        division = divide(expanded, layouts[""], settings.size, settings.split.known, at_rest, tables, division)
        whole = frozenset(name for name in losses if not _classes_split(expanded, name, division.strategies))
        if not whole:
            break
        losses -= whole
        division = replace(division, strategies={n: s for n, s in division.strategies.items() if n not in whole})
    strategies, variables = dict(division.strategies), dict(division.variables)
    outside: dict[str, Placement] = {}  # variables that lie split for the optimizer's sake
    if settings.zero.level:
        inside = {
            v.node for v in expanded.variables
            if any(n.name in strategies for n, _ in expanded.consumers.get(Ref(v.node), ()))
        }  # fmt: skip
        state = _state(expanded, settings, inside)
        strategies.update((name, Strategy((), (p,), "memory.zero: state is sharded")) for name, p in state.items())
        variables.update(state)
        outside = {name: p for name, p in variables.items() if name not in inside}
    if outside:
        alike = reduce_partial_sums(expanded, layouts[""], settings.size)
        strategies.update(update_strategies(expanded, alike, outside, settings.size))
    if strategies:
        layouts = layouts_of(expanded, batch, settings, strategies, outside)
    return PlanDraft(expanded, composites | losses, batch, variables, layouts)


def layouts_of(
    program: Program,
    batch: Sequence[BatchInput],
    settings: PlanSettings,
    fixed: Mapping[str, Strategy] = NOTHING,
    gathered: Collection[str] = (),
    model: ReferencePlan | None = None,
) -> dict[str, GraphLayout]:
    """Returns the layouts of an expanded program (key "") and its functions; the last three arguments as in
    ``propagate``.
    """
    divided = {b.name: b.placement for b in batch} if settings.size > 1 else {}
    local = frozenset(b.name for b in batch if b.local)
    statistics, streams = settings.batch.local_statistics, settings.batch.local_streams
    return settle_layouts(program, settings.size, divided, statistics, streams, local, fixed, gathered, model)


def expand(program: Program, composites: Collection[str], settings: PlanSettings) -> Program:
    """Replaces the named composite ops of ``program`` by simple ones, and the chosen attentions by one op each."""
    if not composites:
        return program
    rings = in_rings(program, composites, settings.memory.scores_bytes)
    return decompose(rings, lambda node: node.name in composites)


def _batch(program: Program, settings: PlanSettings) -> tuple[BatchInput, ...]:
    """Returns the batch inputs as configured; none if no node could be divided, whatever the sizes of the inputs.

    A call that loads a variable, or starts an iterator over its arguments, has inputs but no batch.
    """
    try:
        return batch_of(program, settings)
    except PlanError:
        if settings.batch.local:
            raise
        anyway = {b.name: b.placement for b in batch_inputs(program, settings.size)}
        layouts = propagate(program, settings.size, anyway)
        if any(isinstance(p, Shard) for g in layouts.values() for s in g.strategies.values() for p in s.outputs):
            raise
        return ()


def _find_divided_norms(
    program: Program, batch: tuple[BatchInput, ...], settings: PlanSettings, first: FirstLayouts
) -> frozenset[str]:
    """Returns the batch normalisations over a divided batch that need statistics of the whole batch."""
    if settings.size == 1 or settings.batch.local_statistics or not any(is_composite(n) for n in program.nodes):
        return frozenset()
    layout = first.find(program, (), batch, settings)[""]
    divided = {
        n.name for n in program.nodes if is_composite(n) and any(isinstance(layout.place(r), Shard) for r in n.inputs)
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


def _classes_split(program: Program, loss: str, strategies: Mapping[str, Strategy]) -> bool:
    """Tells whether an expanded softmax, its loss, or an arg max has its classes split."""
    strategy = strategies.get(f"{loss}/whale_max")
    axes = program.const(program.by_name[f"{loss}/whale_max"].inputs[1])
    cut = strategy.inputs[0] if strategy is not None else None
    return isinstance(cut, Shard) and axes is not None and cut.dim in axes


def _state(program: Program, settings: PlanSettings, inside: Collection[str]) -> dict[str, Shard]:
    """Returns the placements of optimizer state outside of split scopes that is to be split, by handle node."""
    zero, known, weights = settings.zero, settings.split.known, settings.zero.level >= 3
    return state_at_rest(program, settings.size, zero.min_bytes, inside, known, weights, zero.avoid)
