"""Attributes: decoded on access, encoded back to the same proto."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import attr_value_pb2, node_def_pb2

from whale.capture.attrs import (
    BACKWARD,
    CHECKPOINT,
    RECOMPUTED,
    SCOPE_ATTR,
    NodeAttrs,
    decode,
    decode_tensor,
    mark_attributes,
    read_marks,
)
from whale.capture.encode import encode, encode_node_def, encode_tensor
from whale.errors import ProgramError
from whale.ir.marks import NO_MARKS, Marks
from whale.ir.program import Node
from whale.ir.values import DType, Func, Shape, Tensor, TensorType

pytestmark = pytest.mark.core
_DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool", "complex64"]

_scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(),
    st.binary().filter(lambda b: not _is_text(b)),
    st.sampled_from(_DTYPES).map(DType),
    st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 9))).map(tuple)).map(Shape),
)


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


_lists = st.one_of(
    st.lists(st.booleans(), min_size=1),
    st.lists(st.integers(-5, 5), min_size=1),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1),
    st.lists(st.text(), min_size=1),
    st.lists(st.sampled_from(_DTYPES).map(DType), min_size=1),
    st.just([]),
).map(tuple)
_funcs = st.builds(Func, st.text(min_size=1), st.dictionaries(st.sampled_from("abc"), _scalars))


@settings(max_examples=200)
@given(st.one_of(_scalars, _lists, _funcs, st.lists(_funcs, min_size=1).map(tuple)))
def test_encode_then_decode_gives_the_value(value: object) -> None:
    again = decode(encode(value))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensor_survives_both_protos(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    original = tf.cast(tf.constant(values), dtype).numpy()
    decoded = decode_tensor(tf.make_tensor_proto(original, dtype=dtype, shape=shape))
    assert decoded.shape == shape
    np.testing.assert_array_equal(decoded.numpy(), original)
    assert decode_tensor(encode_tensor(decoded)) == decoded


def test_one_value_for_all_elements_is_expanded() -> None:
    numbers = tf.make_tensor_proto(7, dtype=tf.int32, shape=(2, 2))
    texts = tf.make_tensor_proto(np.array(["ab"]), shape=(3,))
    assert decode_tensor(numbers).numpy().tolist() == [[7, 7], [7, 7]]
    assert decode_tensor(texts).numpy().tolist() == [b"ab"] * 3


def _node_def() -> node_def_pb2.NodeDef:
    node = node_def_pb2.NodeDef(name="a", op="MatMul", device="/device:GPU:3", input=["x", "y"])
    node.attr["T"].type = tf.float32.as_datatype_enum
    node.attr["transpose_a"].b = True
    node.attr["_class"].list.s.append(b"loc:@gone")
    node.attr["_output_shapes"].list.shape.add()
    node.attr["_XlaMustCompile"].b = False
    node.attr[SCOPE_ATTR].s = b"replica"
    return node


def test_internal_attributes_are_left_out() -> None:
    attrs = NodeAttrs(_node_def())
    assert dict(attrs) == {"T": DType("float32"), "transpose_a": True, "_XlaMustCompile": False}
    assert len(attrs) == 3


def test_attributes_that_mark_a_node_become_its_marks() -> None:
    node_def = _node_def()
    assert read_marks(node_def.attr) is NO_MARKS
    for mark in (BACKWARD, CHECKPOINT):
        for name, value in mark_attributes(mark).items():
            node_def.attr[name].CopyFrom(value)
    assert read_marks(node_def.attr) == Marks(backward=True, checkpoint=True)
    assert BACKWARD not in NodeAttrs(node_def)


def test_what_is_computed_again_is_marked_for_tensorflow_and_what_is_not_is_not() -> None:
    shared = {"T": DType("float32")}
    known: dict[int, Any] = {}
    for attrs in (shared, NodeAttrs(_node_def())):
        for marks in (Marks(recomputed=True), NO_MARKS, Marks(recomputed=True, blocks=2)):
            made = encode_node_def(Node("a", "MatMul", attrs=attrs, marks=marks), "a", ["x", "y"], known)
            assert (RECOMPUTED in made.attr) == marks.recomputed
            assert {key for key in made.attr if key.startswith("_whale")} <= {RECOMPUTED, SCOPE_ATTR}


def test_a_node_of_the_hosts_memory_is_placed_there() -> None:
    for attrs in ({"T": DType("float32")}, NodeAttrs(_node_def())):
        node = Node("a", "MatMul", attrs=attrs)
        assert encode_node_def(node.with_marks(on_host=True), "a", []).device == "/device:CPU:0"
        assert encode_node_def(node, "a", []).device == ""


def test_looking_for_a_missing_attribute_changes_nothing() -> None:
    node_def = _node_def()
    attrs = NodeAttrs(node_def)
    assert attrs.get("transpose_b") is None
    with pytest.raises(KeyError):
        attrs["_class"]
    assert "transpose_b" not in node_def.attr


def test_attributes_compare_by_content() -> None:
    assert NodeAttrs(_node_def()) == NodeAttrs(_node_def())
    assert NodeAttrs(_node_def()) == {"T": "float32", "transpose_a": True, "_XlaMustCompile": False}
    other = _node_def()
    other.attr["transpose_a"].b = False
    assert NodeAttrs(other) != NodeAttrs(_node_def())


def test_node_def_of_an_unchanged_node_keeps_attributes_and_drops_places() -> None:
    node = Node("a", "MatMul", attrs=NodeAttrs(_node_def()), outputs=(TensorType("float32", (2, 2)),))
    made = encode_node_def(node, "b", ["p", "q:1", "^r"])
    assert (made.name, made.op, list(made.input), made.device) == ("b", "MatMul", ["p", "q:1", "^r"], "")
    assert made.attr["transpose_a"].b
    assert "_class" not in made.attr
    assert "_output_shapes" not in made.attr


def test_changed_attributes_are_encoded_by_the_type_of_the_op() -> None:
    attrs = {"T": "float32", "alpha": 1}
    made = encode_node_def(Node("a", "LeakyRelu", attrs=attrs), "a", ["x"])
    assert made.attr["T"].type == tf.float32.as_datatype_enum
    assert made.attr["alpha"] == attr_value_pb2.AttrValue(f=1.0)


def test_a_value_without_proto_form_is_refused() -> None:
    with pytest.raises(ProgramError, match="has no proto form"):
        encode(object())


def test_const_round_trip() -> None:
    value = Tensor.from_numpy(np.array([1, 2], np.int64))
    made = encode_node_def(Node("c", "Const", attrs={"dtype": DType("int64"), "value": value}), "c", [])
    assert NodeAttrs(made)["value"] == value


def test_nodes_with_equal_attributes_share_what_is_decoded_but_for_large_values() -> None:
    one, other = NodeAttrs(_node_def()), NodeAttrs(_node_def())
    assert one.shared is not None
    assert one.shared is other.shared
    value = Tensor.from_numpy(np.arange(1000))
    attrs = {"dtype": DType("int64"), "value": value}
    large = NodeAttrs(encode_node_def(Node("c", "Const", attrs=attrs), "c", []))
    assert large.shared is None
    assert large["value"] == large.get("value") == value
    assert dict(large) == attrs


def test_nodes_with_the_same_attributes_are_encoded_once() -> None:
    attrs, known = {"T": DType("float32")}, dict[int, Any]()
    nodes = [Node(f"n{i}", op, attrs=attrs) for i, op in enumerate(("Relu", "Relu", "Relu6"))]
    made = [encode_node_def(node, node.name, [f"x{i}"], known) for i, node in enumerate(nodes)]
    assert [m.op for m in made] == ["Relu", "Relu", "Relu6"]
    assert made == [encode_node_def(node, node.name, [f"x{i}"]) for i, node in enumerate(nodes)]
