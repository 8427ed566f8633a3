"""Defines errors of propagation about tensors that cannot be sent: lists, strings, handles."""

from __future__ import annotations

from whale.errors import PlanError
from whale.ir.program import Node, Ref


class NeededWhole(Exception):
    """Raised when a tensor that cannot be sent (a list, a string) is divided, and a reader needs all of it.

    ``refs`` are (graph, tensor); the region that is computed on every rank grows upward from them.
    """

    def __init__(self, refs: set[tuple[str, Ref]], reader: Node, given: str) -> None:
        super().__init__(given)
        self.refs, self.reader, self.given = refs, reader, given


def cannot_be_sent(needed: NeededWhole) -> PlanError:
    """Creates the error for tensors that cannot be sent, and could not be computed on every rank either."""
    return PlanError(
        "an operation reads a divided value that can neither be sent nor be replicated",
        op=f"{needed.reader.name} ({needed.reader.op})",
        given=needed.given,
        expected="operands that every rank has",
        action="move the operation out of the divided part",
    )
