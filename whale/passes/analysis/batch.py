"""Finds which inputs carry the batch, and divides its rows among the ranks.

Decision: 0022.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from whale.errors import PlanError
from whale.ir.layout import divide_evenly, divide_proportionally, shard
from whale.ir.plan import BatchInput
from whale.ir.program import Program
from whale.ir.values import UNMOVABLE
from whale.passes.analysis.stacks import stacks


def rows_of_ranks(
    size: int, parts: int, shares: Sequence[int] = (), coordinates: Sequence[int] = ()
) -> tuple[int, ...]:
    """Returns the rows of a batch of ``size`` rows that each rank computes.

    Args:
      shares: rows per rank of the usual batch, or per coordinate of the axis ``data``; a batch of another size (the
        last one of an epoch) is divided in the same proportion. Empty means as equal as possible.
      coordinates: of every rank on the axis ``data``; ranks at one coordinate divide its rows evenly. (): there is
        no such axis.

    Raises:
      PlanError: there is not one share per rank or coordinate, or all are 0.
    """
    if not shares:
        return divide_evenly(size, parts)
    groups = max(coordinates, default=-1) + 1
    if len(shares) not in (parts, groups) or not any(shares):
        or_so = f", or {groups}, one for each coordinate of the axis data" if 1 < groups < parts else ""
        raise PlanError(
            "the batch cannot be split as `batch.shares` asks",
            given=f"shares {list(shares)} for {parts} ranks",
            expected=f"{parts} numbers, not all 0, for example {list(divide_evenly(size, parts))}{or_so}",
            action="change batch.shares or the number of ranks",
        )
    rows = divide_proportionally(size, tuple(shares))
    if len(shares) == parts:
        return rows
    of_group = [iter(divide_evenly(n, list(coordinates).count(c))) for c, n in enumerate(rows)]
    return tuple(next(of_group[c]) for c in coordinates)


def batch_inputs(
    program: Program,
    parts: int,
    shares: Sequence[int] = (),
    marked: Sequence[str] = (),
    local: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    coordinates: Sequence[int] = (),
) -> tuple[BatchInput, ...]:
    """Finds the inputs that carry the batch (dimension 0, or 1 where they are stacks of batches), with each rank's
    rows.

    Args:
      shares, coordinates: see ``rows_of_ranks``.
      marked: names of the inputs to take, as far as this program has them; empty means the inputs of rank >= 1 whose
        dimension 0 has as many rows as the shares together, or else the size of the first such input's.
      local: inputs of which a rank is given its own rows only, with the rows of every rank. When there are some, an
        input that every rank has whole is divided if it has as many rows, and in the same way.

    Raises:
      PlanError: of the marked inputs none exists, or one looks misspelt or has no dimension 0; the shares do not fit.
    """
    types = {name: program.by_name[name].outputs[0] for name in program.inputs}
    stacked = stacks(program)
    dims = {n: int(n in stacked and n not in local) for n in types}  # the dimension of the rows
    candidates = {
        n: size
        for n, t in types.items()
        if t.shape and (size := t.shape[dims[n]]) is not None and t.dtype not in UNMOVABLE
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
    given = dict.fromkeys(local.values())
    if len(given) > 1:
        raise PlanError(
            "two arguments of a step divide the batch in two ways",
            given=", ".join(f"{name}: {list(sizes)}" for name, sizes in local.items()),
            expected="the same rows of every rank for all of them",
            action="take all arguments of a step from one dataset",
        )
    usual = bool(shares) and sum(shares) in candidates.values()
    batch = sum(next(iter(given))) if given else sum(shares) if usual else next(iter(candidates.values()))
    chosen = [n for n, size in candidates.items() if n in local or (n in present if marked else size == batch)]
    origin = "rule: dimension {} has the size of the first input's"
    if marked:
        origin = "user (batch.inputs)"
    elif usual:
        origin = "rule: dimension {} has the rows of batch.shares"
    rows = []
    for name in chosen:
        size = candidates[name]
        sizes = next((s for s in given if sum(s) == size), None) or rows_of_ranks(size, parts, shares, coordinates)
        if name in local:
            rows.append(BatchInput(name, shard(0, sizes), "user (each rank passes its rows)", local=True))
            continue
        how = "; dimension 0 is read one element at a time" if dims[name] else ""
        how += ", in proportion to batch.shares" if shares and sizes != tuple(shares) and not given else ""
        rows.append(BatchInput(name, shard(dims[name], sizes), origin.format(dims[name]) + how))
    return tuple(rows)
