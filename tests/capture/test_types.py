"""Types of captured tensors, where their sizes are known, are not, or are said after they were asked for."""

from __future__ import annotations

import tensorflow as tf

from whale.capture.graph import read_graph
from whale.ir.program import Ref
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


def test_nodes_that_differ_only_in_names_and_operands_share_their_attributes() -> None:
    with tf.Graph().as_default() as graph:
        x, y = tf.compat.v1.placeholder(tf.float32, [2, 3]), tf.compat.v1.placeholder(tf.float32, [4])
        found = [tf.identity(x), tf.identity(y), tf.identity(tf.cast(x, tf.int32)), tf.constant(1.0), tf.constant(1.0)]
        found += [tf.constant(2.0), tf.constant(list(range(1000))), tf.constant(list(range(1000)))]
        program = read_graph(graph, name="f", inputs=[x, y], variables=[], outputs=found, effects=[])
    nodes = [program.by_name[ref.node] for ref in program.outputs]
    first, other_size, other_type, one, same, two, *large = nodes
    assert first.attrs is other_size.attrs
    assert [node.outputs[0].shape for node in (first, other_size)] == [(2, 3), (4,)]
    assert other_type.attrs == {"T": "int32"}
    assert one.attrs is same.attrs
    assert [float(node.attrs["value"].numpy()) for node in (one, same, two)] == [1.0, 1.0, 2.0]
    assert large[0].attrs is not large[1].attrs
    assert large[0].attrs == large[1].attrs


def test_nodes_are_sorted_and_complete_where_old_ones_wait_for_new_ones() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        old = tf.identity(x, name="old")
        between = tf.negative(x, name="between")
        tf.square(x, name="unread")
        new = tf.sqrt(between, name="new")
        old.op._add_control_input(new.op)
        program = read_graph(
            graph, name="f", inputs=[x], variables=[], outputs=[old], effects=[], names={"x": "given", "new": "late"}
        )
    assert [node.name for node in program.nodes] == ["given", "between", "late", "old"]
    assert [node.inputs for node in program.nodes[1:]] == [(Ref("given"),), (Ref("between"),), (Ref("given"),)]
    assert program.by_name["old"].controls == ("late",)
    assert program.inputs == ("given",)
    assert program.outputs == (Ref("old"),)
