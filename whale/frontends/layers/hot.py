"""Replicates those rows of a table that nearly every part of a batch uses; the others stay sharded.

With sharding by rows, the owner of such a row sends it to every rank, and sums the gradients from each: with a skewed
access pattern the ranks with hot rows send most of the traffic. If these are replicated, their gradients are
all-reduced, which costs all ranks the same.

``look_up`` looks ids up among them. ``hot_ids`` finds, from a sample of batches, the rows for which it pays.

Decisions: 0118, 0122.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from whale.errors import ProgramError


def hot_ids(batches: Iterable[Any], ranks: int, *, count: int | None = None) -> list[int]:
    """Finds the ids whose rows are better on every rank, from a sample of batches; those used most come first.

    The owner of a row sends it to each other rank whose part of a batch has its id, and gets as many gradients. An
    all-reduce has each rank send 2 (ranks - 1) / ranks of a row and get as much. So the busiest rank has less to do
    where more than two parts of a batch have the id, on average; on two ranks that is no row.

    Args:
      batches: ids of the table [batch, ...] as arrays; negative ones are absent.
      ranks: among which a batch is divided.
      count: as many of the ids that most parts of batches have, whether the exchange pays or not: rows that
        accelerators have room for, beside a table in their hosts' memory (``memory.offload="tables"``).

    Raises:
      ProgramError: there is no batch, or one has fewer rows than ranks.
    """
    asked: Counter[int] = Counter()
    seen = 0
    for batch in batches:
        ids = np.asarray(batch)
        if ids.ndim == 0 or len(ids) < ranks or not np.issubdtype(ids.dtype, np.integer):
            raise ProgramError(
                "no batch of ids",
                given=f"{ids.dtype}{list(ids.shape)}, {ranks} ranks",
                expected="integers [batch, ...] with a row for each rank",
                action="give batches as large as in training",
            )
        seen += 1
        for part in np.array_split(ids, ranks):
            asked.update(np.unique(part[part >= 0]).tolist())
    if not seen:
        raise ProgramError(
            "no batch of ids", given="none", expected="a sample of batches", action="give batches as in training"
        )
    by_use = sorted(asked.items(), key=lambda item: (-item[1], item[0]))
    return [i for i, times in by_use if times > 2 * seen] if count is None else [i for i, _ in by_use[:count]]


def look_up(hot_ids: tf.Variable, hot_rows: tf.Variable, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Looks up ids [n] among the hot ones.

    Args:
      hot_ids: sorted [k]; hot_rows: their rows [k, width].

    Returns:
      (hot rows of the ids [n, width], with any row for an id that is not hot; whether each id is hot; ids for the
      table's other rows, where one id replaces all hot ones).
    """
    count, width = hot_rows.shape
    known = tf.cast(tf.convert_to_tensor(hot_ids), ids.dtype)
    place = tf.minimum(tf.searchsorted(known, ids), count - 1)
    hot = tf.gather(known, place) == ids
    # A reshape's gradient is dense: it is summed over the ranks as those of other layers are, whatever the ids.
    rows = tf.reshape(tf.convert_to_tensor(hot_rows), [count, width])
    return tf.gather(rows, tf.where(hot, place, 0)), hot, tf.where(hot, known[0], ids)


def make_like(initializer: Any) -> Any:
    """Returns an initializer of the same kind with other random numbers, so that hot rows differ from other rows."""
    if not hasattr(initializer, "get_config"):
        return initializer
    config = initializer.get_config()
    if isinstance(config.get("seed"), int):
        config["seed"] += 1
    return type(initializer).from_config(config)


def check_hot(hot: Any, rows: int) -> list[int] | None:
    """Checks a layer's argument ``hot`` (ids of a table of so many rows, or how many of the first) and returns the ids.

    Raises:
      ProgramError: it names no such rows.
    """
    if hot is None:
        return None
    ids = list(range(hot)) if isinstance(hot, int) else [int(i) for i in hot]
    if not 0 < len(ids) < rows or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= rows:
        raise ProgramError(
            "the arguments describe no valid table",
            given=f"hot={hot!r:.80} of {rows} rows",
            expected="some of the rows' numbers, each once, or how many of the first rows",
            action="change it",
        )
    return ids
