"""The operation that updates many variables: each instruction rounds as TensorFlow's own kernel, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_ops

pytestmark = pytest.mark.core
UNARY: dict[str, Any] = {
    "Copy": tf.identity, "Neg": tf.negative, "Abs": tf.abs, "Sign": tf.sign, "Square": tf.square, "Sqrt": tf.sqrt,
    "Rsqrt": tf.math.rsqrt, "Reciprocal": tf.math.reciprocal,
}  # fmt: skip
BINARY: dict[str, Any] = {
    "Add": tf.add, "Sub": tf.subtract, "Mul": tf.multiply, "Div": tf.divide, "Max": tf.maximum, "Min": tf.minimum,
}  # fmt: skip


def update(variables: list[Any], values: list[Any], program: list[str], operands: list[int], **options: Any) -> Any:
    """Runs one operation; ``results`` says how many tensors it yields."""
    first = variables[0]
    return whale_ops.load_ops().whale_update(
        [v.handle for v in variables],
        [tf.convert_to_tensor(v, first.dtype) for v in values or [0.0]],  # the type of the first is that of all
        program=program,
        operands=operands,
        shapes=options.get("shapes", [first.shape]),
        R=options.get("results", 0),
    )


def numbers(seed: int, dtype: str) -> np.ndarray:
    """Of all sizes, both signs; each tenth is one of zeros, infinities, no number, and a subnormal one."""
    generator = np.random.default_rng(seed)
    count = 1500  # some blocks, and a part of one
    found = generator.normal(size=count) * 10.0 ** generator.integers(-12, 12, count)
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(dtype).tiny / 4]
    found[::10] = generator.choice(odd, len(found[::10]))
    return found.astype(dtype)


def same(left: Any, right: Any, what: str) -> None:
    left, right = np.asarray(left), np.asarray(right)
    nan = np.isnan(right)
    np.testing.assert_array_equal(np.isnan(left), nan, what)
    bits = {4: np.uint32, 8: np.uint64}[left.dtype.itemsize]
    differ = (left.view(bits) != right.view(bits)) & ~nan
    assert not differ.any(), f"{what}: {differ.sum()} of {len(left)}: {left[differ][:4]} {right[differ][:4]}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_instruction_rounds_as_tensorflows_kernel(dtype: str) -> None:
    a, b, c = numbers(1, dtype), numbers(2, dtype), np.asarray(0.3, dtype)
    # TensorFlow's threads take subnormal numbers for zero: which of two zeros is greater depends on where they stand.
    normal_a, normal_b = (np.where(np.abs(x) < np.finfo(dtype).tiny, 0, x).astype(dtype) for x in (a, b))
    for name, of_tensorflow in UNARY.items():
        if dtype == "float32" and name in ("Rsqrt", "Reciprocal"):
            continue  # TensorFlow's are approximations there: such operations are left to it
        given = normal_a if name == "Sign" else a
        variable = tf.Variable(given)
        update([variable], [], [f"{name} n0 o0"], [])
        same(variable, of_tensorflow(tf.constant(given)), name)
    for name, of_tensorflow in BINARY.items():
        x, y = (normal_a, normal_b) if name in ("Max", "Min") else (a, b)
        for left, right, text in ((x, y, "v0 v1"), (x, c, "v0 s0"), (c, y, "s0 v0")):
            values = [tf.constant(left), tf.constant(right)]
            variable = tf.Variable(tf.zeros_like(a))
            update([variable], values, [f"{name} n0 {text}"], [1, 0] if text == "s0 v0" else [0, 1])
            same(variable, of_tensorflow(*values), f"{name} {text}")


def test_several_variables_results_and_blocks() -> None:
    shapes = [(700, 3), (1,), (0, 4), (5, 2)]
    generator = np.random.default_rng(0)
    weights, slots, slopes = ([tf.Variable(generator.normal(size=s)) for s in shapes] for _ in range(3))
    held = [w.read_value() for w in weights]  # whoever has read a variable keeps what it read
    before = [h.numpy() for h in held]
    expected = []
    for w, m, g in zip(weights, slots, slopes):
        new = m.numpy() * 0.9 + g.numpy()
        expected.append((new, w.numpy() - new * np.float64(0.1), np.abs(new)))
    program = ["Mul t0 o1 s0", "Add n1 t0 v0", "Mul t0 n1 s1", "Sub n0 o0 t0", "Abs y0 n1"]
    variables = [v for pair in zip(weights, slots) for v in pair]
    operands = [i for k in range(4) for i in (k, 4, 5)]
    results = update(variables, [*slopes, 0.9, 0.1], program, operands, shapes=shapes, results=4)
    for w, m, result, (new, weight, magnitude) in zip(weights, slots, results, expected):
        np.testing.assert_array_equal(m.numpy(), new)
        np.testing.assert_array_equal(w.numpy(), weight)
        np.testing.assert_array_equal(result.numpy(), magnitude)
    for tensor, value in zip(held, before):
        np.testing.assert_array_equal(tensor.numpy(), value)


def test_a_variable_that_is_only_assigned_may_get_its_first_value() -> None:
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(2, 3), shared_name="first_value")
    given = {"operands": [0], "shapes": [(2, 3)], "R": 0}
    whale_ops.load_ops().whale_update([handle], [tf.ones((2, 3))], program=["Neg n0 v0"], **given)
    np.testing.assert_array_equal(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32), -np.ones((2, 3)))
    none = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(2, 3), shared_name="no_value")
    with pytest.raises(tf.errors.NotFoundError):
        whale_ops.load_ops().whale_update([none], [tf.ones((2, 3))], program=["Add n0 o0 v0"], **given)


def test_what_does_not_fit_is_refused() -> None:
    variable = tf.Variable(tf.zeros((2, 3)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="'Root n0 o0' is no instruction"):
        update([variable], [], ["Root n0 o0"], [])
    for line in ("Mul n0 o0", "Sqrt o0 n0", "Sqrt n0 o0 o0", "Sqrt n0 o99"):
        with pytest.raises(tf.errors.InvalidArgumentError, match="is no instruction"):
            update([variable], [1.0], [line], [0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="WhaleUpdate has columns or sums"):
        update([variable], [tf.zeros((2, 1))], ["Mul n0 o0 c0"], [0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="an operand of shape"):
        update([variable], [tf.zeros((3, 2))], ["Add n0 o0 v0"], [0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="`operands` of WhaleUpdate has 0 numbers for 1 values"):
        update([variable], [tf.zeros((2, 3))], ["Add n0 o0 v0"], [])
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="has the shape \\[2,3\\]; expected float of shape \\[6\\]"
    ):
        update([variable], [], ["Neg n0 o0"], [], shapes=[(6,)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="1 variables and 0 results; expected 1 and 1"):
        update([variable], [], ["Neg n0 o0", "Neg y0 o0"], [])
    np.testing.assert_array_equal(variable.numpy(), np.zeros((2, 3)))
