"""Shape arithmetic is folded, in NumPy, to what TensorFlow's kernels compute; nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.capture.roundtrip import rebuilt
from whale.capture.function import capture_function
from whale.ir.ops import IDENTITIES
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Shape, Tensor, TensorType
from whale.passes.normalize.folding.arithmetic import EVALUATORS, broadcast_gradient_args
from whale.passes.normalize.folding.fold import LARGEST_ELEMENTS, fold
from whale.passes.normalize.folding.lists import refine_lists

pytestmark = pytest.mark.core
R = tf.raw_ops
_I = np.array([[3, -7, 0], [5, 2, -1]], np.int32)
_J = np.array([[2, 3, 4], [-5, 1, 7]], np.int32)
_B = np.array([True, False, True])

# op -> calls; each runs the kernel and, through a captured program, the evaluator.
_CALLS = {
    "Add": [lambda: R.Add(x=_I, y=_J)],
    "AddV2": [lambda: R.AddV2(x=_I, y=np.int32(2))],
    "Sub": [lambda: R.Sub(x=_I, y=_J)],
    "Mul": [lambda: R.Mul(x=_I, y=_J)],
    "Div": [lambda: R.Div(x=_I, y=_J)],
    "TruncateDiv": [lambda: R.TruncateDiv(x=_I, y=_J)],
    "FloorDiv": [lambda: R.FloorDiv(x=_I, y=_J)],
    "FloorMod": [lambda: R.FloorMod(x=_I, y=_J)],
    "Mod": [lambda: R.Mod(x=_I, y=_J)],
    "TruncateMod": [lambda: R.TruncateMod(x=_I, y=_J)],
    "Maximum": [lambda: R.Maximum(x=_I, y=_J)],
    "Minimum": [lambda: R.Minimum(x=_I, y=_J)],
    "Neg": [lambda: R.Neg(x=_I)],
    "Abs": [lambda: R.Abs(x=_I)],
    "Sign": [lambda: R.Sign(x=_I)],
    "Square": [lambda: R.Square(x=_I)],
    "Cast": [
        lambda: R.Cast(x=_I, DstT=tf.int64),
        lambda: R.Cast(x=_B, DstT=tf.int32),
        lambda: R.Cast(x=_I, DstT=tf.bool),
        lambda: R.Cast(x=_I.astype(np.int64) * 2**29, DstT=tf.int32),
    ],
    "Equal": [lambda: R.Equal(x=_I, y=_J)],
    "NotEqual": [lambda: R.NotEqual(x=_I, y=np.int32(2))],
    "Less": [lambda: R.Less(x=_I, y=_J)],
    "LessEqual": [lambda: R.LessEqual(x=_I, y=_J)],
    "Greater": [lambda: R.Greater(x=_I, y=_J)],
    "GreaterEqual": [lambda: R.GreaterEqual(x=_I, y=_J)],
    "LogicalAnd": [lambda: R.LogicalAnd(x=_B, y=~_B)],
    "LogicalOr": [lambda: R.LogicalOr(x=_B, y=~_B)],
    "LogicalNot": [lambda: R.LogicalNot(x=_B)],
    "Prod": [lambda: R.Prod(input=_I, axis=[0]), lambda: R.Prod(input=_I, axis=[-1], keep_dims=True)],
    "Sum": [lambda: R.Sum(input=_I, axis=1), lambda: R.Sum(input=_I, axis=np.zeros(0, np.int32))],
    "Max": [lambda: R.Max(input=_I, axis=[0, 1])],
    "Min": [lambda: R.Min(input=_I, axis=[1], keep_dims=True)],
    "All": [lambda: R.All(input=_B, axis=[0])],
    "Any": [lambda: R.Any(input=_B, axis=[0])],
    "Cumsum": [lambda: R.Cumsum(x=_I, axis=1), lambda: R.Cumsum(x=_I, axis=1, exclusive=True)],
    "Cumprod": [lambda: R.Cumprod(x=_I, axis=0)],
    "StridedSlice": [
        lambda: tf.constant(_I)[1],
        lambda: tf.constant(_I)[..., -1],
        lambda: tf.constant(_I)[:, tf.newaxis, ::2],
        lambda: tf.constant(_I)[::-1, 1:],
        lambda: tf.constant(_I)[tf.newaxis, ..., 0:2],
    ],
    "Slice": [lambda: R.Slice(input=_I, begin=[0, 1], size=[-1, 2])],
    "Pack": [lambda: R.Pack(values=[_I, _J], axis=1), lambda: R.Pack(values=[np.int32(1), np.int32(2)])],
    "Unpack": [lambda: R.Unpack(value=_I, num=3, axis=1)],
    "Split": [lambda: R.Split(axis=1, value=_I, num_split=3)],
    "SplitV": [lambda: R.SplitV(value=_I, size_splits=[1, -1], axis=1, num_split=2)],
    "ConcatV2": [lambda: R.ConcatV2(values=[_I, _J], axis=-1)],
    "Reshape": [lambda: R.Reshape(tensor=_I, shape=[3, -1])],
    "ExpandDims": [lambda: R.ExpandDims(input=_I, axis=-1), lambda: R.ExpandDims(input=_I, axis=[1])],
    "Squeeze": [lambda: R.Squeeze(input=_I[None, :, :1]), lambda: R.Squeeze(input=_I[None, :, :1], axis=[0])],
    "Transpose": [lambda: R.Transpose(x=_I, perm=[1, 0])],
    "Tile": [lambda: R.Tile(input=_I, multiples=[2, 1])],
    "BroadcastTo": [lambda: R.BroadcastTo(input=_I, shape=[2, 2, 3])],
    "ReverseV2": [lambda: R.ReverseV2(tensor=_I, axis=[1])],
    "GatherV2": [
        lambda: R.GatherV2(params=_I, indices=[2, 0], axis=1),
        lambda: R.GatherV2(params=_I, indices=[[1], [0]], axis=1, batch_dims=1),
    ],
    "Gather": [lambda: R.Gather(params=_I, indices=[1, 1])],
    "Range": [lambda: R.Range(start=7, limit=-2, delta=-3)],
    "Fill": [lambda: R.Fill(dims=[2, 3], value=5)],
    "InvertPermutation": [lambda: R.InvertPermutation(x=[2, 0, 1])],
    "BroadcastGradientArgs": [lambda: R.BroadcastGradientArgs(s0=[2, 1, 3], s1=[5, 3])],
    "BroadcastArgs": [lambda: R.BroadcastArgs(s0=[2, 1, 3], s1=[5, 3])],
    "ConcatOffset": [lambda: R.ConcatOffset(concat_dim=1, shape=[[2, 3], [2, 5]])],
    "Select": [lambda: R.Select(condition=_B, x=_I[0], y=_J[0]), lambda: R.Select(condition=_B[:2], x=_I, y=_J)],
    "SelectV2": [lambda: R.SelectV2(condition=_B, t=_I, e=np.int32(4))],
    "ZerosLike": [lambda: R.ZerosLike(x=_I)],
    "OnesLike": [lambda: R.OnesLike(x=_I)],
    "Identity": [lambda: R.Identity(input=_I)],
    "StopGradient": [lambda: R.StopGradient(input=_I)],
    "Snapshot": [lambda: R.Snapshot(input=_I)],
    "PreventGradient": [lambda: R.PreventGradient(input=_I)],
}
_LEFT = {"exclusive": True, "batch_dims": 1}


def test_every_evaluator_is_compared_with_its_kernel() -> None:
    assert _CALLS.keys() == EVALUATORS.keys()


@pytest.mark.parametrize("op", sorted(_CALLS))
def test_evaluator_equals_kernel(op: str) -> None:
    for call in _CALLS[op]:
        expected = [t.numpy() for t in tf.nest.flatten(call())]
        program = capture_function(call, name="call").program
        source = [n for n in program.nodes if n.op == op]
        folded = fold(program)
        left = any(source[0].attrs.get(k) == v for k, v in _LEFT.items())
        assert any(n.op == op for n in folded.nodes) == left
        if not left:
            values = [folded.const(ref) for ref in folded.outputs]
            for value, wanted in zip(values, expected):
                np.testing.assert_array_equal(value, wanted)
                assert value.dtype == wanted.dtype


_dims = st.lists(st.integers(1, 3), max_size=5)


@settings(max_examples=300)
@given(_dims, _dims)
def test_broadcast_gradient_args(a: list[int], b: list[int]) -> None:
    try:
        np.broadcast_shapes(tuple(a), tuple(b))
    except ValueError:
        assume(False)
    expected = R.BroadcastGradientArgs(s0=np.array(a, np.int32), s1=np.array(b, np.int32))
    found = broadcast_gradient_args(a, b)
    assert [list(found[0]), list(found[1])] == [expected.r0.numpy().tolist(), expected.r1.numpy().tolist()]


def _const(name: str, array: np.ndarray) -> Node:
    value = Tensor.from_numpy(array)
    return Node(name, "Const", attrs={"dtype": DType(value.dtype), "value": value},
                outputs=(TensorType(value.dtype, value.shape),))  # fmt: skip


def _one(*nodes: Node, out: str, **more: object) -> Program:
    inputs = tuple(n.name for n in nodes if n.op == "Placeholder")
    return Program("p", nodes, inputs=inputs, outputs=(Ref(out),), **more)


def test_stateful_ops_with_constant_operands_stay() -> None:
    def draw() -> tf.Tensor:
        return tf.random.uniform([3], 0, 9, tf.int32)

    program = fold(capture_function(draw).program)
    assert "RandomUniformInt" in {n.op for n in program.nodes}


def test_floating_point_constants_stay() -> None:
    program = fold(capture_function(lambda: tf.constant([1.0, 2.0]) + tf.constant([3.0, 4.0])).program)
    assert "AddV2" in {n.op for n in program.nodes}


def test_large_constants_stay() -> None:
    for count, expected in ((LARGEST_ELEMENTS, "Const"), (LARGEST_ELEMENTS + 1, "Fill")):
        program = fold(capture_function(lambda n=count: tf.raw_ops.Fill(dims=[n], value=3)).program)
        assert program.by_name[program.outputs[0].node].op in (expected, "Identity")
        assert ("Fill" in {n.op for n in program.nodes}) == (expected == "Fill")


def test_division_by_zero_is_left_to_run_time() -> None:
    program = fold(capture_function(lambda: R.FloorDiv(x=_I, y=np.int32(0))).program)
    assert "FloorDiv" in {n.op for n in program.nodes}


def test_what_cannot_run_is_left_to_run_time() -> None:
    x = _const("x", np.array([4, 5], np.int32))
    bounds = [_const("b", np.array([2], np.int32)), _const("e", np.array([3], np.int32)),
              _const("s", np.array([1], np.int32))]  # fmt: skip
    cut = Node("cut", "StridedSlice", tuple(map(Ref, ("x", "b", "e", "s"))),
               attrs={"shrink_axis_mask": 1}, outputs=(TensorType("int32", ()),))  # fmt: skip
    assert fold(_one(x, *bounds, cut, out="cut")).by_name["cut"].op == "StridedSlice"


def test_shape_of_a_static_tensor_is_a_constant() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        shape = R.Shape(input=x)
        sizes = [shape[0] * shape[1], R.Rank(input=x) - 1, R.Size(input=x) // 12]
        return R.Reshape(tensor=x, shape=R.Pack(values=sizes))

    captured = capture_function(step, [np.zeros((2, 3, 2), np.float32)])
    program = fold(captured.program)
    assert {n.op for n in program.nodes} <= {"Placeholder", "Const", "Reshape", "Identity"}
    reshape = next(n for n in program.nodes if n.op == "Reshape")
    np.testing.assert_array_equal(program.const(reshape.inputs[1]), [6, 2, 1])


def test_known_place_of_a_partly_unknown_shape_folds() -> None:
    unknown = TensorType("float32", (None, 5))
    x = Node("x", "Placeholder", attrs={"dtype": DType("float32")}, outputs=(unknown,))
    shape = Node("shape", "Shape", (Ref("x"),), outputs=(TensorType("int32", (2,)),),
                 attrs={"T": DType("float32"), "out_type": DType("int32")})  # fmt: skip
    bounds = [_const("b", np.array([1], np.int32)), _const("e", np.array([2], np.int32)),
              _const("s", np.array([1], np.int32))]  # fmt: skip
    cut = Node("cut", "StridedSlice", tuple(map(Ref, ("shape", "b", "e", "s"))),
               attrs={"shrink_axis_mask": 1}, outputs=(TensorType("int32", ()),))  # fmt: skip
    program = fold(_one(x, shape, *bounds, cut, out="cut"))
    assert program.const(Ref("cut")) == 5
    first = Node("first", "StridedSlice", tuple(map(Ref, ("shape", "z", "b", "s"))),
                 attrs={"shrink_axis_mask": 1}, outputs=(TensorType("int32", ()),))  # fmt: skip
    program = fold(_one(x, shape, *bounds, _const("z", np.array([0], np.int32)), first, out="first"))
    assert program.by_name["first"].op == "StridedSlice"


def test_partly_known_shape_refines_what_it_makes() -> None:
    x = Node("x", "Placeholder", outputs=(TensorType("float32", (None, 6)),))
    shape = Node("shape", "Shape", (Ref("x"),), outputs=(TensorType("int32", (2,)),))
    zero = Node("zero", "Fill", (Ref("shape"), Ref("c")), outputs=(TensorType("float32", (None, None)),))
    double = Node("double", "AddV2", (Ref("zero"), Ref("zero")), outputs=(TensorType("float32", None),))
    program = fold(_one(x, shape, _const("c", np.float32(0)), zero, double, out="double"))
    assert program.find_type(Ref("zero")).shape == (None, 6)
    assert program.find_type(Ref("double")).shape == (None, 6)


def test_identity_n_becomes_one_identity_per_tensor() -> None:
    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        a, b = tf.raw_ops.IdentityN(input=[x, y])
        return [a + 1, b * 2]

    arguments = [np.ones((2,), np.float32), np.ones((3,), np.int32)]
    captured = capture_function(step, arguments)
    program = fold(captured.program)
    ops = [n.op for n in program.nodes]
    assert "IdentityN" not in ops
    assert "NoOp" not in ops
    a, b = captured.pack_outputs(rebuilt(captured, (fold,))(*arguments))
    assert a.numpy().tolist() == [2.0, 2.0]
    assert b.numpy().tolist() == [2, 2, 2]


def test_what_waits_for_an_identity_n_still_waits() -> None:
    a = Node("a", "Placeholder", outputs=(TensorType("float32", ()),))
    many = Node("many", "IdentityN", (Ref("a"), Ref("a")), outputs=a.outputs * 2)
    after = Node("after", "Identity", (Ref("a"),), ("many",), outputs=a.outputs)
    program = fold(_one(a, many, after, out="after"))
    assert program.by_name["after"].controls == ("many",)
    assert set(program.by_name["many"].controls) == {"many/0", "many/1"}


def test_bodies_are_folded() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        ones = lambda y: R.Fill(dims=R.Shape(input=y), value=1.0)  # noqa: E731
        return tf.while_loop(lambda y: tf.reduce_sum(y) < 9.0, lambda y: y + ones(y), [x])

    captured = capture_function(step, [np.zeros((3,), np.float32)])
    before = {n.op for body in captured.program.functions.values() for n in body.nodes}
    after = {n.op for body in fold(captured.program).functions.values() for n in body.nodes}
    assert "Shape" in before
    assert "Shape" not in after


def test_dead_nodes_and_functions_go() -> None:
    x = Node("x", "Placeholder", outputs=(TensorType("float32", ()),))
    dead = Node("dead", "Neg", (Ref("x"),), outputs=x.outputs)
    body = Program("body", ())
    program = fold(_one(x, dead, Node("y", "Abs", (Ref("x"),), outputs=x.outputs), out="y", functions={"body": body}))
    assert [n.name for n in program.nodes] == ["x", "y"]
    assert not program.functions


def _list_loop(grows: bool) -> Program:
    """A loop that pushes its state (a vector of unknown size that starts with 3), and what is read of the list."""

    def step(x: tf.Tensor) -> tf.Tensor:
        x = tf.raw_ops.PlaceholderWithDefault(input=x, shape=[3])
        items = tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=[None], infer_shape=False)

        def body(i: tf.Tensor, y: tf.Tensor, items: tf.TensorArray) -> tuple:
            y = tf.concat([y, y], 0) if grows else tf.tanh(y)
            return i + 1, y, items.write(i, y)

        loop = tf.while_loop(
            lambda i, y, items: i < 2, body, [0, x, items],
            shape_invariants=[tf.TensorShape([]), tf.TensorShape([None]), None],
        )  # fmt: skip
        return loop[2].read(1)

    return capture_function(step, [np.ones(3, np.float32)]).program


@pytest.mark.parametrize("grows", [False, True])
def test_loop_state_and_lists_are_as_static_as_the_loop_keeps_them(grows: bool) -> None:
    program = _list_loop(grows)
    assert program.find_type(program.outputs[0]).shape == (None,)
    folded = fold(program)
    loop = next(n for n in folded.nodes if n.op in ("While", "StatelessWhile"))
    expected = (None,) if grows else (3,)
    assert expected in [t.shape for t in loop.outputs]
    assert folded.find_type(folded.outputs[0]).shape == expected
    if not grows:
        assert Shape((3,)) in loop.attrs["output_shapes"]


@pytest.mark.parametrize("op", sorted(IDENTITIES))
def test_a_list_that_is_handed_on_holds_what_it_held(op: str) -> None:
    """What is read of a list is as static as what was put in, whatever handed the list on."""
    vector, variant = TensorType("float32", (3,)), TensorType("variant", ())
    kind = {"element_dtype": DType("float32")}
    x = Node("x", "Placeholder", outputs=(vector,))
    sizes = [_const("shape", np.array([-1], np.int32)), _const("count", np.array(1, np.int32))]
    empty = Node("empty", "EmptyTensorList", (Ref("shape"), Ref("count")), outputs=(variant,), attrs=kind)
    pushed = Node("pushed", "TensorListPushBack", (Ref("empty"), Ref("x")), outputs=(variant,), attrs=kind)
    same = Node("same", op, (Ref("pushed"),), outputs=(variant,))
    loose = TensorType("float32", (None,))
    place = _const("place", np.array(0, np.int32))
    read = Node("read", "TensorListGetItem", (Ref("same"), Ref("place"), Ref("shape")), outputs=(loose,), attrs=kind)
    program = _one(x, *sizes, empty, pushed, same, place, read, out="read")
    assert refine_lists(program).find_type(Ref("read")) == vector
