"""Defines the layout of one graph: the placements that propagation finds and later passes refine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale.ir.layout import FIRST, B, Placement, Strategy
from whale.ir.program import Program, Ref
from whale.ir.values import UNMOVABLE


@dataclass
class GraphLayout:
    """Holds the result of propagation for one graph (the program or a function body).

    Attributes:
      strategies: the strategy of each node, by name.
      produced: the placement in which each tensor leaves its producer.
      preferred: tensors that all readers find in another placement than the produced one, mostly a slice of a
        replicated tensor at no cost (batch inputs, results of ops that had to be replicated).
      outputs: placements in which the graph's outputs are returned.
      unruled: names of the nodes whose op has no sharding rule.
    """

    strategies: dict[str, Strategy] = field(default_factory=dict)
    produced: dict[Ref, Placement] = field(default_factory=dict)
    preferred: dict[Ref, Placement] = field(default_factory=dict)
    outputs: tuple[Placement, ...] = ()
    unruled: list[str] = field(default_factory=list)

    def place(self, ref: Ref) -> Placement:
        """Returns the placement in which readers find a tensor: the preferred one if there is one, else as produced."""
        return self.preferred.get(ref) or self.produced[ref]


def fetch_placements(program: Program, produced: Mapping[Ref, Placement]) -> tuple[Placement, ...]:
    """Returns the placements in which a program's outputs are returned: replicated, except that tensors which cannot be
    sent (resources, variants) may stay on the first rank.
    """
    return tuple(
        FIRST if produced[r] == FIRST and program.find_type(r).dtype in UNMOVABLE else B for r in program.outputs
    )
