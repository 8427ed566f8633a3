"""Defines what another interface has to say of its scripts' graphs, where ``wh.Session`` would take them otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from whale.ir.program import Program


@dataclass(frozen=True)
class BatchReaders:
    """The ranks that bring the parts of a session's batch.

    Attributes:
      readers: ranks of which each brings parts; the global batch is these in order.
      turns: parts that each of them brings for one run.
      whole: every rank is given the whole of it, and takes what it computes; else each keeps the part that it brought.
    """

    readers: tuple[int, ...]
    turns: int = 1
    whole: bool = False


class GraphSemantics(Protocol):
    """The semantics that an interface gives to a script's graphs."""

    def find_batch_readers(self, graph: Any) -> BatchReaders:
        """Returns who brings the batches of runs of ``graph``."""
        ...

    def apply_scopes(self, program: Program, graph: Any) -> Program:
        """Returns a captured part of ``graph`` with the scopes that the script's annotations stand for."""
        ...

    def find_fetched(self, graph: Any, fetch: Any) -> Any:
        """Returns the tensor of ``graph`` whose value is given where the script fetches ``fetch``."""
        ...
