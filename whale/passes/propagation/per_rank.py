"""Lets propagation handle values that differ between ranks on purpose: statistics of each rank's rows, and random
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whale.ir.layout import B, Partial, PerRank, Placement, Shard, Strategy, shard
from whale.ir.program import Node, Program, Ref
from whale.ir.values import FLOATING
from whale.passes.analysis.rank_groups import RankGroups
from whale.passes.propagation.local_statistics import LocalStatistics
from whale.sharding_rules import find_rule
from whale.sharding_rules.base import OpView, adapt_to_per_rank, replace_per_rank
from whale.sharding_rules.graph import make_op_view
from whale.sharding_rules.nn.norm import make_per_rank_moments
from whale.sharding_rules.registry import LineRule


@dataclass(frozen=True)
class Semantics:
    """The intended differences between a run and one device.

    Attributes:
      statistics: batch statistics of each rank's rows; None: of the whole batch.
      streams: random tensors that have the batch's rows are drawn by each rank from its own stream.
    """

    statistics: LocalStatistics | None = None
    streams: bool = False


AS_ONE_DEVICE = Semantics()


@dataclass
class PerRankRows:
    """Handles per-rank values in the propagation of one graph.

    Attributes:
      rows: size of the batch -> how it is divided; groups: and under scopes that name ranks.
      lies: per-rank mean -> the placement of the rows it is computed from.
    """

    program: Program
    parts: int
    semantics: Semantics
    rows: Mapping[int, Shard]
    groups: RankGroups
    lies: dict[Ref, Shard] = field(default_factory=dict)

    def options(self, rule: LineRule, op: OpView, current: Sequence[Placement]) -> list[Strategy]:
        """Returns the strategies that the rule allows, also for operands with per-rank values."""
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
        """Tells whether each rank may draw its own rows of this node's random result."""
        rule = find_rule(node.op) if self.semantics.streams else None
        return rule is not None and rule.local_stream != ""

    def find_kept(self, node: Node, strategy: Strategy) -> dict[Ref, Placement]:
        """Returns the placement in which readers see a mean over rows that remains per rank."""
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
        """Returns the strategy of a random tensor with the batch's rows if each rank draws its own."""
        for dim, size in enumerate(op.outputs[0].shape or ()):
            rows = self.rows.get(size or 0)
            if rows is None:
                continue
            wanted = self.groups.place(op.node.scope, shard(dim, rows.sizes, rows.blocks))
            for option in rule.strategies(op, current, (wanted,)):
                if option.outputs == (wanted,):
                    return option
        return None
