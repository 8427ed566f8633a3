"""Keeps parts of variables in files instead of memory: of tables that are larger than what a rank has.

A part's tensor is a file that the system maps (``WhaleMappedTensor``): TensorFlow's own operations read and write rows
of it, what is used is in memory while there is room, and what was changed is written back. Files have no names, and go
with the process. That is for variables of which steps read and write rows; who reads one whole has it in memory.

``keep_in_files``, ``find_folder``: which variables. ``make_mapped_variable``: a part. ``write_block``: a block of it.
``copy_part``: a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

import whale_ops
from whale.errors import PlanError

_FOLDER = "_whale_folder"


def keep_in_files(variable: tf.Variable, folder: str) -> None:
    """Marks ``variable`` so that its parts will lie in files of ``folder``, once a run has it sharded."""
    setattr(variable, _FOLDER, folder)


def find_folder(variable: Any) -> str:
    """Returns the folder in whose files a variable's parts lie; empty: they lie in memory."""
    return str(getattr(variable, _FOLDER, ""))


def make_mapped_variable(folder: str, shape: Sequence[int], dtype: str, name: str) -> tf.Variable:
    """Makes a variable of zeros in a file.

    Raises:
      PlanError: the folder cannot have such a file.
    """
    try:
        value = whale_ops.load_ops().whale_mapped_tensor(folder=folder, shape=list(shape), T=dtype)
    except tf.errors.OpError as error:
        raise PlanError(
            "a table does not go into a file",
            op=name,
            given=(error.message or str(error)).partition(" [Op:")[0],
            expected="a folder of a local disk with room for the table and its optimizer's state",
            action="name another folder, or make room",
        ) from error
    return resource_variable_ops.ResourceVariable(value, trainable=False, name=name)


def write_block(part: tf.Variable, begin: Sequence[int], value: tf.Tensor) -> None:
    """Writes a block of a part, in place: nothing else refers to its memory."""
    first = np.array(begin, np.int64)
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=part.handle, begin=first, end=first + np.array(value.shape.as_list(), np.int64),
        strides=np.ones(len(first), np.int64), value=value,
    )  # fmt: skip
    # Assigning slices lets every read and every update copy the variable, from then on.
    tf.raw_ops.DisableCopyOnRead(resource=part.handle)


def copy_part(part: tf.Variable, folder: str) -> tf.Tensor:
    """Returns the value of a part now, whatever later steps do; the copy lies in a file, too."""
    return whale_ops.load_ops().whale_mapped_copy(variable=part.handle, folder=folder, T=part.dtype)
