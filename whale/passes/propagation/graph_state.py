"""Holds the state of propagation while it walks through one graph, and its errors about tensors that cannot be sent.

``Axis`` is common to all graphs of a program; each graph has a ``GraphState``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from whale.errors import PlanError
from whale.ir.layout import FIRST, LEGEND, B, Partial, Placement, Replicate, Shard, Strategy, shard
from whale.ir.program import Node, Program, Ref
from whale.ir.values import UNMOVABLE
from whale.passes.analysis.rank_groups import RankGroups
from whale.passes.analysis.resharding_cost import change_cost
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.local_statistics import PerRankRows, Semantics

INFINITE = float("inf")
_MOST_ORIGINS = 4  # placements that are remembered for a replicated tensor: of sharded ones it was computed from


@dataclass(frozen=True, slots=True)
class Axis:
    """Holds what all graphs of a program have in common while they are propagated along one mesh axis.

    Attributes:
      root: the program itself, with its functions.
      parts: size of the mesh axis.
      semantics: where results may differ from one device (batch statistics only in the program itself, not in
        functions).
      rows: number of rows of a batch input -> how they are sharded; tensors with as many rows are sharded alike.
      groups: the sharding of rows under scopes that name ranks.
      whole: (graph, tensor) pairs that must be replicated, because a reader needs all of a tensor that cannot be sent.
      layouts: layouts of function bodies, by name, added as they are propagated.
    """

    root: Program
    parts: int
    semantics: Semantics
    rows: Mapping[int, Shard]
    groups: RankGroups
    whole: Collection[tuple[str, Ref]]
    layouts: dict[str, GraphLayout]


class GraphState:
    """Holds the placements of one graph's tensors that propagation has decided so far.

    Attributes:
      name: name of the function body; "" is the program itself.
      layout: the decisions.
      remakable: tensors that can be created in any placement at no cost, such as an empty TensorList.
      origins: replicated tensors computed from sharded ones -> the placements of the latter.
      per_rank: handles the tensors whose values differ between ranks on purpose.
    """

    def __init__(self, axis: Axis, name: str):
        self.axis, self.name, self.parts = axis, name, axis.parts
        self.program = axis.root.functions[name] if name else axis.root
        mine = replace(axis.semantics, statistics=None) if name else axis.semantics
        self.per_rank = PerRankRows(self.program, axis.parts, mine, axis.rows, axis.groups)
        self.layout = GraphLayout()
        self.remakable: set[Ref] = set()
        self.origins: dict[Ref, tuple[Shard, ...]] = {}

    def find_operands(self, node: Node) -> list[Placement]:
        """Returns the placements in which a node finds its operands; under a scope that names ranks, rows are on these
        ranks.
        """
        if not node.inputs:
            return []
        layout = self.layout
        found = [layout.preferred.get(r) or layout.produced[r] for r in node.inputs]
        if self.axis.groups.active:
            found = [self.axis.groups.place(node.scope, p) for p in found]
        return found

    def is_whole(self, ref: Ref) -> bool:
        """Returns True if the tensor must be replicated (see ``Axis.whole``)."""
        return (self.name, ref) in self.axis.whole

    def reshard_cost(self, ref: Ref, wanted: Placement) -> float:
        """Returns the cost of resharding ``ref`` to ``wanted``: 0 if readers find it there, infinite if it cannot be
        resharded.
        """
        source = self.layout.produced[ref]
        if source == wanted or self.layout.preferred.get(ref) == wanted:
            return 0.0
        tensor = self.program.find_type(ref)
        if tensor.dtype in UNMOVABLE:
            free = ref in self.remakable or (source == B and wanted == FIRST)
            return 0.0 if free else INFINITE
        return change_cost(tensor, source, wanted, self.parts)

    def need(self, ref: Ref, wanted: Placement, reader: Node, also: Sequence[tuple[str, Ref]] = ()) -> None:
        """Raises NeededWhole if ``reader`` needs ``ref`` as ``wanted``, but ``ref`` has another placement and can
        neither be sent nor created anew.

        Args:
          also: more (graph, tensor) pairs to replicate in that case, such as the variable of a loop that ``ref``
            becomes.
        """
        source, t = self.layout.produced[ref], self.program.find_type(ref)
        if source in (wanted, FIRST) or t.dtype not in UNMOVABLE or ref in self.remakable:
            return
        raise NeededWhole(
            {(self.name, ref), *also}, reader, f"the operation reads {ref} ({t}), which lies in the placement {source}"
        )

    def on_first_rank(self, node: Node, why: str) -> Strategy:
        """Returns the strategy of a node that runs on the first rank only.

        Its operands are broadcast to all ranks: the others do not need them, but all ranks take part in collectives.

        Args:
          why: the reason, for ``whale explain``.

        Raises:
          NeededWhole: an operand cannot be sent.
        """
        for ref in node.inputs:
            if self.layout.produced[ref] != FIRST:
                self.need(ref, B, node)
        inputs = tuple(FIRST if self.layout.produced[r] == FIRST else B for r in node.inputs)
        return Strategy(inputs, (FIRST,) * len(node.outputs), why, once=True)

    def track_batch(self, node: Node, chosen: Strategy, current: Sequence[Placement]) -> None:
        """Makes readers find results sharded by the batch's rows again, after an op that had to read all rows.

        If a replicated result has a dimension as large as the sharded one that it was computed from, readers find it
        sliced along that dimension. A slice costs nothing and is correct whatever the dimension means. The search goes
        on through later nodes: two halves of the batch that are concatenated again, or rows that a loop stacked, are
        the batch once more. A batch of a single row is left out, since any dimension of size 1 looks like it.

        Args:
          node: the op.
          chosen: its strategy.
          current: the placements in which it found its operands.
        """
        if not self.origins and Shard not in map(type, current):
            return
        found: dict[Shard, None] = {}
        summed = any(type(p) is Partial for p in chosen.outputs)
        for ref, placement, wanted in zip(node.inputs, current, chosen.inputs):
            if type(placement) is Shard and (wanted != placement or summed):
                found[placement] = None
            if type(wanted) is not Shard:
                found.update(dict.fromkeys(self.origins.get(ref, ())))
        if not found:
            return
        splits = tuple(found)[:_MOST_ORIGINS]
        for ref, out, placement in zip(node.list_refs(), node.outputs, chosen.outputs):
            if type(placement) is Shard:
                continue
            if type(placement) is Replicate:
                self.origins[ref] = splits
            if out.dtype in UNMOVABLE or not out.is_static or not out.shape:
                continue
            for s in splits:
                dims = [d for d in (s.dim, 0) if d < len(out.shape) and out.shape[d] == s.extent > 1]
                if dims and type(placement) is Partial:
                    self.origins[ref] = splits  # a scatter-add of rows into a tensor with the batch's rows
                elif dims:
                    self.layout.preferred[ref] = shard(dims[0], s.sizes, s.blocks)
                if dims:
                    break


class NeededWhole(Exception):
    """Raised when a tensor that cannot be sent (a list, a string) is sharded, and a reader needs all of it.

    ``propagate`` catches it and starts anew with these tensors replicated; producers become replicated from round to
    round.

    Attributes:
      refs: the tensors to replicate, as (graph, tensor).
      reader: the node that needs all of the tensor.
      given: describes the tensor and its placement, for the error message.
    """

    def __init__(self, refs: set[tuple[str, Ref]], reader: Node, given: str) -> None:
        super().__init__(given)
        self.refs, self.reader, self.given = refs, reader, given


def cannot_be_sent(needed: NeededWhole) -> PlanError:
    """Creates the error for a tensor that can neither be sent between ranks nor be computed on every rank."""
    return PlanError(
        "an operation reads a whole value that is divided over ranks and can neither be sent nor be replicated",
        op=f"{needed.reader.name} ({needed.reader.op})",
        given=needed.given,
        notation=LEGEND,
        expected="operands that every rank has",
        action="compute the value outside of the step, or "
        + (
            "move the operation out of the `with wh.split():` it is in"
            if "split" in needed.reader.scope
            else "keep variables whole, if memory.zero or a scope divides them (memory.zero=0)"
        ),
    )
