"""Defines how tensors are reduced over the ranks and in which type they are sent: ``hvd.Average``,
``hvd.Compression``.
"""

from __future__ import annotations

import enum
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError


class ReduceOp(enum.Enum):
    """A reduction over the ranks; the value is its name in Whale's exchanges."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "prod"
    ADASUM = "adasum"


Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX
Product, Adasum = ReduceOp.PRODUCT, ReduceOp.ADASUM


def find_reduction(op: ReduceOp | None, average: bool | None = None, allowed: tuple[ReduceOp, ...] = ()) -> ReduceOp:
    """Returns the reduction for the arguments ``op`` and ``average`` (deprecated); ``Average`` by default.

    Raises:
      ProgramError: both are given, it is no reduction, it is ``Adasum``, or not one of ``allowed``.
    """
    if op is not None and average is not None:
        raise ProgramError(
            "a reduction is given twice", given=f"op={op}, average={average}", expected="op", action="remove average"
        )
    if average is not None:
        op = Average if average else Sum
    found = Average if op is None else op
    if not isinstance(found, ReduceOp):
        raise ProgramError(
            "the argument is not a reduction",
            given=f"op={op!r}",
            expected="hvd.Average, Sum, Min, Max or Product of whale.horovod",
            action="import hvd from whale.horovod everywhere in the script",
        )
    if found is Adasum:
        raise ProgramError(
            "Adasum is not built",
            given="op=hvd.Adasum",
            expected="hvd.Average or hvd.Sum",
            action="use hvd.Average, with the learning rate times hvd.size() where Adasum left it as it was",
        )
    if allowed and found not in allowed:
        raise ProgramError(
            "this exchange does not support the reduction",
            given=f"op={found.name}",
            expected=" or ".join(other.name for other in allowed),
            action="use one of these",
        )
    return found


def multiply(tensor: Any, factor: float) -> Any:
    """Multiplies ``tensor`` by a number, in the tensor's type; integers are truncated towards 0."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return tensor * tf.cast(factor, tensor.dtype)
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def divide_by_size(tensor: Any, size: int) -> Any:
    """Divides ``tensor`` by the number of ranks, in the tensor's type; integers are truncated towards 0."""
    if size == 1:
        return tensor
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return tensor / tf.cast(size, tensor.dtype)
    return tf.truncatediv(tensor, tf.cast(size, tensor.dtype))


class Compressor:
    """The form in which a tensor is sent; a script may derive its own, with both methods static."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns (the tensor to send, the context for ``decompress``)."""
        raise _make_missing_error("compress")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Converts a received tensor back to its form before ``compress``."""
        raise _make_missing_error("decompress")


def _make_missing_error(method: str) -> ProgramError:
    return ProgramError(
        "a compressor does not define how tensors are sent",
        given=f"a class derived from Compressor without {method}",
        expected="static methods compress(tensor) and decompress(tensor, ctx)",
        action=f"define {method}, or use hvd.Compression.none or hvd.Compression.fp16",
    )


class NoneCompressor(Compressor):
    """The compressor that leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """The compressor that sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns (the tensor as float16, its type before)."""
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Casts back to the type before."""
        return tf.cast(tensor, ctx)


class Compression:
    """The compressors by name: ``hvd.Compression.none`` and ``hvd.Compression.fp16``."""

    none = NoneCompressor
    fp16 = FP16Compressor
