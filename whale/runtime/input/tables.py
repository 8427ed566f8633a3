"""Hashes what lookup tables hold: tables of tf.lookup, and those by which Keras' layers number words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

_KEYS = (tf.string, tf.int64, tf.int32)
_VALUES = (tf.int64, tf.string, tf.int32, tf.float32, tf.float64, tf.bool)
_MOST_ENTRIES = 1 << 24  # of a larger table, only the size is compared: reading it all would take seconds
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of SplitMix64


def number_tables(captured: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns a number for the keys, and one for the entries, of those captured tensors that are handles of tables.

    Tables that hold the same give the same numbers, whatever the order in which a process keeps it.

    Args:
      captured: by name.
    """
    found: dict[str, tf.Tensor] = {}
    for name, handle in captured.items():
        if isinstance(handle, tf.__internal__.EagerTensor) and handle.dtype == tf.resource:
            table = name.partition("/table_handle")[0].removesuffix("/LookupTableFindV2")
            found |= {f"{what} of the table `{table}`": tf.constant(number) for what, number in _number_held(handle)}
    return found


def _number_held(handle: tf.Tensor) -> Iterator[tuple[str, np.uint64]]:
    try:
        size = int(tf.raw_ops.LookupTableSizeV2(table_handle=handle))
    except tf.errors.OpError:  # no table, or one that has yet to be filled
        return
    if size > _MOST_ENTRIES:
        yield "size", np.uint64(size)
        return
    for keys_type, values_type in itertools.product(_KEYS, _VALUES):
        if not _is_of(handle, keys_type, values_type):
            continue
        keys, values = tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=keys_type, Tvalues=values_type)
        of_keys = _hashes(keys)
        yield "keys", of_keys.sum(dtype=np.uint64)
        yield "entries", _mix(of_keys ^ _hashes(values) * _MIX[0]).sum(dtype=np.uint64)
        return


def _is_of(handle: tf.Tensor, keys: tf.DType, values: tf.DType) -> bool:
    """Tells whether a table has keys and values of these types; to export others ends the process."""
    nothing, default = tf.zeros([0], keys), tf.zeros([], values)
    try:
        tf.raw_ops.LookupTableFindV2(table_handle=handle, keys=nothing, default_value=default)
    except tf.errors.InvalidArgumentError as error:
        return "ignature mismatch" not in (error.message or "")  # else values have another shape
    return True


def _hashes(rows: tf.Tensor) -> np.ndarray:
    """Returns a number of 64 bits for each row, uint64[rows]."""
    if rows.dtype == tf.string:
        rows = tf.strings.to_hash_bucket_fast(rows, (1 << 63) - 1)
    count = int(rows.shape[0])
    held = np.ascontiguousarray(rows.numpy()).reshape(count, -1 if count else 0).view(np.uint8)
    words = np.pad(held, ((0, 0), (0, -held.shape[1] % 8))).view(np.uint64) if held.size else np.zeros((count, 0), "u8")
    found = np.zeros(count, np.uint64)
    for column in words.T:
        found = _mix(found * _MIX[1] + column)
    return found


def _mix(numbers: np.ndarray) -> np.ndarray:
    for mix, shift in zip(_MIX, (30, 27)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * mix
    return numbers ^ (numbers >> np.uint64(31))
