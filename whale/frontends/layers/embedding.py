"""Implements ``wh.layers.Embedding``, a table with one row per id, for single ids or for bags of ids.

In a run the layer enters ``wh.split`` itself, so that the table is sharded. Internally bags are dense: ids [batch, k],
in which negative ids are absent, so that shapes are static. ``whale.frontends.layers.vocabulary`` assigns slots to ids
of a dynamic table.

A row that nearly every rank uses in each batch costs its owner most of the traffic. Such hot rows can be replicated on
every rank; then their gradients are all-reduced, at an equal cost for all ranks. ``hot_ids`` finds in a sample of
batches the rows for which this pays.

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
_SHARDED = {None: None, "rows": 0, "columns": -1}  # which dimension of the table is sharded

# Arguments of `add_weight` that keep the table in its own dtype under mixed precision; only looked-up rows are cast.
NEVER_ROUNDED: dict[str, Any] = {"autocast" if hasattr(tf.keras, "ops") else "experimental_autocast": False}


class _Bags(NamedTuple):
    """Holds the inputs of a lookup in dense form.

    Attributes:
      ids: [..., k].
      present: bool [..., k]; False where the bag has fewer than k ids.
      weights: [..., k]; None: each id has weight 1.
    """

    ids: tf.Tensor
    present: tf.Tensor
    weights: tf.Tensor | None


class Embedding(tf.keras.layers.Layer):  # type: ignore[misc]
    """Looks up rows of a table [input_dim, output_dim] by ids, with the table sharded over the ranks of a run.

    If the table is sharded by rows, ranks exchange ids and rows; if by columns, each rank has a part of each row.
    Lookups of several layers in a step are exchanged together.

    Without a combiner each id gives one row: ids [...] -> [..., output_dim]. With a combiner, each bag of ids gives one
    row. Bags are given as

    * a dense tensor [batch, ..., k], in which negative ids are absent;
    * a ``tf.RaggedTensor`` or ``tf.SparseTensor`` [batch, k]; ``max_ids`` gives k if the shape does not.

    Weights have the same form as ids. As in ``tf.nn.embedding_lookup_sparse``, "sum" adds up weight * row, "mean"
    divides this by the sum of the weights, and "sqrtn" by the root of the sum of their squares. A bag without ids gives
    zeros.

    A ``dynamic`` table takes any int64 as an id, or any string, of which it uses a 63-bit hash; -1 and "" are absent.
    Its rows are slots. In training an id without a slot gets one, with a new initial row, which is the same whenever
    the id is admitted. If no slot is free, the id that was used longest ago, or least often, loses its slot. Ids that
    get no slot, and unknown ids outside of training, share one last row. Slots depend on the batches only, not on the
    number of ranks. ``wh.optimizers.lazy`` makes an optimizer reset its state for a slot that gets a new id.

    Args:
      input_dim: number of rows; for a dynamic table number of slots, rounded up to a multiple of 32.
      output_dim: number of columns.
      combiner: None, "sum", "mean" or "sqrtn".
      max_ids: largest number of ids in a bag of ragged or sparse inputs; a larger bag is an error.
      sharded: "rows", "columns", "whole" (every rank has the table), or None: rows or columns, whichever costs less. A
        dynamic table cannot be sharded by rows, since it writes to its rows.
      embeddings_initializer: initializer of the table; for a dynamic table uniform, zeros, ones or a constant.
      dynamic: whether ids are assigned to slots.
      evict: which id loses its slot: "lru" (used longest ago) or "lfu" (used least often).
      folder: a folder on a local disk. In a run with several ranks, a sharded table, and the state of a lazy optimizer
        for it, are then stored in files there instead of memory.
      hot: ids whose rows every rank has (see ``wh.layers.hot_ids``), or a number n for the first n rows. Their
        gradients are all-reduced and the ids are not sent; the other rows are sharded by rows. The hot rows are the
        variable `hot_rows`, their ids the variable `hot_ids`, both saved in checkpoints; the same rows in `embeddings`
        are unused. A lazy optimizer updates all hot rows in each step.

    Raises:
      ProgramError: the arguments contradict each other, or inputs do not fit them.
    """

    def __init__(
        self, input_dim: int, output_dim: int, combiner: str | None = None, max_ids: int | None = None,
        sharded: str | None = None, embeddings_initializer: Any = "uniform", dynamic: bool = False,
        evict: str = "lru", folder: str | None = None, hot: int | Sequence[int] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(**more)
        _check(
            input_dim > 0 < output_dim,
            f"input_dim={input_dim}, output_dim={output_dim}",
            "input_dim and output_dim of 1 or more",
        )
        _check(combiner in _COMBINERS, f"combiner={combiner!r}", "combiner None, 'sum', 'mean' or 'sqrtn'")
        _check(sharded in (*_SHARDED, "whole"), f"sharded={sharded!r}", "sharded None, 'rows', 'columns' or 'whole'")
        self.input_dim, self.output_dim, self.combiner = input_dim, output_dim, combiner
        _check(
            not dynamic or sharded != "rows",
            "dynamic=True, sharded='rows'",
            "with dynamic=True, sharded 'columns', 'whole' or None",
        )
        _check(evict in EVICTS, f"evict={evict!r}", "evict " + " or ".join(map(repr, EVICTS)))
        _check(
            folder is None or sharded != "whole",
            f"folder={folder!r}, sharded='whole'",
            "with folder, sharded 'rows', 'columns' or None",
        )
        self.max_ids, self.sharded, self.grows, self.evict, self.folder = max_ids, sharded, dynamic, evict, folder
        _check(
            hot is None or sharded in (None, "rows"),
            f"hot={hot!r:.80}, sharded={sharded!r}",
            "with hot, sharded 'rows' or None",
        )
        _check(hot is None or not dynamic, f"hot={hot!r:.80}, dynamic=True", "hot or dynamic, not both")
        self.hot = _check_hot(hot, input_dim)
        self.embeddings_initializer = tf.keras.initializers.get(embeddings_initializer)
        self._starts = _find_row_range(self.embeddings_initializer) if dynamic else None
        self.vocabulary: Vocabulary | None = None

    def build(self, inputs_shape: Any = None, weights_shape: Any = None) -> None:
        """Creates the variables of the layer."""
        rows = self.input_dim
        if self.grows:
            self.vocabulary = Vocabulary(self._add_slots, self.input_dim, self.evict)
            rows = self.vocabulary.slots + 1
        with self._enter_table_scope():  # in a run, each rank then creates its part only
            self.embeddings = self.add_weight(
                name="embeddings",
                shape=(rows, self.output_dim),
                initializer=self.embeddings_initializer,
                **NEVER_ROUNDED,
            )
        if self.hot is not None:
            ids = np.sort(np.asarray(self.hot, np.int64))  # in a variable, so that a checkpoint restores ids with rows
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
        """Returns one row per id, or one per bag if there is a combiner.

        Args:
          inputs: ids: a dense tensor, a RaggedTensor or a SparseTensor.
          weights: weights of the ids, in the same form; None: 1 for each id.
          training: whether a dynamic table gives slots to new ids.
        """
        _check(
            weights is None or self.combiner is not None,
            "weights of the ids, and combiner=None",
            "combiner='sum', 'mean' or 'sqrtn' if weights are passed",
        )
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
        _check(alike, "weights of another form than the ids", "ids and weights both dense, both ragged or both sparse")
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
            _check(
                self.max_ids is not None and value.shape.rank == 2,
                given,
                "ragged inputs of shape [batch, None], and the argument max_ids",
            )
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
        """Returns the shape of the ids with ``output_dim`` appended; with a combiner the last dimension of the ids is
        dropped.
        """
        lead = tuple(inputs_shape) if self.combiner is None else tuple(inputs_shape)[:-1]
        return (*lead, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for Keras' serialization."""
        mine = {name: getattr(self, name) for name in _ARGUMENTS.split()}
        start = tf.keras.initializers.serialize(self.embeddings_initializer)
        # Keras 2 has an attribute `dynamic` of its own, and an argument, which it saves.
        return {**super().get_config(), **mine, "embeddings_initializer": start, "dynamic": self.grows}


def _combine(rows: tf.Tensor, bags: _Bags, combiner: str) -> tf.Tensor:
    """Combines the rows of each bag: [..., k, width] -> [..., width].

    Args:
      combiner: "sum", "mean" or "sqrtn".
    """
    present = tf.cast(bags.present, rows.dtype)
    weights = present if bags.weights is None else present * bags.weights
    found = tf.reduce_sum(rows * weights[..., None], -2)
    if combiner == "sum":
        return found
    over = tf.reduce_sum(weights, -1) if combiner == "mean" else tf.sqrt(tf.reduce_sum(weights * weights, -1))
    return tf.math.divide_no_nan(found, over[..., None])


def _find_row_range(initializer: Any) -> tuple[float, float]:
    """Returns the (lowest, highest) value in an initial row of a dynamic table.

    Raises:
      ProgramError: the initializer is not uniform, zeros, ones or constant.
    """
    found = initializer.get_config()
    if {"minval", "maxval"} <= set(found):
        return float(found["minval"]), float(found["maxval"])
    _check(
        set(found) <= {"value"},
        f"embeddings_initializer={initializer!r}",
        "with dynamic=True, uniform, zeros, ones or a constant",
    )
    return (float(found.get("value", type(initializer).__name__ == "Ones")),) * 2


def _is_composite(value: Any) -> bool:
    return isinstance(value, (tf.RaggedTensor, tf.SparseTensor))


def _enter_scope(kind: Any) -> AbstractContextManager[Any]:
    return kind() if find_running() is not None else nullcontext()


def _check(good: bool, given: str, expected: str) -> None:
    if not good:
        raise ProgramError(
            "wh.layers.Embedding does not accept these arguments or inputs",
            given=given,
            expected=expected,
            action="change this argument of wh.layers.Embedding, or the inputs of its call",
        )


def hot_ids(batches: Iterable[Any], ranks: int, *, count: int | None = None) -> list[int]:
    """Returns the ids whose rows should be on every rank, found in a sample of batches; the most used ones come first.

    A rank that owns a row sends the row to each other rank that has the id in its part of the batch, and receives as
    many gradients. With an all-reduce of the gradient, each rank sends and receives 2 (ranks - 1) / ranks rows instead.
    So the busiest rank has less to do if on average more than two parts of a batch have the id. With two ranks no id is
    hot.

    Args:
      batches: integer arrays of ids [batch, ...]; negative ids are absent.
      ranks: number of ranks over which a batch is divided.
      count: if given, returns this number of the most used ids, whether replication pays or not. E.g. as many rows as
        fit on the accelerators, while the table is in host memory (``memory.offload="tables"``).

    Raises:
      ProgramError: there is no batch, a batch has fewer rows than there are ranks, or it does not hold integers.
    """
    asked: Counter[int] = Counter()
    seen = 0
    for batch in batches:
        ids = np.asarray(batch)
        if ids.ndim == 0 or len(ids) < ranks or not np.issubdtype(ids.dtype, np.integer):
            raise ProgramError(
                "wh.layers.hot_ids needs batches of integer ids that can be divided over the ranks",
                given=f"an array {ids.dtype}{list(ids.shape)} for {ranks} ranks",
                expected=f"integers [batch, ...] with {ranks} rows or more",
                action="pass batches of ids as large as the global batches of training",
            )
        seen += 1
        for part in np.array_split(ids, ranks):
            asked.update(np.unique(part[part >= 0]).tolist())
    if not seen:
        raise ProgramError(
            "wh.layers.hot_ids needs at least one batch of ids",
            given="no batches",
            expected="a sample of batches",
            action="pass batches of ids as in training",
        )
    by_use = sorted(asked.items(), key=lambda item: (-item[1], item[0]))
    return [i for i, times in by_use if times > 2 * seen] if count is None else [i for i, _ in by_use[:count]]


def _look_up(hot_ids: tf.Variable, hot_rows: tf.Variable, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Looks up ids [n] among the hot ids.

    Args:
      hot_ids: the hot ids, sorted, [k].
      hot_rows: their rows, [k, width].
      ids: the ids of the batch, [n].

    Returns:
      (rows [n, width], of any content where an id is not hot; bool [n]: whether each id is hot; ids [n] to look up in
      the sharded table, where one hot id stands in for all hot ids, so that few rows are exchanged for them).
    """
    count, width = hot_rows.shape
    known = tf.cast(tf.convert_to_tensor(hot_ids), ids.dtype)
    place = tf.minimum(tf.searchsorted(known, ids), count - 1)
    hot = tf.gather(known, place) == ids
    # A reshape's gradient is dense: it is summed over the ranks as those of other layers are, whatever the ids.
    rows = tf.reshape(tf.convert_to_tensor(hot_rows), [count, width])
    return tf.gather(rows, tf.where(hot, place, 0)), hot, tf.where(hot, known[0], ids)


def _make_like(initializer: Any) -> Any:
    """Returns a copy of an initializer with another seed, so that hot rows differ from the table's rows."""
    if not hasattr(initializer, "get_config"):
        return initializer
    config = initializer.get_config()
    if isinstance(config.get("seed"), int):
        config["seed"] += 1
    return type(initializer).from_config(config)


def _check_hot(hot: Any, rows: int) -> list[int] | None:
    """Returns the list of hot ids that the argument ``hot`` stands for; None if it is None.

    Args:
      hot: ids, or a number n for the ids 0 to n - 1.
      rows: number of rows of the table.

    Raises:
      ProgramError: an id is no row of the table or occurs twice, or no row would be left that is not hot.
    """
    if hot is None:
        return None
    ids = list(range(hot)) if isinstance(hot, int) else [int(i) for i in hot]
    if not 0 < len(ids) < rows or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= rows:
        raise ProgramError(
            "wh.layers.Embedding does not accept this value of hot",
            given=f"hot={hot!r:.80} for a table of {rows} rows",
            expected=f"different ids from 0 to {rows - 1}, but not all of them; or a number from 1 to {rows - 1}",
            action="pass such ids as hot; wh.layers.hot_ids(batches, ranks) finds those for which it saves time",
        )
    return ids
