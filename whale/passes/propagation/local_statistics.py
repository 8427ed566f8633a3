"""Handles values that differ between ranks on purpose: batch statistics of each rank's rows, and random rows.

Batch normalisation divides by the moments of the batch. Moments of each rank's own rows need no communication, forward
or backward. That is the usual meaning of data-parallel training, and it differs from one device. Moments are recognised
in the graph by what nodes compute, not by names:

* a *mean* over dimensions of rows, and the *variance*: the mean, over the same dimensions, of the squared difference
  between the same rows and that mean;
* tensors without rows computed from these two (reciprocal deviation, running averages, gradients), and the nodes that
  *spread* them over the rows again (a Tile or BroadcastTo): the gradients of the two means.

Each of these is a sum over the ranks of contributions of their rows. A rank's own mean is its contribution times (all
rows / own rows), and so is the gradient that its own mean receives, where the program divides by all rows. So one
placement (``whale.ir.layout.PerRank``) and one factor serve both directions; nothing else in the program changes. Fused
kernels (FusedBatchNorm) take local statistics by their own rule.

Decision: 0018.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from whale.ir.layout import B, Partial, PerRank, Placement, Shard, Strategy, shard
from whale.ir.ops import HAS_BODIES, IDENTITIES
from whale.ir.program import Node, Program, Ref
from whale.ir.values import FLOATING, UNMOVABLE
from whale.passes.analysis.rank_groups import RankGroups
from whale.passes.propagation.graph_layout import GraphLayout
from whale.sharding_rules import find_rule
from whale.sharding_rules.base import OpView, adapt_to_per_rank, replace_per_rank
from whale.sharding_rules.graph import make_op_view
from whale.sharding_rules.nn.norm import make_per_rank_moments
from whale.sharding_rules.registry import LineRule

_PASSED_ON = IDENTITIES | {"Cast"}  # a mean cast to another dtype is still the mean
_SPREADS = frozenset({"Tile", "BroadcastTo"})
_SUMS = frozenset({"AddN", "Add", "AddV2", "Sub"})
_MULTIPLES = frozenset({"RealDiv", "Mul", "Neg", "Reshape", *_PASSED_ON})


@dataclass(frozen=True)
class Moments:
    """Represents the mean and variance of one set of rows, with the nodes that use them.

    Attributes:
      mean: the mean over the rows.
      variance: the variance over the rows.
      made: tensors without rows computed from them.
      spreads: names of the nodes that broadcast such tensors over the rows again, in the gradient.
    """

    mean: Ref
    variance: Ref
    made: frozenset[Ref]
    spreads: frozenset[str]


@dataclass
class LocalStatistics:
    """Indexes the moments of a program by tensor and by node, for propagation.

    Attributes:
      statistic: mean or variance -> its moments.
      spread: name of a node that broadcasts over rows -> its moments.
    """

    statistic: dict[Ref, Moments] = field(default_factory=dict)
    spread: dict[str, Moments] = field(default_factory=dict)


def find_local_statistics(program: Program, without: Collection[Ref] = ()) -> LocalStatistics:
    """Finds the batch moments of ``program`` that can be taken of each rank's rows, except those whose mean is in
    ``without``.

    Only the main graph is searched: moments inside loops and branches are always those of the whole batch. So are
    moments whose gradient does not have the form that TensorFlow derives.
    """
    pairs = {mean: Ref(node.name) for node in program.nodes if (mean := _mean_of(program, node)) is not None}
    known = {*pairs, *pairs.values()}
    result = LocalStatistics()
    for mean, variance in pairs.items():
        if mean in without:
            continue
        made, spreads, _ = _readers(program, (mean, variance))
        beside = _gradient_of_mean(program, spreads, mean) if spreads else frozenset()
        if beside is None or (not spreads and _has_other_gradient(program, mean, known)):
            continue
        moments = Moments(mean, variance, made, spreads | beside)
        result.statistic[mean] = result.statistic[variance] = moments
        for name in moments.spreads:
            result.spread.setdefault(name, moments)
    return result


def _mean_of(program: Program, node: Node) -> Ref | None:
    """Returns the mean that ``node`` subtracts from the rows if ``node`` is their variance; else None."""
    axes = _axes(program, node)
    if axes is None or 0 not in axes:
        return None
    square = program.by_name[_source(program, node.inputs[0]).node]
    if square.op == "Square":
        square = program.by_name[square.inputs[0].node]
        if square.op != "Sub":
            return None
    elif square.op != "SquaredDifference":
        return None
    rows, mean = square.inputs
    first = program.by_name[_source(program, mean).node]
    if _axes(program, first) != axes or _source(program, first.inputs[0]) != _source(program, rows):
        return None
    return Ref(first.name)


def _axes(program: Program, node: Node) -> frozenset[int] | None:
    """Returns the dimensions over which ``node`` takes a floating-point mean; None for other nodes and for means over
    all dimensions.
    """
    if node.op != "Mean" or node.outputs[0].dtype not in FLOATING:
        return None
    shape = program.find_type(node.inputs[0]).shape
    axes = program.const(node.inputs[1])
    if not shape or None in shape or axes is None:
        return None
    found = frozenset(int(a) % len(shape) for a in axes.reshape(-1))
    return found if len(found) < len(shape) else None


def _source(program: Program, ref: Ref) -> Ref:
    """Returns the tensor of which ``ref`` is a copy or a cast, through any number of them."""
    while True:
        node = program.by_name[ref.node]
        if node.op not in _PASSED_ON:
            return ref
        ref = node.inputs[0]


def _readers(program: Program, statistics: tuple[Ref, ...]) -> tuple[frozenset[Ref], frozenset[str], frozenset[str]]:
    """Follows ``statistics`` to what is computed from them.

    Returns:
      The tensors computed from them that are not larger, the names of nodes that broadcast such tensors over the rows,
        and the names of other nodes that compute tensors with rows from them.
    """
    limit = max(program.find_type(r).elements for r in statistics)
    rows = program.find_type(program.by_name[statistics[0].node].inputs[0]).elements
    found: set[str] = set()
    joined: set[str] = set()
    seen, stack = set(statistics), list(statistics)
    while stack:
        for reader, _ in program.consumers.get(stack.pop(), ()):
            if reader.op in _SPREADS and reader.outputs[0].elements == rows:
                found.add(reader.name)
            elif reader.outputs and reader.outputs[0].elements == rows:
                joined.add(reader.name)
            elif not reader.stateful and reader.op not in HAS_BODIES:
                for ref, out in zip(reader.list_refs(), reader.outputs):
                    if ref not in seen and out.dtype not in UNMOVABLE and out.is_static and out.elements <= limit:
                        seen.add(ref)
                        stack.append(ref)
    return frozenset(seen), frozenset(found), frozenset(joined)


def _has_other_gradient(program: Program, mean: Ref, known: Collection[Ref]) -> bool:
    """Returns True if another node sums rows of this shape over the same dimensions and the sum meets rows again:
    probably a gradient written by hand.
    """
    statistic = program.by_name[mean.node]
    rows, axes = program.find_type(statistic.inputs[0]).shape or (), _axes(program, statistic)
    for node in program.nodes:
        if (
            node.op in ("Mean", "Sum")
            and Ref(node.name) not in known
            and program.find_type(node.inputs[0]).shape == rows
        ):
            over = program.const(node.inputs[1])
            if over is not None and frozenset(int(a) % len(rows) for a in over.reshape(-1)) == axes:
                if _readers(program, (Ref(node.name),))[2]:
                    return True
    return False


def _gradient_of_mean(program: Program, spreads: frozenset[str], mean: Ref) -> frozenset[str] | None:
    """Returns the nodes, besides ``spreads``, that broadcast the mean's gradient over the rows.

    The gradient through the mean is added to the gradient through the variance, so the search goes from ``spreads`` to
    the first sum with another broadcast operand. Returns the empty set if ``spreads`` contains all, None if no such sum
    is found.
    """
    rows = program.find_type(program.by_name[mean.node].inputs[0])
    seen, level = set(spreads), list(spreads)
    while level:
        following: list[str] = []
        for name in level:
            for reader, _ in program.consumers.get(Ref(name), ()):
                if reader.name in seen or len(reader.outputs) != 1 or reader.outputs[0].elements != rows.elements:
                    continue
                seen.add(reader.name)
                following.append(reader.name)
                if reader.op in _SUMS:
                    found = [s for r in reader.inputs if (s := _spread_behind(program, r)) and s not in spreads]
                    if found or any(_spread_behind(program, r) for r in reader.inputs):
                        return frozenset(found)
        level = following
    return None


def _spread_behind(program: Program, ref: Ref) -> str | None:
    """Returns the broadcasting node whose result ``ref`` is a multiple of, going back through scalings and reshapes;
    None if there is none.
    """
    while True:
        node = program.by_name[ref.node]
        if node.op in _SPREADS:
            return node.name
        if node.op not in _MULTIPLES or not node.inputs:
            return None
        ref = next((r for r in node.inputs if program.const(r) is None), node.inputs[0])
        if sum(program.const(r) is None for r in node.inputs) != 1:
            return None


def half_local(program: Program, layout: GraphLayout, statistics: LocalStatistics) -> set[Ref]:
    """Returns the means of moments that are per rank in the forward pass, while the backward pass would need those of
    the whole batch.

    That is so if a tensor computed from the moments is reduced over all ranks before sharded rows use it: their
    gradient is written in a form that is not recognised. The caller propagates again with these moments taken of the
    whole batch in both directions.
    """
    moments = {id(m): m for m in statistics.statistic.values() if type(layout.place(m.mean)) is PerRank}
    maker = {ref: m for m in moments.values() for ref in m.made}
    found: set[Ref] = set()
    for node in program.nodes:
        strategy = layout.strategies[node.name]
        if node.stateful or not any(type(p) is Shard for p in strategy.inputs + strategy.outputs):
            continue
        for ref, placement in zip(node.inputs, strategy.inputs):
            if ref in maker and type(placement) not in (PerRank, Partial) and layout.produced[ref] != placement:
                found.add(maker[ref].mean)
    return found


@dataclass(frozen=True)
class Semantics:
    """Says where a run may differ from one device.

    Attributes:
      statistics: the batch moments that are taken of each rank's rows; None: all are of the whole batch.
      streams: random tensors that have the batch's rows are drawn by each rank from its own stream.
    """

    statistics: LocalStatistics | None = None
    streams: bool = False


AS_ONE_DEVICE = Semantics()


@dataclass
class PerRankRows:
    """Handles values that differ between ranks (batch statistics of their own rows, random rows) in the propagation of
    one graph.

    Attributes:
      semantics: which values may differ.
      rows: number of rows of a batch input -> how they are sharded.
      groups: the sharding of rows under scopes that name ranks.
      lies: per-rank mean -> the placement of the rows that it is computed from.
    """

    program: Program
    parts: int
    semantics: Semantics
    rows: Mapping[int, Shard]
    groups: RankGroups
    lies: dict[Ref, Shard] = field(default_factory=dict)

    def options(self, rule: LineRule, op: OpView, current: Sequence[Placement]) -> list[Strategy]:
        """Returns the strategies that the rule allows, adapted where operands are per-rank values or each rank draws
        its own random rows.

        Args:
          current: placements of the operands.
        """
        drawn = self._stream(rule, op, current) if self.semantics.streams and rule.local_stream else None
        if drawn is not None:
            return [drawn]
        if self.semantics.statistics is not None and current:
            moments = make_per_rank_moments(op, current[0])
            if moments is not None:
                return [moments]
        options = rule.strategies(op, [replace_per_rank(p) for p in current])
        if op.node.stateful or not any(type(p) is PerRank for p in current):
            return options
        floating = all(t.dtype in FLOATING for t in op.outputs)
        lifted = [found for o in options if floating and (found := adapt_to_per_rank(o, current)) is not None]
        return lifted + options

    def draws(self, node: Node) -> bool:
        """Returns True if each rank may draw its own rows of this node's random result."""
        rule = find_rule(node.op) if self.semantics.streams else None
        return rule is not None and rule.local_stream != ""

    def find_kept(self, node: Node, strategy: Strategy) -> dict[Ref, Placement]:
        """Returns {mean: its per-rank placement} if ``node`` is a mean or variance that stays per rank instead of being
        reduced; else {}.
        """
        ref = Ref(node.name)
        known = self.semantics.statistics
        moments = known.statistic.get(ref) if known is not None and node.op == "Mean" else None
        if moments is None:
            return {}
        rows = strategy.inputs[0]
        if type(rows) is not Shard or type(strategy.outputs[0]) is not Partial or not any(rows.sizes):
            return {}
        self.lies[moments.mean] = rows
        return {ref: PerRank(rows.sizes)}

    def spread(self, node: Node, produced: Sequence[Placement]) -> Strategy | None:
        """Returns the strategy of a node that broadcasts per-rank statistics over the rank's own rows; None for other
        nodes.

        Args:
          produced: the placements in which the operands leave their producers.
        """
        known = self.semantics.statistics
        moments = known.spread.get(node.name) if known is not None else None
        rows = self.lies.get(moments.mean) if moments is not None else None
        if rows is None or type(produced[0]) not in (Partial, PerRank) or any(p != B for p in produced[1:]):
            return None
        mine: list[Placement] = [PerRank(rows.sizes), *produced[1:]]
        rule = find_rule(node.op)
        assert rule is not None
        for option in rule.strategies(make_op_view(self.program, node, self.parts), [B] * len(mine), (rows,)):
            found = adapt_to_per_rank(option, mine)
            if option.outputs == (rows,) and found is not None:
                return found
        return None

    def _stream(self, rule: LineRule, op: OpView, current: Sequence[Placement]) -> Strategy | None:
        """Returns the strategy by which each rank draws its own rows of a random tensor; None if the tensor does not
        have the batch's rows.
        """
        for dim, size in enumerate(op.outputs[0].shape or ()):
            rows = self.rows.get(size or 0)
            if rows is None:
                continue
            wanted = self.groups.place(op.node.scope, shard(dim, rows.sizes, rows.blocks))
            for option in rule.strategies(op, current, (wanted,)):
                if option.outputs == (wanted,):
                    return option
        return None
