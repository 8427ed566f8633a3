"""Encodes one rank's fetched values, or its error, as bytes for the other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import tensorflow as tf


class _Value(msgspec.Struct):
    """An array: numbers as their memory, strings one by one."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | list[bytes]


class _Message(msgspec.Struct):
    values: list[_Value] = []
    error_code: int = 0
    error: str = ""


def pack_values(values: Sequence[np.ndarray]) -> bytes:
    """Encodes arrays of numbers, booleans and byte strings; ``unpack_values`` is the inverse."""
    return msgspec.msgpack.encode(_Message([_pack_value(v) for v in values]))


def pack_error(error: tf.errors.OpError) -> bytes:
    """Encodes an error that ``unpack_values`` raises again, with the same class and message."""
    return msgspec.msgpack.encode(_Message(error_code=error.error_code, error=error.message or ""))


def unpack_values(data: bytes) -> list[np.ndarray]:
    """Decodes the arrays that ``pack_values`` was given.

    Raises:
      tf.errors.OpError: the error that ``pack_error`` was given.
    """
    message = msgspec.msgpack.decode(data, type=_Message)
    if message.error_code:
        raise tf.compat.v1.errors.exception_type_from_error_code(message.error_code)(None, None, message.error)
    return [_unpack_value(v) for v in message.values]


def _pack_value(value: np.ndarray) -> _Value:
    if value.dtype.kind in "OSU":
        strings = [bytes(s) if isinstance(s, bytes) else str(s).encode() for s in value.ravel()]
        return _Value("", value.shape, strings)
    return _Value(tf.as_dtype(value.dtype).name, value.shape, np.ascontiguousarray(value).tobytes())


def _unpack_value(value: _Value) -> np.ndarray:
    if isinstance(value.data, list):
        found = np.empty(value.shape, object)
        found.ravel()[:] = value.data
        return found
    return np.frombuffer(value.data, tf.as_dtype(value.dtype).as_numpy_dtype).reshape(value.shape)
