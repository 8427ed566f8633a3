"""Chooses which embedding tables may be whole, each on one rank, and on which rank.

The ids of such a table go to its rank, which looks rows up and adds them up to bags; one row of each bag comes back.
With a table sharded by rows all rows of a bag would travel, and with one sharded by columns all ids would go to all
ranks. Where nothing is added up, a whole table moves as much as other layouts. Cost decides (``choose``). This module
limits the choice so that no rank gets more than others: to tables that are no larger than a rank's share of all of
them, spread over ranks by bytes and lookups.

They are placed largest first, each on the rank on which the larger of its two loads becomes least (Graham, "Bounds on
multiprocessing timing anomalies", 1969, for one load).

Decision: 0119.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from whale.ir.layout import Shard
from whale.ir.ops import ROW_LOOKUPS
from whale.passes.analysis.scopes import split_scope
from whale.passes.autoshard.region import SplitRegion


def find_whole_tables(region: SplitRegion, only: Collection[str] | None = None) -> dict[str, int]:
    """Maps the handle of each table that may be whole on one rank to that rank.

    Such tables are read by lookups alone, under scopes that name no dimension, and name no ranks or a single one. A
    table that earlier programs of the run have put on a rank stays there.

    Args:
      only: handles of the tables to spread; None: all.
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
    """Assigns each name to one of ``ranks`` ranks so that every kind of load is balanced.

    Args:
      loads: name -> its load of each kind, such as (bytes of the table, bytes of looked-up rows).
    """
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
    """Returns True if ``placement`` puts all of a tensor on one rank, and nothing on the others."""
    return isinstance(placement, Shard) and len(placement.sizes) > 1 and len(placement.holders) == 1


def _lookups(region: SplitRegion) -> dict[str, list[str]]:
    """Maps tables that are read by lookups with a known number of ids only to the names of these lookups.

    Updates of the table's rows may read the table as well, wherever it is.
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
    """Returns the rank that has the table already, or the single rank that the scopes of all its lookups name; else
    None.
    """
    known = region.known.get(handle)
    if isinstance(known, Shard) and is_whole(known):
        return next(iter(known.holders))
    if known is not None:
        return None
    group = {rank for name in lookups for rank in region.group[name]}
    return next(iter(group)) if len(group) == 1 else None


def _is_free(region: SplitRegion, readers: Collection[str]) -> bool:
    """Returns True if the lookups' scopes name neither ranks nor a dimension, so that cost decides the table's
    placement.
    """
    scopes = [split_scope(region.nodes[name].scope) for name in readers]
    alone = all(len(region.group[name]) == region.parts for name in readers)
    return alone and all(scope is not None and scope[1] is None for scope in scopes)
