"""Initial values of variables with dimensions of 2^31 and more: a part is made without the whole."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from whale.ir.layout import Shard
from whale.ir.mesh import make_one_axis_tiles
from whale.runtime.variables.partial_initializers import DeferredInitial, RecordedOp

ROWS = 2**31 + 16


def test_a_part_behind_the_last_index_of_32_bits_is_filled() -> None:
    attrs = ("T", tf.int8.as_datatype_enum, "index_type", tf.int64.as_datatype_enum)
    shape = (ROWS, 4)
    fill = RecordedOp("Fill", attrs, (0, 1), 2, (shape,), ("int8",))
    initial = DeferredInitial(shape, "int8", {0: np.array(shape, np.int64), 1: np.array(3, np.int8)}, (fill,), 2)
    assert initial.is_divisible and initial.bytes == 4 * ROWS
    part = initial.make_part(make_one_axis_tiles(Shard(0, (ROWS - 8, 8))), 1, "w")
    assert part.shape == (8, 4) and set(part.numpy().ravel().tolist()) == {3}
