"""Errors of propagation about tensors that cannot be sent: lists, strings, handles."""

from __future__ import annotations

from whale.errors import PlanError
from whale.ir.program import Node, Ref


class NeededWhole(Exception):
    """Raised where tensors that cannot be sent (lists, strings) are divided, and a reader needs them whole.

    ``refs`` are (graph, tensor); the region that is computed on every rank grows upward from them.
    """

    def __init__(self, refs: set[tuple[str, Ref]], reader: Node, given: str) -> None:
        super().__init__(given)
        self.refs, self.reader, self.given = refs, reader, given


def cannot_be_sent(needed: NeededWhole) -> PlanError:
    """Returns the error for the case that making the tensors whole did not help."""
    return PlanError(
        "an operation reads a value that is spread and can neither be sent nor be made whole",
        op=f"{needed.reader.name} ({needed.reader.op})",
        given=needed.given,
        expected="operands that every rank has",
        action="move the operation out of the divided part",
    )
