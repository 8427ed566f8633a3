"""Balances rows of a batch over unequal ranks, some of whose work does not depend on their rows."""

from __future__ import annotations

from collections.abc import Sequence

from whale.ir.layout import divide_proportionally


def balance_rows(rows: int, once_s: Sequence[float], row_s: Sequence[float]) -> tuple[int, ...]:
    """Returns rows for each rank such that all take equally long, as far as whole rows allow.

    A rank whose fixed work takes longer than all work of the others gets no rows.

    Args:
        rows: of the batch.
        once_s: seconds of each rank that do not depend on its rows; row_s: additional seconds of each row.
    """
    working = list(range(len(once_s)))
    while True:
        end_s = (rows + sum(once_s[r] / row_s[r] for r in working)) / sum(1 / row_s[r] for r in working)
        still = [r for r in working if once_s[r] < end_s]
        if still == working:
            break
        working = still
    weights = [0] * len(once_s)
    for rank in working:
        weights[rank] = round(1e6 * (end_s - once_s[rank]) / (row_s[rank] * rows))
    return divide_proportionally(rows, tuple(weights))
