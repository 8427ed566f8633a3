"""Restores from a checkpoint of any origin: each rank reads only its parts, and errors name damaged tensors
and files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.python.trackable.base import OBJECT_GRAPH_PROTO_KEY

from whale.errors import CheckpointError
from whale.log import log
from whale.runtime.checkpoint.shares import STATE_KEY, set_random_state
from whale.runtime.context import Context
from whale.runtime.variables.checkpoint_regions import (
    assign_regions,
    find_variable,
    format_spec,
    is_in_files,
    is_split,
    iterate_pieces,
    list_own_regions,
    restore_by_pieces,
    slice_spec,
)
from whale.runtime.variables.deferred import find_deferred, restore_from

_READ_TOGETHER_BYTES = 64 << 20
_DAMAGES = (tf.errors.DataLossError, tf.errors.OutOfRangeError)
# TensorFlow's reader raises Python errors without a class of its own for some damages: IndexError for a truncated file.
_NAMELESS = (IndexError, RuntimeError, ValueError, TypeError, DecodeError)


def restore(checkpoint: tf.train.Checkpoint, path: str, context: Context) -> Any:
    """Restores the objects of ``checkpoint`` on this rank from the files ``path``, and random states if the checkpoint
    has them.

    Returns:
      the status of ``tf.train.Checkpoint.restore``.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        if not reader.has_tensor(OBJECT_GRAPH_PROTO_KEY):  # written by a Saver: values by names
            status = checkpoint.restore(path)
        else:
            with restore_by_pieces():
                status = checkpoint.restore(path)
            _restore_split_variables(status, path, context)
        if reader.has_tensor(STATE_KEY):
            set_random_state(reader.get_tensor(STATE_KEY).decode())
    except tf.errors.OpError as error:
        raise _explain_error(error, path) from error
    except _NAMELESS as error:
        tensors, files = find_damages(path)
        if not tensors and not files:
            raise  # the files are whole: the error is the program's, such as a variable of another shape
        raise _make_damage_error(path, tensors, files, str(error)) from error
    return status


def find_newest_whole(paths: Sequence[str]) -> str:
    """Returns the first of these checkpoints of which every tensor can be read; warns of each damaged one before it.

    Raises:
      CheckpointError: none of them is readable.
    """
    for path in paths:
        tensors, files = find_damages(path)
        if not tensors and not files:
            return path
        what = f"{', '.join(tensors) or 'no tensor'} cannot be read, in {', '.join(files) or 'its index'}"
        log.warning(f"the checkpoint {path} is damaged ({what}); the previous one is tried")
    raise CheckpointError(
        "all checkpoints are damaged",
        given=", ".join(paths),
        expected="one of which every tensor can be read",
        action="copy a whole checkpoint back from a backup, or start training in another folder",
    )


def _restore_split_variables(status: Any, path: str, context: Context) -> None:
    found = status._checkpoint  # matches the objects of the checkpoint with those of the program
    waiting = []
    for number, trackable in found.object_by_proto_id.items():
        variable = find_variable(trackable)
        keys = [a.checkpoint_key for a in found.object_graph_proto.nodes[number].attributes]
        if find_deferred(variable) is not None:
            for key in keys:
                restore_from(variable, partial(read_region, path, key, tuple(variable.shape.as_list()), variable.dtype))
        elif is_in_files(variable):
            for key in keys:
                _restore_pieces(variable, path, key, context)
        elif is_split(variable):
            waiting += [(variable, key) for key in keys]
    for group in _group_by_bytes(waiting, context):
        wanted = [(variable, key, region) for variable, key in group for region in list_own_regions(variable, context)]
        values = tf.raw_ops.RestoreV2(
            prefix=path,
            tensor_names=[key for _, key, _ in wanted],
            shape_and_slices=[format_spec(region, variable.shape) for variable, _, region in wanted],
            dtypes=[variable.dtype for variable, _, _ in wanted],
        )
        read = dict(zip(((key, region) for _, key, region in wanted), values))
        for variable, key in group:
            assign_regions(variable, [(p, read[key, p]) for p in list_own_regions(variable, context)], context)


def _restore_pieces(variable: Any, path: str, key: str, context: Context) -> None:
    shape = tuple(variable.shape.as_list())
    for region in list_own_regions(variable, context):
        for piece in iterate_pieces(region, variable.dtype):
            value = read_region(path, key, shape, variable.dtype, piece.begin, piece.size)
            assign_regions(variable, [(piece, value)], context)


def read_region(
    path: str, key: str, shape: Sequence[int], dtype: tf.DType, begin: Sequence[int], size: Sequence[int]
) -> tf.Tensor:
    """Reads a rectangle of a variable from a checkpoint; called when the first plan says which part of a deferred
    variable a rank holds.

    Args:
      key: name of the variable's tensor in the checkpoint.
      shape: of the whole variable.
      begin, size: of the rectangle, over all dimensions.

    Raises:
      CheckpointError: the checkpoint cannot be read, or is damaged.
    """
    spec = slice_spec(shape, begin, size) if shape else ""
    try:
        return tf.raw_ops.RestoreV2(prefix=path, tensor_names=[key], shape_and_slices=[spec], dtypes=[dtype])[0]
    except tf.errors.OpError as error:
        raise _explain_error(error, path) from error


def _group_by_bytes(waiting: Iterable[tuple[Any, str]], context: Context) -> Iterator[list[tuple[Any, str]]]:
    """Yields groups of (variable, key) to read together, of about 64 MiB each, so that reading needs little memory
    beyond the variables.
    """
    group: list[tuple[Any, str]] = []
    size_bytes = 0
    for variable, key in waiting:
        group.append((variable, key))
        regions = list_own_regions(variable, context)
        size_bytes += sum(int(tf.TensorShape(p.size).num_elements() or 0) for p in regions) * variable.dtype.size
        if size_bytes >= _READ_TOGETHER_BYTES:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


def _explain_error(error: tf.errors.OpError, path: str) -> CheckpointError:
    reason = (error.message or str(error)).partition("\n")[0].partition(" [Op:")[0]
    reason = re.sub(r"^\{\{.*?\}\}\s*", "", reason)
    if not isinstance(error, _DAMAGES) and type(error) is not tf.errors.OpError:
        return CheckpointError(
            "a checkpoint cannot be read",
            given=path,
            reason=reason,
            expected="a checkpoint of these objects, in a folder that every rank can read",
            action="check the path and the files there; the manager's latest_checkpoint names the newest complete one",
        )
    return _make_damage_error(path, *find_damages(path), reason)


def _make_damage_error(path: str, tensors: Sequence[str], files: Sequence[str], reason: str) -> CheckpointError:
    return CheckpointError(
        "a checkpoint is damaged",
        given=path,
        tensors=", ".join(tensors) or "none can be read",
        files=", ".join(files) or "its index",
        reason=reason,
        expected="files whose checksums match",
        action="restore an older one, of the manager's `checkpoints`, as restore_or_initialize(fallback=True) does",
    )


def find_damages(path: str) -> tuple[list[str], list[str]]:
    """Returns the names of the tensors of a checkpoint that cannot be read, and the paths of the files with these.

    Reads the whole checkpoint, one tensor at a time.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        shapes = reader.get_variable_to_shape_map()
    except (tf.errors.OpError, *_NAMELESS):
        return [], [f"{path}.index"]
    names = tf.io.gfile.glob(f"{path}.data-?????-of-?????")
    tensors: list[str] = []
    files: set[str] = set()
    for key, dtype in sorted(reader.get_variable_to_dtype_map().items()):
        if key not in shapes:
            continue
        try:
            tf.raw_ops.RestoreV2(prefix=path, tensor_names=[key], shape_and_slices=[""], dtypes=[dtype])
        except (tf.errors.OpError, *_NAMELESS) as error:
            tensors.append(key)
            shard = re.search(r"shard (\d+)", str(error))
            if shard:
                files.add(f"{path}.data-{int(shard[1]):05d}-of-{len(names):05d}")
            else:  # TensorFlow does not say which one ends too early
                files.update(names)
    return tensors, sorted(files)
