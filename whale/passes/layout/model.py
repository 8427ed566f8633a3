"""A plan to keep to: of a program that differs only in what belongs to the coordinate of another mesh axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from whale.ir.layout import Broadcast, Placement, Split, Strategy
from whale.ir.mesh import AXIS
from whale.ir.ops import HAS_BODIES
from whale.ir.program import Node, Program
from whale.ir.values import UNMOVABLE
from whale.rules import rule_of
from whale.rules.base import as_whole
from whale.rules.graph import view


@dataclass(frozen=True, slots=True)
class Model:
    """The strategies of the other program.

    Attributes:
      strategies: graph -> node -> strategy.
      rows: its rows of the batch, for each coordinate, where they are not this program's.
    """

    strategies: Mapping[str, Mapping[str, Strategy]]
    rows: Collection[tuple[int, ...]] = ()

    def exact(self, program: Program, graph: str, node: Node) -> Strategy | None:
        """How the node runs there, if it can run so here: its tensors have the sizes that are cut.

        Loops and branches are gone through again, with their bodies.
        """
        found = self.alike(graph, node)
        if found is None or node.op in HAS_BODIES:
            return None
        if any(t.dtype == "variant" for t in node.outputs):
            return None  # whether a list may be made anew is found on the way
        if len(found.inputs) != len(node.inputs) or len(found.outputs) != len(node.outputs):
            return None
        handles = program.variable_of
        if node.name in handles:
            return found  # no variable has rows of the batch
        types = [
            handles[r.node].type if r.node in handles else program.type_of(r) for r in (*node.inputs, *node.refs())
        ]
        along_axis = AXIS in node.attrs  # its parts go to other groups, which have them as the first one has
        for t, p in zip(types, found.inputs + found.outputs):
            if isinstance(p, Split) and self.rows and (t.dtype in UNMOVABLE or (self._of_rows(p) and not along_axis)):
                return None
            if isinstance(p, Split) and t.shape is not None and t.dtype not in UNMOVABLE:
                if p.dim >= len(t.shape) or t.shape[p.dim] != p.extent:
                    return None
        return found if not self.rows or along_axis or self._is_legal(program, node, found) else None

    def _is_legal(self, program: Program, node: Node, found: Strategy) -> bool:
        """Whether the node's rule allows it here, where other dimensions may have other sizes."""
        rule = rule_of(node.op)
        if rule is None or _is_whole(found) or found.once:
            return True
        op = view(program, node, len(next(iter(self.rows))))
        inputs, outputs = (tuple(map(as_whole, side)) for side in (found.inputs, found.outputs))
        return any((o.inputs, o.outputs) == (inputs, outputs) for o in rule.strategies(op, inputs, outputs))

    def alike(self, graph: str, node: Node) -> Strategy | None:
        """How the node runs there, whatever the sizes."""
        return self.strategies.get(graph, {}).get(node.name)

    def _of_rows(self, p: Split) -> bool:
        """Whether it may be that rows of the batch are cut: in the proportions in which they are there."""
        for rows in self.rows:
            times = p.run // sum(rows) if sum(rows) else 0
            if times and tuple(times * n for n in rows) == p.sizes:
                return True
        return False


def _is_whole(strategy: Strategy) -> bool:
    return all(isinstance(p, Broadcast) for p in strategy.inputs + strategy.outputs)


def same_kind(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies differ in sizes at most."""
    placements = zip(one.inputs + one.outputs, other.inputs + other.outputs)
    same_number = len(one.inputs) == len(other.inputs) and len(one.outputs) == len(other.outputs)
    return same_number and one.once == other.once and all(_kind(a) == _kind(b) for a, b in placements)


def _kind(p: Placement) -> tuple[object, ...]:
    return type(p), getattr(p, "dim", None), getattr(p, "op", None)
