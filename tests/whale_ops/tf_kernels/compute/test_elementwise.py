"""The operation of arithmetic on elements: instructions round as TensorFlow's kernels, however operands repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_ops

pytestmark = pytest.mark.core
SHAPE = (3, 40, 6, 50)
REPEATED = {
    "v": SHAPE,  # as it is
    "s": (1, 1),
    "r": (1, 6, 50),  # 300 elements, again and again: shorter than a block
    "c": (3, 40, 1, 1),  # each for 300 elements
}
UNARY: dict[str, Any] = {
    "Copy": tf.identity, "Neg": tf.negative, "Abs": tf.abs, "Square": tf.square, "Sqrt": tf.sqrt, "Relu": tf.nn.relu,
    "Relu6": tf.nn.relu6, "Sign": tf.sign,
}  # fmt: skip
BINARY: dict[str, Any] = {
    "Add": tf.add, "Sub": tf.subtract, "Mul": tf.multiply, "Div": tf.divide, "Max": tf.maximum, "Min": tf.minimum,
    "ReluGrad": lambda g, x: tf.raw_ops.ReluGrad(gradients=g, features=x),
    "Relu6Grad": lambda g, x: tf.raw_ops.Relu6Grad(gradients=g, features=x),
}  # fmt: skip


def arithmetic(
    program: list[str],
    values: list[Any],
    results: int = 1,
    shape: tuple[int, ...] = SHAPE,
    sums: tuple[tuple[int, ...], ...] = (),
) -> list[Any]:
    """The results, and then the sums."""
    found = whale_ops.load_ops().whale_elementwise(
        values, program=program, shape=shape, R=results, sum_shapes=sums, S=len(sums)
    )
    return [*found.results, *found.sums]


def numbers(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Of both signs and all sizes; each seventh is zero, infinite, or no number."""
    generator = np.random.default_rng(seed)
    found = generator.normal(size=shape) * 10.0 ** generator.integers(-3, 3, shape)
    flat = found.reshape(-1)
    flat[::7] = generator.choice([0.0, np.inf, -np.inf, np.nan, 6.0], len(flat[::7]))
    return found.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_instruction_rounds_as_tensorflows_kernel(dtype: str) -> None:
    given = {kind: tf.constant(numbers(i, shape, dtype)) for i, (kind, shape) in enumerate(REPEATED.items())}
    other = {kind: tf.constant(numbers(9 + i, shape, dtype)) for i, (kind, shape) in enumerate(REPEATED.items())}
    for name, of_tensorflow in UNARY.items():
        for kind, value in given.items():
            (found,) = arithmetic([f"{name} y0 {kind}0"], [value])
            np.testing.assert_array_equal(found, of_tensorflow(tf.broadcast_to(value, SHAPE)), f"{name} {kind}")
    for name, of_tensorflow in BINARY.items():
        for left, x in given.items():
            for right, y in other.items():
                second = f"{right}{int(left == right)}"
                values = [x, y] if "vsrc".index(left) <= "vsrc".index(right) else [y, x]
                (found,) = arithmetic([f"{name} y0 {left}0 {second}"], values)
                expected = of_tensorflow(tf.broadcast_to(x, SHAPE), tf.broadcast_to(y, SHAPE))
                np.testing.assert_array_equal(found, expected, f"{name} {left} {right}")


@pytest.mark.parametrize("width", [1, 2, 3, 64, 511, 512, 513, 1500])
def test_rows_of_any_length_begin_again_where_they_should(width: int) -> None:
    shape = (17, 5, width)
    generator = np.random.default_rng(width)
    v, r, long = (generator.normal(size=s) for s in (shape, (width,), (5, width)))
    found, twice = arithmetic(["Mul t0 v0 r0", "Add y0 t0 r1", "Add y1 y0 y0"], [v, r, long], 2, shape)
    np.testing.assert_array_equal(found, v * r + long)
    np.testing.assert_array_equal(twice, found + found)


def test_a_result_takes_the_place_of_a_tensor_that_nobody_reads_later() -> None:
    @tf.function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        one, other = tf.exp(x), tf.exp(-x)
        # y0 is written while v1 is still needed, y1 when nothing is.
        return tuple(arithmetic(["Mul y0 v0 v0", "Sub t0 y0 v1", "Add y1 t0 v1"], [one, other], 2, (1000, 40)))

    x = np.random.default_rng(0).normal(size=(1000, 40))
    for _ in range(3):
        first, second = step(tf.constant(x))
        one, other = tf.exp(x), tf.exp(-x)
        np.testing.assert_array_equal(first, one * one)
        np.testing.assert_array_equal(second, one * one - other + other)


@pytest.mark.parametrize("width", [1, 3, 8, 64, 96, 512, 700, 1500])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_over_the_first_sizes_are_those_of_numpy(width: int, dtype: str) -> None:
    shape = (37, 11, width)
    draw = np.random.default_rng(width)
    x, y = (draw.normal(1.0, size=shape).astype(dtype) for _ in range(2))
    row = draw.normal(size=width).astype(dtype)
    program = ["Mul t0 v0 r0", "Sum z0 t0", "Add y0 t0 v1", "Mean z1 y0", "Sum z2 v1"]
    sums = ((width,), (1, 1, width), (11, width))
    found = arithmetic(program, [x, y, row], 1, shape, sums)
    product = (x * row).astype("float64")
    total = product + y
    expected = [total, product.sum((0, 1)), total.mean((0, 1), keepdims=True), y.astype("float64").sum(0)]
    for one, other in zip(found, expected):
        assert one.shape == other.shape and one.dtype == dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=1e4 * np.finfo(dtype).eps)
    again = arithmetic(program, [x, y, row], 1, shape, sums)
    assert all(np.array_equal(one, other) for one, other in zip(found, again))  # whichever thread is first


def test_a_sum_of_many_keeps_its_digits() -> None:
    """Added one after the other, two million numbers in float32 would be off by a hundredth."""
    x = np.full((1 << 21, 8), 1.1, np.float32)
    (found,) = arithmetic(["Sum z0 v0"], [x], 0, x.shape, ((8,),))
    np.testing.assert_allclose(found, np.float64(np.float32(1.1)) * (1 << 21), rtol=1e-5)


def test_tensors_without_elements_are_computed() -> None:
    found, total = arithmetic(
        ["Add y0 v0 s0", "Sum z0 y0"], [tf.zeros((0, 3)), tf.zeros(())], shape=(0, 3), sums=((3,),)
    )
    assert found.shape == (0, 3)
    np.testing.assert_array_equal(total, np.zeros(3))


def test_shapes_of_sums_are_the_last_sizes() -> None:
    for shape in ((2,), (3, 1), (2, 1), (0,)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="a sum of shape"):
            arithmetic(["Sum z0 v0"], [tf.zeros((2, 3))], 0, (2, 3), (shape,))


@pytest.mark.parametrize(
    ("program", "shapes", "why"),
    [
        (
            ["Add y0 v0 v1"],
            [(2, 3), (3, 2)],
            "value 1 of WhaleElementwise has the shape \\[3,2\\], which is no tensor of \\[2,3\\]",
        ),
        (["Add y0 v0 s0"], [(2, 3), (3,)], "which is no scalar"),
        (["Add y0 v0 r0"], [(2, 3), (2,)], "which is no row"),
        (["Add y0 v0 c0"], [(2, 3), (2,)], "which is no column"),
        (["Add y0 v0 c0"], [(2, 3), (3, 1)], "which is no column"),
        (["Add y0 v0 v1"], [(2, 3)], "1 values, 1 results and 0 shapes of sums; its program expects 2, 1 and 0"),
        (["Add z0 v0 v0"], [(2, 3)], "'Add z0 v0 v0' is no instruction"),
        (["Sum y0 v0"], [(2, 3)], "'Sum y0 v0' is no instruction"),
        (["Sum z0 s0"], [()], "'Sum z0 s0' is no instruction"),
        (["Sum z0 v0", "Add y0 v0 z0"], [(2, 3)], "'Add y0 v0 z0' is no instruction"),
        (["Add n0 v0 o0"], [(2, 3)], "reads variables; expected tensors only"),
        (["Root y0 v0"], [(2, 3)], "'Root y0 v0' is no instruction"),
    ],
)
def test_what_does_not_fit_is_refused(program: list[str], shapes: list[tuple[int, ...]], why: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=why):
        arithmetic(program, [tf.zeros(shape) for shape in shapes], shape=(2, 3))
