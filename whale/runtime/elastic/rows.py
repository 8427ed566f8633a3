"""Takes a rank's rows of a batch again, when rows are divided among other ranks than when it was read."""

from __future__ import annotations

from typing import Any

from whale.capture.sharded import ShardedTensor
from whale.errors import ClusterError
from whale.passes.analysis.batch import rows_of_ranks
from whale.runtime.ranks.ranks import Ranks

# Attribute of a tensor that a rank read while it was alone: (weak reference to the iterator, number of the batch, and
# of the tensor in it), as the source of a part.
ALONE = "_whale_source"


def cut_rows_again(context: Ranks, value: Any) -> Any:
    """Returns the rows of a batch that are this rank's now."""
    if type(value) is not ShardedTensor:
        reference, *place = getattr(value, ALONE, None) or (lambda: None, 0, 0)
        iterator = reference() if context.size > 1 else None
        return value if iterator is None else iterator.read_again(place[0])[place[1]]
    if len(value.sizes) == context.size:
        rows = sum(value.sizes)
        if value.source is None or value.sizes == rows_of_ranks(rows, context.size, context.config["replica.shares"]):
            return value
    if value.source is None:
        raise ClusterError(
            "rows of a batch that a rank read are gone with it",
            given="a wh.ShardedTensor that was made by the script",
            expected="batches of a wh.shard dataset, or whole ones, which are divided anew",
            action="take batches of wh.shard(dataset)",
        )
    iterator, position, leaf = value.source
    return iterator.read_again(position)[leaf]
