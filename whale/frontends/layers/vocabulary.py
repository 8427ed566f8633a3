"""Assigns ids to slots of a dynamic table: new ids are admitted, and the least used ids make room for them.

Slots are in buckets of ``WAYS`` slots, as in HierarchicalKV (NVIDIA). The hash of an id determines its bucket, and the
id has one of the bucket's slots. So a step needs only a few gathers and scatters of plain variables, for the batch's
ids alone. The result depends on the whole batch only, not on the number of ranks. One more slot, after the last bucket,
is shared by all ids that have none.

``Vocabulary`` stores the id of each slot, how it was used, and which slots have a new id. ``hash_ids`` mixes an id's
bits. ``draw_rows`` draws initial rows that depend on the ids only.

Decision: 0097.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

WAYS = 32
ABSENT = -1  # in place of an id: there is none
EMPTY = np.iinfo(np.int64).min  # the id of a slot that is free
_LAST = np.iinfo(np.int64).max
EVICTS = ("lru", "lfu")


class PlacedIds(NamedTuple):
    """Holds the slots of a batch's ids.

    Attributes:
      slots: the slot of each id, [n], int64.
      new: the slots that this step gave to ids, [m].
      new_ids: the ids that got these slots, [m].
    """

    slots: tf.Tensor
    new: tf.Tensor
    new_ids: tf.Tensor


class Vocabulary:
    """Stores which id has which of the slots 0 to ``slots - 1``; slot ``slots`` is for ids that have none.

    Args:
      add: creates a variable of the layer, as ``add(name, shape, dtype, initial value)``.
      slots: number of slots, rounded up to whole buckets.
      evict: which id makes room: "lru", the one that was used longest ago, or "lfu", the one that was used least often.
    """

    def __init__(self, add: Callable[[str, tuple[int, ...], str, int], Any], slots: int, evict: str) -> None:
        self.ways = min(WAYS, slots)
        self.buckets = -(-slots // self.ways)
        self.slots, self.evict = self.buckets * self.ways, evict
        self.ids = add("ids", (self.slots + 1,), "int64", EMPTY)
        self.used = add("used", (self.slots + 1,), "int64", 0)
        self.fresh = add("fresh", (self.slots + 1,), "int32", 0)
        self.clock = add("clock", (), "int64", 0)

    def find_slots(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the slots of ids [n], int64, without admitting new ones; an id without a slot gets the last slot."""
        at = self._find_bucket(ids)
        hit = self._find_hits(ids, at)
        return self._choose(tf.reduce_any(hit, 1), at, tf.argmax(hit, 1))

    def place_ids(self, ids: tf.Tensor, counted: tf.Tensor) -> PlacedIds:
        """Returns the slots of ids [n], int64, and gives slots to ids that have none, taking them from ids of earlier
        batches if no slot is free.

        If a bucket has more new ids than slots that can be given away, the last of them get no slot.

        Args:
          ids: the ids of the batch, [n], int64; an id may occur several times.
          counted: bool [n]: whether this occurrence counts as a use of the id.
        """
        once, back = tf.unique(ids)
        many = tf.size(once)
        uses = tf.math.unsorted_segment_sum(tf.cast(counted, tf.int64), back, many)
        at = self._find_bucket(once)
        hit = self._find_hits(once, at)
        known = tf.reduce_any(hit, 1)
        missing = ~known & _is_id(once)
        # Other ids of the batch may be in the same bucket: find the slots these have, and the order of the new ones.
        buckets, bucket = tf.unique(at[:, 0])
        count = tf.size(buckets)
        busy = tf.gather(tf.math.unsorted_segment_max(tf.cast(hit, tf.int32), bucket, count), bucket) > 0
        place = _count_before(tf.where(missing, bucket, count), count + 1)
        used = tf.gather(find_tensor(self.used), at)
        empty = tf.gather(find_tensor(self.ids), at) == EMPTY
        worth = tf.where(busy, _LAST, tf.where(empty, tf.constant(-1, tf.int64), used))
        by_worth = tf.argsort(worth, 1, stable=True)
        given = missing & (place < self.ways - tf.reduce_sum(tf.cast(busy, tf.int32), 1))
        way = tf.gather(by_worth, tf.minimum(place, self.ways - 1)[:, None], batch_dims=1)[:, 0]
        way = tf.where(known, tf.argmax(hit, 1), tf.cast(way, tf.int64))
        has = known | given
        slots = self._choose(has, at, way)
        # The last slot is shared by many ids: its usage stays 0.
        now = self.clock.assign_add(1)
        before = tf.where(known, tf.gather(find_tensor(self.used), slots), 0)
        score = before + uses if self.evict == "lfu" else tf.fill([many], tf.convert_to_tensor(now))
        new, new_ids = tf.boolean_mask(slots, given), tf.boolean_mask(once, given)
        write(self.used, slots, tf.where(has, score, 0))
        write(self.ids, new, new_ids)
        return PlacedIds(tf.gather(slots, back), new, new_ids)

    def _find_bucket(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the slots of each id's bucket, [n, ways], int64."""
        first = tf.math.floormod(hash_ids(ids), tf.constant(self.buckets, tf.int64)) * self.ways
        return first[:, None] + tf.range(self.ways, dtype=tf.int64)

    def _find_hits(self, ids: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
        return (tf.gather(find_tensor(self.ids), at) == ids[:, None]) & _is_id(ids)[:, None]

    def _choose(self, has: tf.Tensor, at: tf.Tensor, way: tf.Tensor) -> tf.Tensor:
        return tf.where(has, at[:, 0] + way, tf.constant(self.slots, tf.int64))


def draw_rows(ids: tf.Tensor, width: int, low: float, high: float, dtype: Any) -> tf.Tensor:
    """Draws initial rows [n, width] for ids [n], uniform in [low, high); an id always gets the same row."""
    columns = tf.constant(np.arange(1, width + 1, dtype=np.int64))
    bits = hash_ids(hash_ids(ids)[:, None] + columns * _to_signed(0x9E3779B97F4A7C15))
    even = tf.cast(_shift_right(bits, 11), tf.float64) * 2.0**-53
    return tf.cast(low + (high - low) * even, dtype)


def hash_ids(ids: tf.Tensor) -> tf.Tensor:
    """Returns int64 hashes in which all bits of an id are mixed: the last steps of splitmix64 (Steele et al., 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        ids = tf.bitwise.bitwise_xor(ids, _shift_right(ids, shift)) * _to_signed(factor)
    return tf.bitwise.bitwise_xor(ids, _shift_right(ids, 31))


def find_tensor(variable: Any) -> Any:
    """Returns the tf.Variable behind a Keras variable; a tf.Variable is returned unchanged."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def write(variable: Any, slots: tf.Tensor, rows: tf.Tensor) -> None:
    """Writes ``rows`` [n, ...] to the rows ``slots`` [n] of a variable."""
    find_tensor(variable).scatter_update(tf.IndexedSlices(rows, slots))


def _is_id(ids: tf.Tensor) -> tf.Tensor:
    return (ids != ABSENT) & (ids != EMPTY)


def _count_before(groups: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Returns, for each element of ``groups`` [n], how many elements of the same group come before it.

    Args:
      groups: group numbers, from 0 to ``count - 1``.
    """
    order = tf.argsort(groups, stable=True)
    sizes = tf.math.unsorted_segment_sum(tf.ones_like(groups), groups, count)
    places = tf.range(tf.size(groups)) - tf.gather(tf.cumsum(sizes, exclusive=True), tf.gather(groups, order))
    return tf.gather(places, tf.argsort(order))


def _shift_right(numbers: tf.Tensor, by: int) -> tf.Tensor:
    """Shifts unsigned 64-bit numbers, stored as int64, to the right; zeros come in from the left."""
    kept = tf.constant((1 << (64 - by)) - 1, tf.int64)
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(numbers, tf.constant(by, tf.int64)), kept)


def _to_signed(bits: int) -> tf.Tensor:
    return tf.constant(bits - (1 << 64) if bits >> 63 else bits, tf.int64)
