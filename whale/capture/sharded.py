"""A rank's rows of a tensor whose whole is spread over the ranks: what a step can be called with."""

from __future__ import annotations

from typing import Any, NoReturn

import tensorflow as tf

from whale.errors import ProgramError


class ShardedTensor:
    """One rank's part of a global batch: the rows that this rank read, and the shape of the whole.

    A step of ``wh.function`` takes it where it would take the whole tensor. It is no tensor itself: computing with it
    outside a step is an error.

    Args:
      local: this rank's rows, [sizes[rank], ...].
      sizes: rows of every rank; the whole has their sum.
      rank: the rank that holds ``local``.
    """

    __slots__ = ("__weakref__", "_key", "local", "rank", "shape", "sizes")

    def __init__(self, local: tf.Tensor, sizes: tuple[int, ...], rank: int) -> None:
        dims = local.shape.as_list()
        if dims[0] != sizes[rank]:
            raise ProgramError(
                "a rank's part of a batch has another number of rows than its share",
                given=f"{dims[0]} rows on rank {rank}",
                expected=f"{sizes[rank]} rows, of the shares {list(sizes)}",
                action="give every rank the rows of its share",
            )
        self.local, self.sizes, self.rank = local, sizes, rank
        self.shape = tf.TensorShape([sum(sizes), *dims[1:]])
        self._key = (tuple(self.shape.as_list()), sizes)

    @property
    def dtype(self) -> tf.DType:
        """The element type, of the rows here as of the whole."""
        return self.local.dtype

    def _shape_tuple(self) -> tuple[Any, ...]:
        """What tells it from tensors and parts of other shapes, where an eager tensor gives its shape."""
        return self._key

    def __repr__(self) -> str:
        return f"<wh.ShardedTensor: shape={self.shape}, dtype={self.dtype.name}, rows={list(self.sizes)}>"

    def __tf_tensor__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise ProgramError(
            "a rank's part of a batch is used as a tensor",
            given=f"{self!r}, of which rank {self.rank} holds {self.sizes[self.rank]} rows",
            expected="an argument of a step of wh.function, which computes with the whole batch",
            action="move the computation into the step, or use `.local` for this rank's rows alone",
        )


# A comparison is one too; == and != stay those of objects, so that parts can be found in lists.
_OPERATORS = """add sub mul truediv floordiv mod pow matmul and or xor lt le gt ge neg invert abs
radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor getitem len iter bool int float index"""
for _name in _OPERATORS.split():
    setattr(ShardedTensor, f"__{_name}__", ShardedTensor._refuse)
