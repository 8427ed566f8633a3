"""Defines the reductions over ranks (``hvd.Average``, ...) and the dtypes in which tensors are sent
(``hvd.Compression``).
"""

from __future__ import annotations

import enum
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError


class ReduceOp(enum.Enum):
    """Names a reduction over the ranks; the value is the reduction's name in Whale's exchanges."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "prod"
    ADASUM = "adasum"


Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX
Product, Adasum = ReduceOp.PRODUCT, ReduceOp.ADASUM


def find_reduction(op: ReduceOp | None, average: bool | None = None, allowed: tuple[ReduceOp, ...] = ()) -> ReduceOp:
    """Returns the reduction that the arguments ``op`` and ``average`` of a Horovod function ask for; ``Average`` by
    default.

    Args:
      op: the reduction; None: not given.
      average: deprecated: True for ``Average``, False for ``Sum``; None: not given.
      allowed: the reductions that the calling function supports; empty: all.

    Raises:
      ProgramError: both arguments are given, ``op`` is no ReduceOp or is ``Adasum``, or it is not allowed.
    """
    if op is not None and average is not None:
        raise ProgramError(
            "the reduction is given twice, by op and by average",
            given=f"op={op}, average={average}",
            expected="op alone",
            action="remove average",
        )
    if average is not None:
        op = Average if average else Sum
    found = Average if op is None else op
    if not isinstance(found, ReduceOp):
        raise ProgramError(
            "op is not a reduction of whale.horovod",
            given=f"op={op!r}",
            expected="hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product, with hvd from whale.horovod",
            action="import whale.horovod instead of horovod everywhere in the script",
        )
    if found is Adasum:
        raise ProgramError(
            "Whale does not implement the reduction Adasum",
            given="op=hvd.Adasum",
            expected="hvd.Average or hvd.Sum",
            action="use hvd.Average, and multiply a learning rate that was tuned for Adasum by hvd.size()",
        )
    if allowed and found not in allowed:
        raise ProgramError(
            "the function does not support this reduction",
            given=f"op=hvd.{found.name.capitalize()}",
            expected=" or ".join(f"hvd.{other.name.capitalize()}" for other in allowed),
            action="pass one of these as op",
        )
    return found


def multiply(tensor: Any, factor: float) -> Any:
    """Multiplies ``tensor`` by a number and keeps the tensor's dtype; integer results are truncated towards 0."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return tensor * tf.cast(factor, tensor.dtype)
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def divide_by_size(tensor: Any, size: int) -> Any:
    """Divides ``tensor`` by ``size``, e.g. the number of ranks, and keeps the dtype; integers are truncated
    towards 0.
    """
    if size == 1:
        return tensor
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return tensor / tf.cast(size, tensor.dtype)
    return tf.truncatediv(tensor, tf.cast(size, tensor.dtype))


class Compressor:
    """Defines the form in which tensors are sent; a script may derive its own class with both static methods."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns (the tensor to send, the context for ``decompress``)."""
        raise _make_missing_error("compress")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns a received tensor in the form that it had before ``compress``.

        Args:
          ctx: the context that ``compress`` has returned.
        """
        raise _make_missing_error("decompress")


def _make_missing_error(method: str) -> ProgramError:
    return ProgramError(
        f"a subclass of hvd.Compression's Compressor lacks the method {method}",
        given=f"a class derived from Compressor without {method}",
        expected="static methods compress(tensor) and decompress(tensor, ctx)",
        action=f"define {method}, or use hvd.Compression.none or hvd.Compression.fp16",
    )


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns (``tensor``, None)."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns ``tensor`` unchanged."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16, and other tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns (the tensor as float16 if it is floating-point, its original dtype)."""
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Casts a received tensor back to its original dtype ``ctx``."""
        return tf.cast(tensor, ctx)


class Compression:
    """Lists the compressors that scripts choose from: ``hvd.Compression.none`` and ``hvd.Compression.fp16``."""

    none = NoneCompressor
    fp16 = FP16Compressor
