"""Implements ``wh.layers.Embedding``: a table of rows by ids, one row for each id or one for each bag of ids.

The layer enters ``wh.split`` itself where a run has begun. Bags are dense inside: [batch, k] ids of which some are
absent (negative), so that shapes are known, and what is divided is what any lookup's rows are. Which slot an id has is
in ``whale.frontends.layers.vocabulary``.

Rows that nearly every part of a batch uses may be hot: with a skewed access pattern the ranks that have them send most
of the traffic. If they are replicated, their gradients are all-reduced, which costs all ranks the same. ``hot_ids``
finds, from a sample of batches, the rows for which it pays.

Decisions: 0112, 0118, 0122.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from whale.annotations import replica, split
from whale.errors import ProgramError
from whale.frontends.layers.vocabulary import ABSENT, EVICTS, Vocabulary, draw_rows, find_tensor, write
from whale.runtime.context import find_running
from whale.runtime.variables.in_files import keep_in_files

_ARGUMENTS = "input_dim output_dim combiner max_ids sharded evict folder hot"
_HASHES = (1 << 63) - 1
_COMBINERS = (None, "sum", "mean", "sqrtn")
_SHARDED = {None: None, "rows": 0, "columns": -1}  # the dimension of what is looked up that is divided

# Of `add_weight`: what is looked up is rounded, not the table.
NEVER_ROUNDED: dict[str, Any] = {"autocast" if hasattr(tf.keras, "ops") else "experimental_autocast": False}


class _Bags(NamedTuple):
    """The bags of a lookup: ids [..., k], whether each is present, and weights [..., k] or None."""

    ids: tf.Tensor
    present: tf.Tensor
    weights: tf.Tensor | None


class Embedding(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer that returns rows of a table [input_dim, output_dim] by their ids.

    Over ranks the table is sharded: by rows each rank asks the others for rows by ids, by columns it has a part of each
    row. Layers of one step exchange together. Without a combiner each id gives a row: ids [...] -> [..., output_dim].
    With one, the ids of a bag give one row:

    * dense [batch, ..., k]; negative ids are absent;
    * ``tf.RaggedTensor`` or ``tf.SparseTensor`` [batch, k]; ``max_ids`` says k where the shape does not.

    Weights have the form of the ids. As in ``tf.nn.embedding_lookup_sparse``, "sum" adds up weight * row, "mean"
    divides this by the sum of the weights, "sqrtn" by the root of the sum of their squares. A bag without ids gives
    zeros.

    A ``dynamic`` table has slots in place of rows. Any int64 is an id, or any string (63 bits of its hash, that is); -1
    and "" are absent. In training an id without a slot is given one, whose row is drawn anew (the same whenever the
    id is admitted), and the id that was used longest ago, or least often, loses its slot when there is no other. Ids
    that find none, as new ones do outside of training, share a last row. Slots follow from the batches alone: with any
    number of ranks they are the same. ``wh.optimizers.lazy`` makes an optimizer begin anew with a slot's new id.

    Args:
      input_dim, output_dim: rows of the table, and columns. Slots of a dynamic one are rounded up to a multiple of 32.
      combiner: None, "sum", "mean" or "sqrtn".
      max_ids: ids of the largest bag of ragged or sparse inputs; more are an error.
      sharded: "rows", "columns", "whole" (on every rank), or None: rows or columns, whichever costs less. What
        a dynamic table writes to its rows needs columns, or the whole table.
      embeddings_initializer: of the table; of a dynamic one uniform, zeros or a constant.
      dynamic: whether ids are given slots.
      evict: who makes room: "lru" (last used longest ago) or "lfu" (used least often).
      folder: of a local disk; over ranks a sharded table, and a lazy optimizer's state of its shape, lie in files there
        instead of memory.
      hot: ids whose rows lie on every rank (``wh.layers.hot_ids`` finds them), or how many of the first rows do: their
        gradients are all-reduced, and the ids are not sent. The other rows lie by rows. They are `hot_rows`, of ids
        `hot_ids`, which a checkpoint brings along; the rows of these ids in `embeddings` are not used. A lazy
        optimizer changes all of them in each step.

    Raises:
      ProgramError: arguments or inputs that fit no table.
    """

    def __init__(
        self, input_dim: int, output_dim: int, combiner: str | None = None, max_ids: int | None = None,
        sharded: str | None = None, embeddings_initializer: Any = "uniform", dynamic: bool = False,
        evict: str = "lru", folder: str | None = None, hot: int | Sequence[int] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(**more)
        _check(input_dim > 0 < output_dim, f"input_dim={input_dim}, output_dim={output_dim}", "positive sizes")
        _check(combiner in _COMBINERS, f"combiner={combiner!r}", "None, sum, mean or sqrtn")
        _check(sharded in (*_SHARDED, "whole"), f"sharded={sharded!r}", "None, rows, columns or whole")
        self.input_dim, self.output_dim, self.combiner = input_dim, output_dim, combiner
        _check(not dynamic or sharded != "rows", "dynamic=True, sharded='rows'", "columns, whole or None")
        _check(evict in EVICTS, f"evict={evict!r}", " or ".join(EVICTS))
        _check(folder is None or sharded != "whole", f"folder={folder!r}, sharded='whole'", "rows, columns or None")
        self.max_ids, self.sharded, self.grows, self.evict, self.folder = max_ids, sharded, dynamic, evict, folder
        _check(hot is None or sharded in (None, "rows"), f"hot={hot!r:.80}, sharded={sharded!r}", "rows or None")
        _check(hot is None or not dynamic, f"hot={hot!r:.80}, dynamic=True", "one of them")
        self.hot = _check_hot(hot, input_dim)
        self.embeddings_initializer = tf.keras.initializers.get(embeddings_initializer)
        self._starts = _find_row_range(self.embeddings_initializer) if dynamic else None
        self.vocabulary: Vocabulary | None = None

    def build(self, inputs_shape: Any = None, weights_shape: Any = None) -> None:
        """Makes the table."""
        rows = self.input_dim
        if self.grows:
            self.vocabulary = Vocabulary(self._add_slots, self.input_dim, self.evict)
            rows = self.vocabulary.slots + 1
        with self._enter_table_scope():  # a run then makes the parts only
            self.embeddings = self.add_weight(
                name="embeddings",
                shape=(rows, self.output_dim),
                initializer=self.embeddings_initializer,
                **NEVER_ROUNDED,
            )
        if self.hot is not None:
            ids = np.sort(np.asarray(self.hot, np.int64))  # a variable: a checkpoint's rows come with their own
            self.hot_ids = self._add_state("hot_ids", ids.shape, "int64", ids)
            self.hot_rows = self.add_weight(
                name="hot_rows",
                shape=(len(ids), self.output_dim),
                initializer=_make_like(self.embeddings_initializer),
                **NEVER_ROUNDED,
            )
        if self.folder is not None:
            keep_in_files(find_tensor(self.embeddings), self.folder)
        if self.vocabulary is not None:
            find_tensor(self.embeddings)._whale_fresh = self.vocabulary.fresh  # for lazy optimizers
        self.built = True

    def _add_slots(self, name: str, shape: tuple[int, ...], dtype: str, first: int) -> Any:
        variable = self._add_state(name, shape, dtype, first)
        setattr(self, f"slot_{name}", variable)  # checkpoints and exported models go by attributes of layers
        return variable

    def _add_state(self, name: str, shape: tuple[int, ...], dtype: str, first: Any) -> Any:
        def make_initial(shape: Any, dtype: Any = None, **_: Any) -> tf.Tensor:
            return tf.broadcast_to(tf.constant(first, dtype), shape)

        return self.add_weight(name=name, shape=shape, dtype=dtype, initializer=make_initial, trainable=False)

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None) -> tf.Tensor:
        """Returns a row for each id, or for each bag."""
        _check(weights is None or self.combiner is not None, "weights", "a combiner, where there are weights")
        with _enter_scope(replica):
            bags = self._read_bags(inputs, weights)
            ids = bags.ids
            if self.combiner is not None:
                # An absent id is replaced by a present one, so that no other row is touched.
                some = tf.reduce_max(tf.where(bags.present, ids, ids.dtype.min), -1, keepdims=True)
                ids = tf.where(bags.present, ids, some if self.grows else tf.maximum(some, 0))
            shape, flat = tf.shape(ids), tf.reshape(ids, [-1])
            if self.vocabulary is not None:
                flat = self._find_slots(self.vocabulary, flat, tf.reshape(bags.present, [-1]), bool(training))
            if self.hot is not None:
                of_hot, is_hot, flat = _look_up(find_tensor(self.hot_ids), find_tensor(self.hot_rows), flat)
        with self._enter_table_scope():
            rows = tf.gather(find_tensor(self.embeddings), flat)
            if self.hot is not None:
                rows = tf.where(is_hot[:, None], of_hot, rows)
            rows = tf.cast(tf.reshape(rows, tf.concat([shape, [self.output_dim]], 0)), self.compute_dtype)
            if self.combiner is not None:
                rows = _combine(rows, bags, self.combiner)
        with _enter_scope(replica):
            return tf.identity(rows)

    def _find_slots(self, vocabulary: Vocabulary, ids: tf.Tensor, present: tf.Tensor, training: bool) -> tf.Tensor:
        if not training:
            return vocabulary.find_slots(ids)
        placed = vocabulary.place_ids(ids, present)
        low, high = self._starts or (0.0, 0.0)
        with self._enter_table_scope():  # where optimizers read what is new
            write(vocabulary.fresh, placed.new, tf.ones_like(placed.new, tf.int32))
            write(
                self.embeddings,
                placed.new,
                draw_rows(placed.new_ids, self.output_dim, low, high, self.embeddings.dtype),
            )
        return placed.slots

    def _read_bags(self, inputs: Any, weights: Any) -> _Bags:
        alike = weights is None or _is_composite(weights) == _is_composite(inputs)
        _check(alike, "weights of another form than the ids", "both dense, ragged, or sparse")
        ids = self._make_dense(inputs, "" if inputs.dtype == tf.string else ABSENT)
        if self.grows and ids.dtype == tf.string:
            ids = tf.where(ids == "", tf.constant(ABSENT, tf.int64), tf.strings.to_hash_bucket_fast(ids, _HASHES))
        if self.grows or ids.dtype not in (tf.int32, tf.int64):
            ids = tf.cast(ids, tf.int64)
        if weights is not None:
            weights = tf.cast(self._make_dense(weights, 0), self.compute_dtype)
        return _Bags(ids, ids != ABSENT if self.grows else ids >= 0, weights)

    def _make_dense(self, value: Any, absent: int | str) -> tf.Tensor:
        if isinstance(value, tf.RaggedTensor):
            given = f"ragged inputs {value.shape}, max_ids={self.max_ids}"
            _check(self.max_ids is not None and value.shape.rank == 2, given, "[batch, ragged] and max_ids")
            largest = tf.reduce_max(value.row_lengths())
            fits = tf.debugging.Assert(largest <= self.max_ids, ["a bag of more ids than max_ids", largest])
            with tf.control_dependencies([fits] if fits is not None else []):  # None: eagerly it has been looked at
                return value.to_tensor(absent, shape=[value.shape[0], self.max_ids])
        if isinstance(value, tf.SparseTensor):
            return tf.sparse.to_dense(value, tf.constant(absent, value.dtype))
        return tf.convert_to_tensor(value)

    def _enter_table_scope(self) -> AbstractContextManager[Any]:
        if self.sharded == "whole":
            return _enter_scope(replica)
        sharded = "rows" if self.hot is not None else self.sharded
        return split(dim=_SHARDED[sharded]) if find_running() is not None else nullcontext()

    def compute_output_shape(self, inputs_shape: Any, weights_shape: Any = None) -> Any:
        """Returns the shape of the ids (of bags, without their last dimension) with ``output_dim`` as one size more."""
        lead = tuple(inputs_shape) if self.combiner is None else tuple(inputs_shape)[:-1]
        return (*lead, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        mine = {name: getattr(self, name) for name in _ARGUMENTS.split()}
        start = tf.keras.initializers.serialize(self.embeddings_initializer)
        # Keras 2 has an attribute `dynamic` of its own, and an argument, which it saves.
        return {**super().get_config(), **mine, "embeddings_initializer": start, "dynamic": self.grows}


def _combine(rows: tf.Tensor, bags: _Bags, combiner: str) -> tf.Tensor:
    """Combines rows of bags [..., k, width] to [..., width]."""
    present = tf.cast(bags.present, rows.dtype)
    weights = present if bags.weights is None else present * bags.weights
    found = tf.reduce_sum(rows * weights[..., None], -2)
    if combiner == "sum":
        return found
    over = tf.reduce_sum(weights, -1) if combiner == "mean" else tf.sqrt(tf.reduce_sum(weights * weights, -1))
    return tf.math.divide_no_nan(found, over[..., None])


def _find_row_range(initializer: Any) -> tuple[float, float]:
    """Returns the lowest and the highest value with which rows of new ids begin."""
    found = initializer.get_config()
    if {"minval", "maxval"} <= set(found):
        return float(found["minval"]), float(found["maxval"])
    _check(set(found) <= {"value"}, f"embeddings_initializer={initializer!r}", "uniform, zeros or a constant")
    return (float(found.get("value", type(initializer).__name__ == "Ones")),) * 2


def _is_composite(value: Any) -> bool:
    return isinstance(value, (tf.RaggedTensor, tf.SparseTensor))


def _enter_scope(kind: Any) -> AbstractContextManager[Any]:
    return kind() if find_running() is not None else nullcontext()


def _check(good: bool, given: str, expected: str) -> None:
    if not good:
        raise ProgramError("the arguments describe no valid table", given=given, expected=expected, action="change it")


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


def _look_up(hot_ids: tf.Variable, hot_rows: tf.Variable, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
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


def _make_like(initializer: Any) -> Any:
    """Returns an initializer of the same kind with other random numbers, so that hot rows differ from other rows."""
    if not hasattr(initializer, "get_config"):
        return initializer
    config = initializer.get_config()
    if isinstance(config.get("seed"), int):
        config["seed"] += 1
    return type(initializer).from_config(config)


def _check_hot(hot: Any, rows: int) -> list[int] | None:
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
