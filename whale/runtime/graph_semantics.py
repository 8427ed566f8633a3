"""Defines the interface by which other frontends override how ``wh.Session`` interprets a script's graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from whale.ir.program import Program


@dataclass(frozen=True)
class BatchReaders:
    """The ranks that provide the parts of a session's batch.

    Attributes:
      readers: ranks of which each provides parts; the global batch is their concatenation in order.
      turns: number of parts that each of them provides for one run.
      whole: every rank gets the whole batch, and takes the rows it computes; otherwise each keeps its own part.
    """

    readers: tuple[int, ...]
    turns: int = 1
    whole: bool = False


class GraphSemantics(Protocol):
    """The semantics that a frontend assigns to a script's graphs."""

    def find_batch_readers(self, graph: Any) -> BatchReaders:
        """Returns the ranks that provide the batches for runs of ``graph``."""
        ...

    def apply_scopes(self, program: Program, graph: Any) -> Program:
        """Returns a captured part of ``graph`` with the scopes that the script's annotations stand for."""
        ...

    def find_fetched(self, graph: Any, fetch: Any) -> Any:
        """Returns the tensor of ``graph`` whose value a script gets when it fetches ``fetch``."""
        ...
