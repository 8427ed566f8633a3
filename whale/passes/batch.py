"""Which inputs carry the batch, and how its rows are shared out."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from whale.errors import PlanError
from whale.ir.layout import even_sizes, split
from whale.ir.plan import BatchInput
from whale.ir.program import Program
from whale.ir.values import UNMOVABLE


def batch_inputs(
    program: Program, parts: int, shares: Sequence[int] = (), marked: Sequence[str] = ()
) -> tuple[BatchInput, ...]:
    """Inputs that are divided along dimension 0, with the rows of each rank.

    Args:
      shares: rows per rank; empty means as equal as possible.
      marked: names of the inputs to take, as far as this program has them; empty means the inputs of rank >= 1 whose
        dimension 0 has as many rows as the shares together, or else the size of the first such input's.

    Raises:
      PlanError: of the marked inputs none exists, or one looks misspelt or has no dimension 0; or the shares do not add
        up to the batch.
    """
    types = {name: program.by_name[name].outputs[0] for name in program.inputs}
    candidates = {
        n: t.shape[0] for n, t in types.items() if t.shape and t.shape[0] is not None and t.dtype not in UNMOVABLE
    }
    present = [name for name in marked if name in candidates]
    for name in marked:
        # Not every program of a run reads all that is marked: a prediction takes no labels.
        near = difflib.get_close_matches(name, [n for n in candidates if n not in marked], 1)
        if name not in candidates and (name in types or near or not present):
            raise PlanError(
                "an input that `batch.inputs` names cannot carry the batch",
                given=name,
                expected=f"one of {', '.join(candidates) or 'no input: none has a dimension 0'}",
                action=f"name {near[0]!r}" if near else "name an input of rank 1 or more, or remove the key",
            )
    if not candidates:
        return ()
    batch = sum(shares) if sum(shares) in candidates.values() else next(iter(candidates.values()))
    chosen = present or [n for n, size in candidates.items() if size == batch]
    origin = "rule: dimension 0 has the size of the first input's"
    if marked:
        origin = "user (batch.inputs)"
    elif shares:
        origin = "rule: dimension 0 has the rows of replica.shares"
    rows = []
    for name in chosen:
        size = candidates[name]
        if shares and (len(shares) != parts or sum(shares) != size):
            raise PlanError(
                "the batch cannot be split as `replica.shares` asks",
                input=name,
                given=f"shares {list(shares)} (sum {sum(shares)}) for {parts} ranks, batch of {size} rows",
                expected=f"{parts} numbers that add up to {size}, for example {list(even_sizes(size, parts))}",
                action="change replica.shares or the batch size",
            )
        rows.append(BatchInput(name, split(0, tuple(shares) or even_sizes(size, parts)), origin))
    return tuple(rows)
