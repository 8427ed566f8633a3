"""Types of captured tensors, where their sizes are known, are not, or are said after they were asked for."""

from __future__ import annotations

import tensorflow as tf

from whale.capture.graph import read_graph
from whale.ir.values import TensorType


def test_types_are_what_the_graph_knows_of_shapes() -> None:
    with tf.Graph().as_default() as graph:
        shapes = [[], [2, 3], [None, 3], None, [0, 2]]
        inputs = [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes]
        later = tf.compat.v1.placeholder(tf.int64, None)
        assert later.shape.rank is None
        later.set_shape([None, 4])
        outputs = [tf.identity(x) for x in (*inputs, later)]
        program = read_graph(
            graph, name="f", inputs=[*inputs, later], variables=[], outputs=outputs, effects=[]
        )  # fmt: skip
    found = [program.find_type(ref) for ref in program.outputs]
    assert found == [
        TensorType("float32", ()),
        TensorType("float32", (2, 3)),
        TensorType("float32", (None, 3)),
        TensorType("float32", None),
        TensorType("float32", (0, 2)),
        TensorType("int64", (None, 4)),
    ]
