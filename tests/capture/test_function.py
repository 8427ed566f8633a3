"""Tracing: shapes, values, variables, other captures, effects and what is returned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.pyct.transpiler import PyToPy

from tests.capture.roundtrip import NORMALISED, rebuilt
from whale.capture import function as function_module
from whale.capture.function import capture_function
from whale.capture.signature import flatten_arguments
from whale.errors import CaptureError
from whale.ir.values import TensorType

pytestmark = pytest.mark.core


def _call(captured, *tensors):
    return captured.pack_outputs(rebuilt(captured, NORMALISED)(*map(tf.convert_to_tensor, tensors)))


def test_inputs_are_called_and_typed_like_the_arguments() -> None:
    def step(x, batch, *, flag, rate=0.5):
        return x * rate + batch["b"] if flag else batch["a"]

    x, batch = np.ones((4, 2), np.float32), {"b": np.ones((4, 1), np.float32), "a": np.zeros((3,), np.int32)}
    captured = capture_function(step, [x, batch], {"flag": True})
    program = captured.program
    assert captured.inputs == ("x", "batch_a", "batch_b") == program.inputs
    assert [program.by_name[n].outputs[0] for n in program.inputs] == [
        TensorType("float32", (4, 2)), TensorType("int32", (3,)), TensorType("float32", (4, 1)),
    ]  # fmt: skip
    np.testing.assert_array_equal(_call(captured, x, batch["a"], batch["b"]), np.full((4, 2), 1.5))


def test_unknown_sizes_of_a_signature_take_those_of_the_arguments() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32)])
    def step(x):
        return tf.shape(x)[0] * 2

    captured = capture_function(step, [np.ones((5, 3))])
    assert captured.program.by_name["x"].outputs[0] == TensorType("float32", (5, 3))
    assert _call(captured, np.ones((5, 3), np.float32)).numpy() == 10
    with pytest.raises(CaptureError, match="does not fit the function's input_signature"):
        capture_function(step, [np.ones((5, 4), np.float32)])


def test_a_signature_makes_tensors_of_what_it_covers() -> None:
    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.float64),
            {"rate": tf.TensorSpec([], tf.float32), "ids": tf.TensorSpec([2], tf.int64)},
            tf.TensorSpec([], tf.int32),
        ]
    )
    def step(x, settings, count=3, flag=True):
        return (x if flag else -x) * tf.cast(settings["rate"], x.dtype) * tf.cast(count, x.dtype)

    signature = step.input_signature
    captured = capture_function(step, [np.ones(4, np.float32), {"rate": 2, "ids": [1, 2]}])
    types = [captured.program.by_name[n].outputs[0] for n in captured.inputs]
    assert types == [
        TensorType("float64", (4,)), TensorType("int64", (2,)), TensorType("float32", ()), TensorType("int32", ()),
    ]  # fmt: skip
    given = flatten_arguments(
        step.python_function, [np.ones(4, np.float32), {"rate": 2, "ids": [1, 2]}], {}, signature
    ).tensors
    assert _call(captured, *given).numpy().tolist() == [6.0] * 4

    def key(*args, **kwargs):
        return flatten_arguments(step.python_function, args, kwargs, signature).key

    settings: dict[str, Any] = {"rate": 2.0, "ids": [1, 2]}
    assert key([1.0], settings, 1) == key([7], {"rate": 3, "ids": np.array([4, 5])}, count=5)
    assert key([1.0], settings) != key([1.0], settings, flag=False)
    wrong: dict[str, tuple[Any, ...]] = {
        "a dtype": (tf.constant([1.0]), settings), "no number": (["a"], settings), "a rank": (1.0, settings),
        "a size": ([1], {**settings, "ids": [1]}), "a structure": ([1.0], [2.0, [1, 2]]),
    }  # fmt: skip
    for what, args in wrong.items():
        with pytest.raises(CaptureError, match="does not fit the function's input_signature"):
            raise AssertionError(what, key(*args))
    with pytest.raises(CaptureError, match="describes more arguments than the call passes"):
        flatten_arguments(lambda x: x, [[1.0]], {}, signature)


def test_captured_strings_are_constants() -> None:
    word, words = tf.constant(b"ab\0"), tf.constant([["c", "d"]])
    captured = capture_function(lambda x: (tf.strings.join([word, words]), x), [np.float32(1)])
    assert not captured.captures
    joined, _ = _call(captured, np.float32(1))
    assert joined.numpy().tolist() == [[b"ab\0c", b"ab\0d"]]


def test_specs_must_be_static() -> None:
    with pytest.raises(CaptureError, match="not fully known"):
        capture_function(lambda x: x, [tf.TensorSpec([None, 2])])
    with pytest.raises(CaptureError, match="does not take these arguments"):
        capture_function(lambda x: x, [1, 2])


def test_a_compiled_function_stays_a_compiled_call() -> None:
    program = capture_function(tf.function(lambda x: x, jit_compile=True), [1.0]).program
    (call,) = [n for n in program.nodes if n.op.endswith("PartitionedCall")]
    assert call.attrs["_XlaMustCompile"] is True


def test_autograph_rewrites_python_control_flow() -> None:
    def step(x):
        total = tf.zeros_like(x)
        for i in tf.range(4):
            if tf.reduce_sum(x) > 0:
                total += x * tf.cast(i, x.dtype)
        return total

    captured = capture_function(step, [np.ones(2, np.float32)])
    assert captured.program.functions
    assert _call(captured, np.ones(2, np.float32)).numpy().tolist() == [6.0, 6.0]
    assert _call(captured, -np.ones(2, np.float32)).numpy().tolist() == [0.0, 0.0]


def test_autograph_rewrites_what_a_lambda_calls() -> None:
    def doubled(x):
        while tf.reduce_sum(x) < 10:
            x = x * 2
        return x

    captured = capture_function(lambda x: doubled(x), [np.ones(2, np.float32)])
    assert _call(captured, np.ones(2, np.float32)).numpy().tolist() == [8.0, 8.0]


def test_autograph_rewrites_what_a_user_wrote_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten = []
    original = PyToPy.transform_function

    def note(transpiler, function, context):
        rewritten.append(function.__name__)
        return original(transpiler, function, context)

    monkeypatch.setattr(PyToPy, "transform_function", note)

    def inner(x):
        return x * 2 if tf.reduce_sum(x) > 0 else x

    def step(x):
        return inner(x)

    capture_function(step, [np.ones(2, np.float32)])
    assert rewritten == ["step", "inner"]
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        capture_function(tf.function(step, autograph=False), [np.ones(2, np.float32)])


def test_variables_made_by_the_first_call() -> None:
    class Step(tf.Module):
        made = None

        def __call__(self, x):
            if self.made is None:
                self.made = tf.Variable(tf.fill([2], 3.0), name="kernel")
            self.made.assign_add(x)
            return tf.reduce_sum(self.made)

    step = Step()
    captured = capture_function(step.__call__, [np.ones(2, np.float32)])
    (variable,) = captured.variables
    assert variable.variable is step.made
    assert variable.handle is step.made.handle
    assert captured.program.variables[0].type == TensorType("float32", (2,))
    assert captured.program.variables[0].name == variable.name == "kernel"
    assert step.made.numpy().tolist() == [3.0, 3.0], "tracing runs nothing"
    assert _call(captured, np.ones(2, np.float32)).numpy() == 8.0
    assert step.made.numpy().tolist() == [4.0, 4.0]


def test_variable_known_by_its_handle_only() -> None:
    v = tf.Variable([1.0, 2.0])

    def step(x):
        tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=x)
        return x

    captured = capture_function(step, [np.ones(2, np.float32)])
    (variable,) = captured.variables
    _call(captured, np.ones(2, np.float32))
    assert variable.variable.numpy().tolist() == v.numpy().tolist() == [2.0, 3.0]


def test_variables_of_one_name_stay_apart() -> None:
    a, b = tf.Variable(1.0, name="v"), tf.Variable(2.0, name="v")
    captured = capture_function(lambda x: x * a + b, [1.0 * np.ones(1, np.float32)])
    assert [v.name for v in captured.program.variables] == ["v", "v_1"]
    assert [v.variable.numpy() for v in captured.variables] == [1.0, 2.0]


def test_effects_are_what_acts() -> None:
    a, b = tf.Variable(1.0, name="a"), tf.Variable(2.0, name="b")

    @tf.function
    def reads(x):
        return x + b

    def step(x):
        a.assign_add(reads(x))
        tf.print("step", a, output_stream="file:///dev/null")
        return a + b

    program = capture_function(step, [np.float32(1)]).program
    assert sorted(program.by_name[e].op for e in program.effects) == ["AssignAddVariableOp", "PrintV2"]


def test_loops_that_only_read_are_no_effects() -> None:
    b = tf.Variable(2.0)

    def read_only(x):
        return tf.while_loop(lambda y: y < 9.0, lambda y: (y + b,), [x])[0]

    def writes(x):
        def body(y):
            b.assign_add(1.0)
            return (y + b,)

        return tf.while_loop(lambda y: y < 9.0, body, [x])[0]

    assert not capture_function(read_only, [np.float32(1)]).program.effects
    program = capture_function(writes, [np.float32(1)]).program
    assert [program.by_name[e].op for e in program.effects] == ["While"]


def test_captured_tensors_are_constants_unless_large(monkeypatch: pytest.MonkeyPatch) -> None:
    held = tf.constant(np.arange(6.0))
    arguments = [np.ones(6)]
    captured = capture_function(lambda x: x * held, arguments)
    assert not captured.captures
    assert captured.inputs == captured.program.inputs == ("x",)
    assert _call(captured, *arguments).numpy().tolist() == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(function_module, "_LARGEST_CONSTANT_BYTES", 40)
    captured = capture_function(lambda x: x * held, arguments)
    ((node, tensor),) = captured.captures
    assert tensor is held
    assert captured.program.inputs == ("x", node)
    assert _call(captured, *arguments).numpy().tolist() == [0, 1, 2, 3, 4, 5]


def test_other_resources_are_passed_at_each_call() -> None:
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [7]), -1)
    captured = capture_function(lambda x: table.lookup(x), [np.array(["a", "b"])])
    assert len(captured.captures) == 1
    assert not captured.variables
    assert _call(captured, np.array(["a", "b"])).numpy().tolist() == [7, -1]


def test_what_is_returned_keeps_its_structure() -> None:
    def step(x):
        return {"a": (x, None, 3), "b": [x + 1, x]}

    result = _call(capture_function(step, [np.float32(1)]), np.float32(1))
    assert result["a"][1] is None
    assert [float(t) for t in tf.nest.flatten([result["a"][0], result["a"][2], result["b"]])] == [1, 3, 2, 1]


def test_composite_arguments_and_results() -> None:
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])

    def step(r):
        return r.with_values(r.values * 2)

    arguments = flatten_arguments(step, [ragged], {})
    result = _call(capture_function(step, [ragged]), *arguments.tensors)
    assert isinstance(result, tf.RaggedTensor)
    assert result.to_list() == [[2.0, 4.0], [6.0]]


def test_key_tells_calls_apart_that_need_another_trace() -> None:
    def step(x, y=1, *rest, **named):
        return x

    x = np.ones((2, 3), np.float32)

    def key(*args, **kwargs):
        return flatten_arguments(step, args, kwargs).key

    assert key(x) == key(tf.constant(x * 2)) == key(tf.TensorSpec([2, 3]))
    different = [
        key(x), key(x.astype(np.float64)), key(np.ones((3, 3), np.float32)), key(x, 2), key(x, 2.0), key(x, True),
        key(x, x), key(x, 1, 3), key(x, z=1), key(x, z=[1]), key([x]), key(x, "1"),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    unhashable = [[]], {"a": {1}}
    assert key(x, unhashable) == key(x, unhashable)


def test_a_method_and_its_self() -> None:
    class Trainer:
        scale = 4.0

        def step(self, x):
            return x * self.scale

    captured = capture_function(Trainer().step, [np.float32(2)])
    assert captured.program.name == "step"
    assert _call(captured, np.float32(2)).numpy() == 8.0


def test_nodes_are_in_order_and_reachable() -> None:
    v = tf.Variable(np.ones((2, 2), np.float32))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(x, v) ** 2)
        unused = tf.exp(x)
        del unused
        v.assign_sub(tape.gradient(loss, v))
        return loss

    program = capture_function(step, [np.ones((3, 2), np.float32)]).program
    seen: set[str] = set()
    for node in program.nodes:
        assert seen.issuperset(r.node for r in node.inputs)
        assert seen.issuperset(node.controls)
        seen.add(node.name)
    assert "Exp" not in {n.op for n in program.nodes}
    assert all(t.is_static for n in program.nodes for t in n.outputs)
