"""Provides helpers with which rules that depend on the op write their lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from whale.ir.values import Dims
from whale.sharding_rules.base import OpView


def make_labels(prefix: str, count: int) -> list[str]:
    """Returns ``count`` labels: a0 a1 ..."""
    return [f"{prefix}{i}" for i in range(count)]


def write_runs(runs: int, label: str, *, inner: bool = False) -> str:
    """Writes a dimension of ``runs`` runs of ``label``; with ``inner``, of ``label`` runs of ``runs`` each."""
    if runs == 1:
        return label
    return f"({label} {runs})" if inner else f"({runs} {label})"


def write_windows(sizes: Dims | None, window: Sequence[int], steps: Sequence[int]) -> list[str | None]:
    """Writes each dimension for windows of these sizes and steps that see each element at most once.

    ``h``: one element each; ``(h 2)``: non-overlapping windows of 2. None: windows overlap, or the size is not known to
    be a multiple of the step (then padding or a remainder would have to be at one end only).
    """
    found: list[str | None] = []
    for n, (size, one, step) in enumerate(zip(sizes or (None,) * len(window), window, steps)):
        fits = one <= step and (step == 1 or (size is not None and size % step == 0))
        found.append(write_runs(step, f"s{n}", inner=True) if fits else None)
    return found


def write_term(items: Iterable[str]) -> str:
    """Writes a term of these items; ``.`` where there are none (a scalar)."""
    return " ".join(items) or "."


def write_terms(*many: Iterable[str]) -> str:
    """Writes several terms, separated by commas."""
    return ", ".join(map(write_term, many))


def freeze(items: list[str], dims: Iterable[int]) -> list[str]:
    """Returns ``items`` with those at ``dims`` frozen."""
    chosen = set(dims)
    return [f"{x}^" if i in chosen else x for i, x in enumerate(items)]


def read_constant(op: OpView, i: int) -> list[int] | None:
    """Returns the integers of constant operand ``i``, flat; None if it is not a constant."""
    value = op.const(i)
    return None if value is None else [int(v) for v in np.asarray(value).reshape(-1)]


def read_axis(op: OpView, i: int, rank: int) -> int | None:
    """Returns the dimension that constant scalar operand ``i`` names, counted from the front; None if it is no
    constant.
    """
    value = read_constant(op, i)
    return None if not value else value[0] % max(rank, 1)


def is_same_size(a: int | None, b: int | None) -> bool:
    """Tells whether two sizes are known and equal."""
    return a is not None and a == b


def count_dims(shape: Dims | None) -> int | None:
    """Returns the number of dimensions, None if unknown."""
    return None if shape is None else len(shape)
