"""Builds the first draft of a plan: finds the batch, expands composite ops, divides split scopes, shards optimizer
state.

``build_plan_draft`` makes these choices together, because they depend on each other. Which composite ops have to be
expanded depends on which tensors the batch shards; how a split scope is divided depends on the placements of tensors
that enter it; a loss is expanded along its classes only if a scope shards them.
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
    """Holds a plan under construction: the value that the PLAN passes hand on to each other.

    Attributes:
      program: normalised, with those composite ops expanded that the plan needs as simple ops.
      expanded: names of the composite ops that were expanded.
      batch: the inputs that carry the batch, with their rows per rank.
      variables: placements of the variables that are sharded between steps, by handle node.
      layouts: of the program (key "") and of each function body that it calls.
      reshards: the changes of layout; () until the pass ``explicit_reshards`` has run.
    """

    program: Program
    expanded: frozenset[str]
    batch: tuple[BatchInput, ...]
    variables: Mapping[str, Placement]
    layouts: Mapping[str, GraphLayout]
    reshards: tuple[Reshard, ...] = ()

    def graph(self, name: str) -> Program:
        """Returns the body of the function ``name``, or the program itself for ""."""
        return self.program.functions[name] if name else self.program


class FirstLayouts:
    """Caches the layouts that a program has by its batch alone, so that several plans of the program share one
    propagation.

    The plans may have different split scopes: along a mesh axis that shards rows, propagation ignores all scopes except
    those that name ranks (such programs are not cached).
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, dict[str, GraphLayout]] = {}

    def find(
        self, expanded: Program, composites: Collection[str], batch: tuple[BatchInput, ...], settings: PlanSettings
    ) -> dict[str, GraphLayout]:
        """Returns the layouts of ``expanded``, by graph name, from the cache if they are there.

        Args:
          expanded: the program, with the ops named in ``composites`` decomposed.
          composites: part of the cache key, with the batch, the number of ranks and the meaning of batch statistics.
        """
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
      first: cache of layouts, shared by plans of the program that may differ in their split scopes; None: no cache.

    Returns:
      A draft with layouts but without reshards, which later passes add.

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
    tables = settings.split.tables and settings.time.micro_batches == 1  # micro-batches are planned as one more axis
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
    outside: dict[str, Placement] = {}  # variables that only ZeRO shards
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
    """Returns the layouts of an expanded program (key "") and of its functions, from the batch inputs and fixed
    strategies.

    Args:
      batch: the inputs whose rows are sharded.
      fixed, gathered, model: as in ``propagate``.
    """
    divided = {b.name: b.placement for b in batch} if settings.size > 1 else {}
    local = frozenset(b.name for b in batch if b.local)
    statistics, streams = settings.batch.local_statistics, settings.batch.local_streams
    return settle_layouts(program, settings.size, divided, statistics, streams, local, fixed, gathered, model)


def expand(program: Program, composites: Collection[str], settings: PlanSettings) -> Program:
    """Replaces the composite ops named in ``composites`` by simple ops, and each attention whose ops are named by one
    ring-attention op.
    """
    if not composites:
        return program
    rings = in_rings(program, composites, settings.memory.scores_bytes)
    return decompose(rings, lambda node: node.name in composites)


def _batch(program: Program, settings: PlanSettings) -> tuple[BatchInput, ...]:
    """Finds the batch inputs according to the settings.

    Returns () if they cannot be found but no node could be sharded along any input anyway: a call that only loads a
    variable, or starts an iterator over its arguments, has inputs but no batch.
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
    """Returns the names of the batch normalisations, forward and gradient, that are to be expanded: they read a sharded
    batch and need the statistics of all of it.

    Args:
      first: cache of layouts, from which it is seen what the batch shards.
    """
    if settings.size == 1 or settings.batch.local_statistics or not any(is_composite(n) for n in program.nodes):
        return frozenset()
    layout = first.find(program, (), batch, settings)[""]
    divided = {
        n.name for n in program.nodes if is_composite(n) and any(isinstance(layout.place(r), Shard) for r in n.inputs)
    }
    # Forward and gradient are expanded together: the gradient reads what the expanded forward op saved.
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
    """Returns True if the expanded softmax, loss or arg max named ``loss`` has its class dimension sharded by
    ``strategies``.
    """
    strategy = strategies.get(f"{loss}/whale_max")
    axes = program.const(program.by_name[f"{loss}/whale_max"].inputs[1])
    cut = strategy.inputs[0] if strategy is not None else None
    return isinstance(cut, Shard) and axes is not None and cut.dim in axes


def _state(program: Program, settings: PlanSettings, inside: Collection[str]) -> dict[str, Shard]:
    """Returns the placements of variables outside of split scopes that ZeRO shards between steps, by handle node.

    Args:
      inside: handle nodes of the variables that split scopes shard.
    """
    zero, known, weights = settings.zero, settings.split.known, settings.zero.level >= 3
    return state_at_rest(program, settings.size, zero.min_bytes, inside, known, weights, zero.avoid)
