"""Defines the layout of one graph: the placements that propagation finds, which later passes use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale.ir.layout import FIRST, B, Placement, Strategy
from whale.ir.program import Program, Ref
from whale.ir.values import UNMOVABLE


@dataclass
class GraphLayout:
    """The result of propagation for one graph (the program or a function body).

    Attributes:
      strategies: per node.
      produced: how each tensor leaves its node.
      preferred: tensors that are sliced for nothing right after (batch inputs; results of ops that had to be
        replicated): consumers see this placement first.
      outputs: placements in which the graph's outputs are wanted.
      unruled: nodes without a rule.
    """

    strategies: dict[str, Strategy] = field(default_factory=dict)
    produced: dict[Ref, Placement] = field(default_factory=dict)
    preferred: dict[Ref, Placement] = field(default_factory=dict)
    outputs: tuple[Placement, ...] = ()
    unruled: list[str] = field(default_factory=list)

    def place(self, ref: Ref) -> Placement:
        """Returns the placement in which consumers see a tensor: its preferred one, or that of its producer."""
        return self.preferred.get(ref) or self.produced[ref]


def fetch_placements(program: Program, produced: Mapping[Ref, Placement]) -> tuple[Placement, ...]:
    """Returns the placements in which a program's outputs are wanted: replicated, except for tensors that cannot be
    sent.
    """
    return tuple(
        FIRST if produced[r] == FIRST and program.find_type(r).dtype in UNMOVABLE else B for r in program.outputs
    )
