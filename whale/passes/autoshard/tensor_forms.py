"""Describes a tensor for the choice under split scopes (see ``whale.passes.autoshard.choose``)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from whale.ir.layout import Placement


@dataclass(frozen=True, slots=True)
class TensorForms:
    """The placements that one tensor may have (its forms), and the costs of changes between them.

    Attributes:
      forms: its placement, per option of the producer; one form when the producer is fixed.
      producer: number of the node; None when it is fixed.
      readers: (number of the node or None when fixed, form wanted per option).
      price: cost of a change of form; infinite when it cannot be made.
      kind: equal for tensors of equal prices.
    """

    forms: tuple[Placement, ...]
    producer: int | None
    readers: tuple[tuple[int | None, tuple[Placement, ...]], ...]
    price: Callable[[Placement, Placement], float]
    kind: Hashable

    @property
    def shape(self) -> Hashable:
        """Returns a key that is equal for corresponding tensors of repeated blocks: all fields but the nodes'
        numbers.
        """
        return self.kind, self.forms, tuple([forms for _, forms in self.readers])

    @property
    def nodes(self) -> tuple[int | None, ...]:
        """Returns the producer and the readers; None for those whose strategy is fixed."""
        return self.producer, *[reader for reader, _ in self.readers]
