"""Reuses the plan of another program that is nearly the same: on a mesh, programs of one axis' coordinates differ in
few nodes and sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from whale.ir.layout import Placement, Shard, Strategy, find_multiple, shard
from whale.ir.ops import HAS_BODIES
from whale.ir.program import Node, Program, Ref
from whale.ir.values import UNMOVABLE, TensorType
from whale.passes.propagation.graph_layout import GraphLayout, fetch_placements
from whale.sharding_rules import find_rule
from whale.sharding_rules.base import replace_per_rank
from whale.sharding_rules.graph import make_op_view


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Holds the strategies of a nearly equal program (the reference), and translates them to the program that is
    planned.

    Attributes:
      strategies: graph -> node -> strategy, of the reference.
      rows: rows per rank of a batch in the reference -> those in this program; {} if they are the same.
    """

    strategies: Mapping[str, Mapping[str, Strategy]]
    rows: Mapping[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def exact(self, program: Program, graph: str, node: Node) -> Strategy | None:
        """Returns the node's strategy in the reference, with this program's rows, if it is valid here; else None.

        It is valid if tensors have the dimensions and sizes that it splits, and the node's rule allows it. None for
        loops and branches as well: they are propagated again, with their bodies.
        """
        found = self.find_like(graph, node)
        if found is None or node.op in HAS_BODIES:
            return None
        if any(t.dtype == "variant" for t in node.outputs):
            return None  # propagation has to note which lists can be created in any placement
        if len(found.inputs) != len(node.inputs) or len(found.outputs) != len(node.outputs):
            return None
        handles = program.variable_of
        if node.name in handles:
            return found  # no variable has rows of the batch
        types = [
            handles[r.node].type if r.node in handles else program.find_type(r)
            for r in (*node.inputs, *node.list_refs())
        ]
        # A communication op along another axis: its peers use the reference's sizes as they are.
        along_axis = bool(node.marks.axis)
        placements: list[Placement] = []
        for t, p in zip(types, found.inputs + found.outputs):
            here = _find_empty_split(p, t) or (p if along_axis or not self.rows else self._here(p, t))
            if here is None or not _fits(here, t):
                return None
            placements.append(here)
        count = len(found.inputs)
        mine = replace(found, inputs=tuple(placements[:count]), outputs=tuple(placements[count:]))
        if mine == found and (not self.rows or along_axis):
            return found
        return mine if self._is_legal(program, node, mine) else None

    def layout_of_part(self, part: Program, ends: Mapping[str, Strategy]) -> GraphLayout | None:
        """Returns the layout of ``part``, a piece of the reference program, without propagation; None if a node has no
        strategy there, or is a loop or branch.

        Args:
          part: a stage group's program.
          ends: strategies of the nodes by which tensors enter and leave the part.
        """
        strategies: dict[str, Strategy] = {}
        produced: dict[Ref, Placement] = {}
        for node in part.nodes:
            found = ends.get(node.name) or self.find_like("", node)
            if found is None or node.op in HAS_BODIES or len(found.inputs) != len(node.inputs):
                return None
            strategies[node.name] = found
            produced.update(zip(node.list_refs(), found.outputs))
        return GraphLayout(strategies, produced, outputs=fetch_placements(part, produced))

    def _here(self, p: Placement, t: TensorType) -> Placement | None:
        """Translates a placement from the reference's batch rows to this program's; None if sizes do not tell whether
        the split dimension is rows.
        """
        if not isinstance(p, Shard):
            return p
        if t.dtype in UNMOVABLE:
            return None
        for theirs, ours in self.rows.items():
            if times := find_multiple(p.sizes, theirs):
                rows = shard(p.dim, tuple(times * n for n in ours), p.blocks, p.halo)
                if t.shape is None or p.dim >= len(t.shape):
                    return None
                is_rows, is_not = t.shape[p.dim] == rows.extent, t.shape[p.dim] == p.extent
                return None if is_rows == is_not else rows if is_rows else p
        return p

    def _is_legal(self, program: Program, node: Node, found: Strategy) -> bool:
        """Returns True if the node's rule allows the strategy in this program, whose sizes may differ."""
        rule = find_rule(node.op)
        cut = next((p for p in found.inputs + found.outputs if isinstance(p, Shard)), None)
        if rule is None or found.once or cut is None:
            return True
        op = make_op_view(program, node, len(cut.sizes))
        inputs, outputs = (tuple(map(replace_per_rank, side)) for side in (found.inputs, found.outputs))
        return any((o.inputs, o.outputs) == (inputs, outputs) for o in rule.strategies(op, inputs, outputs))

    def find_like(self, graph: str, node: Node) -> Strategy | None:
        """Returns the node's strategy in the reference, whatever the sizes; None if the reference lacks the node."""
        return self.strategies.get(graph, {}).get(node.name)


def _find_empty_split(p: Placement, t: TensorType) -> Shard | None:
    """Returns a split into empty parts if the tensor is empty along the split dimension in this program; else None."""
    if not isinstance(p, Shard) or t.shape is None or t.dtype in UNMOVABLE or p.dim >= len(t.shape):
        return None
    return shard(p.dim, (0,) * len(p.sizes), p.blocks) if t.shape[p.dim] == 0 else None


def _fits(p: Placement, t: TensorType) -> bool:
    """Returns True if a tensor may have the dimension and the size that placement ``p`` splits, or ``p`` is no split.

    A size that only a step knows, such as that of the looked-up rows of a table, is as unknown in the reference.
    """
    if not isinstance(p, Shard) or t.shape is None or t.dtype in UNMOVABLE:
        return True
    return p.dim < len(t.shape) and t.shape[p.dim] in (None, p.extent)


def same_kind(one: Strategy, other: Strategy) -> bool:
    """Returns True if two strategies differ at most in the sizes of their parts."""
    placements = zip(one.inputs + one.outputs, other.inputs + other.outputs)
    same_number = len(one.inputs) == len(other.inputs) and len(one.outputs) == len(other.outputs)
    return same_number and one.once == other.once and all(_kind(a) == _kind(b) for a, b in placements)


def _kind(p: Placement) -> tuple[object, ...]:
    return type(p), getattr(p, "dim", None), getattr(p, "op", None)
