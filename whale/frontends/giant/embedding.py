"""``wh.layers.Embedding``: a table of rows by ids, one row for each id or one for each bag of ids.

The layer enters ``wh.split`` itself where a run has begun. Bags are dense inside: [batch, k] ids of which some are
absent (negative), so that shapes are known, and what is divided is what any lookup's rows are.

``Embedding``: the layer. ``_Bags``: ids and weights, dense. ``_combined``: rows of bags to a row for each bag.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from whale.annotations import replica, split
from whale.errors import ProgramError
from whale.runtime.run.context import running

_COMBINERS = (None, "sum", "mean", "sqrtn")
_SHARDED = {None: None, "rows": 0, "columns": -1}  # the dimension of what is looked up that is divided


class _Bags(NamedTuple):
    """Ids [..., k], of which those that are present are not negative, and their weights [..., k] or None."""

    ids: tf.Tensor
    weights: tf.Tensor | None


class Embedding(tf.keras.layers.Layer):  # type: ignore[misc]
    """Rows of a table [input_dim, output_dim] by their ids.

    Over ranks the table is sharded: by rows each rank asks the others for rows by ids, by columns it has a part of each
    row. Layers of one step exchange together. Without a combiner each id gives a row: ids [...] -> [..., output_dim].
    With one, the ids of a bag give one row:

    * dense [batch, ..., k]; negative ids are absent;
    * ``tf.RaggedTensor`` or ``tf.SparseTensor`` [batch, k]; ``max_ids`` says k where the shape does not.

    Weights have the form of the ids. As of ``tf.nn.embedding_lookup_sparse``: "sum" is that of weight * row, "mean" it
    over the sum of the weights, "sqrtn" it over the root of the sum of their squares. A bag without ids is zeros.

    Args:
      input_dim, output_dim: rows of the table, and columns.
      combiner: None, "sum", "mean" or "sqrtn".
      max_ids: ids of the largest bag of ragged or sparse inputs; more are an error.
      sharded: "rows", "columns", "whole" (on every rank), or None: rows or columns, whichever costs less.
      embeddings_initializer: of the table.

    Raises:
      ProgramError: arguments or inputs that fit no table.
    """

    def __init__(
        self, input_dim: int, output_dim: int, combiner: str | None = None, max_ids: int | None = None,
        sharded: str | None = None, embeddings_initializer: Any = "uniform", **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(**more)
        _check(input_dim > 0 < output_dim, f"input_dim={input_dim}, output_dim={output_dim}", "positive sizes")
        _check(combiner in _COMBINERS, f"combiner={combiner!r}", "None, sum, mean or sqrtn")
        _check(sharded in (*_SHARDED, "whole"), f"sharded={sharded!r}", "None, rows, columns or whole")
        self.input_dim, self.output_dim, self.combiner = input_dim, output_dim, combiner
        self.max_ids, self.sharded = max_ids, sharded
        self.embeddings_initializer = tf.keras.initializers.get(embeddings_initializer)

    def build(self, inputs_shape: Any = None, weights_shape: Any = None) -> None:
        """Makes the table."""
        self.embeddings = self.add_weight(
            name="embeddings", shape=(self.input_dim, self.output_dim), initializer=self.embeddings_initializer,
            autocast=False,
        )  # fmt: skip
        self.built = True

    def call(self, inputs: Any, weights: Any = None) -> tf.Tensor:
        """A row for each id, or for each bag."""
        _check(weights is None or self.combiner is not None, "weights", "a combiner, where there are weights")
        with _scope(replica):
            bags = self._bags(inputs, weights)
            # What is absent takes the place of a present one, so that no other row is touched.
            filled = tf.maximum(bags.ids, 0)
            if self.combiner is not None:
                some = tf.reduce_max(filled, -1, keepdims=True)
                filled = tf.where(bags.ids < 0, some, bags.ids)
            shape = tf.shape(filled)
            flat = tf.reshape(filled if self.combiner is not None else bags.ids, [-1])
        with self._table_scope():
            table = self.embeddings if isinstance(self.embeddings, tf.Variable) else self.embeddings.value
            rows = tf.gather(table, flat)
            rows = tf.cast(tf.reshape(rows, tf.concat([shape, [self.output_dim]], 0)), self.compute_dtype)
            if self.combiner is not None:
                rows = _combined(rows, bags, self.combiner)
        with _scope(replica):
            return tf.identity(rows)

    def _bags(self, inputs: Any, weights: Any) -> _Bags:
        alike = weights is None or _is_composite(weights) == _is_composite(inputs)
        _check(alike, "weights of another form than the ids", "both dense, ragged, or sparse")
        ids = self._dense(inputs, -1)
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        if weights is not None:
            weights = tf.cast(self._dense(weights, 0), self.compute_dtype)
        return _Bags(ids, weights)

    def _dense(self, value: Any, absent: int) -> tf.Tensor:
        if isinstance(value, tf.RaggedTensor):
            given = f"ragged inputs {value.shape}, max_ids={self.max_ids}"
            _check(self.max_ids is not None and value.shape.rank == 2, given, "[batch, ragged] and max_ids")
            largest = tf.reduce_max(value.row_lengths())
            fits = tf.debugging.Assert(largest <= self.max_ids, ["a bag of more ids than max_ids", largest])
            with tf.control_dependencies([fits] if fits is not None else []):  # None: eagerly it has been looked at
                return value.to_tensor(absent, shape=[value.shape[0], self.max_ids])
        if isinstance(value, tf.SparseTensor):
            return tf.sparse.to_dense(value, tf.cast(absent, value.dtype))
        return tf.convert_to_tensor(value)

    def _table_scope(self) -> AbstractContextManager[Any]:
        if self.sharded == "whole":
            return _scope(replica)
        return split(dim=_SHARDED[self.sharded]) if running() is not None else nullcontext()

    def compute_output_shape(self, inputs_shape: Any, weights_shape: Any = None) -> Any:
        """That of the ids, the last size or one more being ``output_dim``."""
        lead = tuple(inputs_shape) if self.combiner is None else tuple(inputs_shape)[:-1]
        return (*lead, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        mine = {name: getattr(self, name) for name in "input_dim output_dim combiner max_ids sharded".split()}
        start = tf.keras.initializers.serialize(self.embeddings_initializer)
        return {**super().get_config(), **mine, "embeddings_initializer": start}


def _combined(rows: tf.Tensor, bags: _Bags, combiner: str) -> tf.Tensor:
    """Rows [..., k, width] of bags to [..., width]."""
    present = tf.cast(bags.ids >= 0, rows.dtype)
    weights = present if bags.weights is None else present * bags.weights
    found = tf.reduce_sum(rows * weights[..., None], -2)
    if combiner == "sum":
        return found
    over = tf.reduce_sum(weights, -1) if combiner == "mean" else tf.sqrt(tf.reduce_sum(weights * weights, -1))
    return tf.math.divide_no_nan(found, over[..., None])


def _is_composite(value: Any) -> bool:
    return isinstance(value, (tf.RaggedTensor, tf.SparseTensor))


def _scope(kind: Any) -> AbstractContextManager[Any]:
    return kind() if running() is not None else nullcontext()


def _check(good: bool, given: str, expected: str) -> None:
    if not good:
        raise ProgramError("no table is like that", given=given, expected=expected, action="change it")
