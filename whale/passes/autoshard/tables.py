"""Chooses which embedding tables may be whole, each on one rank, and on which rank.

Such a table's ids go to its rank, which looks rows up and adds them up to bags; one row of each bag comes back. By rows
all rows of a bag would travel, and by columns all ids would go to all ranks. Where nothing is added up it moves what
other layouts move. Cost decides (``choose``); here stands what may be chosen, so that no rank is left with more than
others: tables that are no more than a rank's share of all of them, spread by bytes and lookups.

Largest first, each to the rank on which the larger of its two loads becomes least (Graham, "Bounds on multiprocessing
timing anomalies", 1969, for one load).

Decision: 0119.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from whale.ir.layout import Shard
from whale.ir.ops import ROW_LOOKUPS
from whale.passes.analysis.scopes import split_scope
from whale.passes.autoshard.region import SplitRegion


def find_whole_tables(region: SplitRegion, only: Collection[str] | None = None) -> dict[str, int]:
    """Maps the handles of tables that may be whole on one rank to that rank.

    Such tables are read by lookups alone, under scopes that name no dimension and no ranks, or one rank. Where earlier
    programs have put a table on a rank it stays there.

    Args:
      only: the handles that it is about; None: all.
    """
    if not region.tables:
        return {}
    lookups = _lookups(region)
    placed = {name: rank for name in lookups if (rank := _find_given_rank(region, name, lookups[name])) is not None}
    free = {
        name: (region.handles[name].type.bytes, sum(region.nodes[reader].outputs[0].bytes for reader in readers))
        for name, readers in lookups.items()
        if name not in placed and name not in region.known and region.at_rest and _is_free(region, readers)
    }
    share = sum(size for size, _ in free.values()) // max(1, region.parts)
    kept = {name: load for name, load in free.items() if load[0] <= share and (only is None or name in only)}
    return placed | spread(kept, region.parts)


def spread(loads: Mapping[str, tuple[int, ...]], ranks: int) -> dict[str, int]:
    """Assigns each name to a rank so that every kind of load is balanced."""
    totals = [max(1, sum(kind)) for kind in zip(*loads.values())]
    shares = {name: [n / total for n, total in zip(load, totals)] for name, load in loads.items()}
    have = [[0.0] * len(totals) for _ in range(ranks)]
    found: dict[str, int] = {}
    for name in sorted(shares, key=lambda name: -max(shares[name])):
        after = [[a + b for a, b in zip(rank, shares[name])] for rank in have]
        found[name] = min(range(ranks), key=lambda rank: (max(after[rank]), sum(after[rank])))
        have[found[name]] = after[found[name]]
    return found


def is_whole(placement: object) -> bool:
    """Tells whether one rank has all of a tensor, and the others nothing."""
    return isinstance(placement, Shard) and len(placement.sizes) > 1 and len(placement.holders) == 1


def _lookups(region: SplitRegion) -> dict[str, list[str]]:
    """Maps tables that only lookups with a known number of ids read to these lookups.

    Updates of the table's rows may read them as well, wherever the table is.
    """
    readers: dict[str, list[str]] = {}
    for name, uses in region.weights.items():
        for _, handle in uses if not region.nodes[name].marks.owned_rows else ():
            readers.setdefault(handle, []).append(name)
    return {handle: names for handle, names in readers.items() if all(_reads_rows(region, n, handle) for n in names)}


def _reads_rows(region: SplitRegion, name: str, handle: str) -> bool:
    node = region.nodes[name]
    if node.op not in ROW_LOOKUPS or len(region.weights[name]) > 1:
        return False
    ids = region.program.find_type(node.inputs[1])
    table = region.handles[handle].type
    return ids.is_static and bool(ids.shape) and table.is_static and node.outputs[0].is_static


def _find_given_rank(region: SplitRegion, handle: str, lookups: Collection[str]) -> int | None:
    """Returns the rank that already has the table, or that the scopes of all its lookups name; else None."""
    known = region.known.get(handle)
    if isinstance(known, Shard) and is_whole(known):
        return next(iter(known.holders))
    if known is not None:
        return None
    group = {rank for name in lookups for rank in region.group[name]}
    return next(iter(group)) if len(group) == 1 else None


def _is_free(region: SplitRegion, readers: Collection[str]) -> bool:
    """Tells whether the lookups' scopes leave the table's placement to cost."""
    scopes = [split_scope(region.nodes[name].scope) for name in readers]
    alone = all(len(region.group[name]) == region.parts for name in readers)
    return alone and all(scope is not None and scope[1] is None for scope in scopes)
