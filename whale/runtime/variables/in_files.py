"""Keeps parts of variables in files instead of memory, for embedding tables that are larger than a rank's memory.

A part's tensor is a memory-mapped file (``WhaleMappedTensor``): TensorFlow's own operations read and write its rows,
pages in use are in memory while there is room, and changed pages are written back. Files are unlinked at once, so that
they disappear with the process. This suits variables of which steps read and write rows; reading one whole needs memory
for all of it.

``keep_in_files`` and ``find_folder`` mark variables. ``make_mapped_variable`` creates a part, ``write_block`` writes a
block of it, and ``copy_part`` copies its value.

Decision: 0102.
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
    """Marks ``variable`` so that its parts will be stored in files of ``folder``, once a run shards it."""
    setattr(variable, _FOLDER, folder)


def find_folder(variable: Any) -> str:
    """Returns the folder for the files with a variable's parts; "": the parts are in memory."""
    return str(getattr(variable, _FOLDER, ""))


def make_mapped_variable(folder: str, shape: Sequence[int], dtype: str, name: str) -> tf.Variable:
    """Creates a variable of zeros whose memory is a file in ``folder``.

    Raises:
      PlanError: the file cannot be created in the folder.
    """
    try:
        value = whale_ops.load_ops().whale_mapped_tensor(folder=folder, shape=list(shape), T=dtype)
    except tf.errors.OpError as error:
        raise PlanError(
            "a table cannot be stored in a file",
            op=name,
            given=(error.message or str(error)).partition(" [Op:")[0],
            expected="a folder of a local disk with room for the table and its optimizer's state",
            action="give the embedding layer another folder, or make room in this one",
        ) from error
    return resource_variable_ops.ResourceVariable(value, trainable=False, name=name)


def write_block(part: tf.Variable, begin: Sequence[int], value: tf.Tensor) -> None:
    """Writes a block of values into a part in place, which is safe because no other tensor refers to its memory.

    Args:
      begin: where the block begins in the part, over all dimensions.
    """
    first = np.array(begin, np.int64)
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=part.handle, begin=first, end=first + np.array(value.shape.as_list(), np.int64),
        strides=np.ones(len(first), np.int64), value=value,
    )  # fmt: skip
    # Assigning a slice makes TensorFlow copy the variable at every read and update from then on, unless this is undone.
    tf.raw_ops.DisableCopyOnRead(resource=part.handle)


def copy_part(part: tf.Variable, folder: str) -> tf.Tensor:
    """Returns a snapshot of a part's value, which is stored in a file of ``folder`` too."""
    return whale_ops.load_ops().whale_mapped_copy(variable=part.handle, folder=folder, T=part.dtype)
