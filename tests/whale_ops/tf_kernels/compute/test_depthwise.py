"""The gradient of a depthwise convolution's filter: that of TensorFlow's kernel, or of sums written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_ops

pytestmark = pytest.mark.core
EXPLICIT = (0, 0, 2, 1, 0, 3, 0, 0)


def gradient(x: Any, back: Any, filter_shape: tuple[int, ...], strides: tuple[int, ...], padding: Any) -> np.ndarray:
    """The filter's, by our kernel; `padding`: its name, or explicit paddings."""
    explicit = [] if isinstance(padding, str) else list(padding)
    return (
        whale_ops.load_ops()
        .whale_depthwise_filter_gradient(
            x,
            back,
            filter_shape=filter_shape,
            strides=strides,
            padding="EXPLICIT" if explicit else padding,
            explicit_paddings=explicit,
        )
        .numpy()
    )


def around(size: int, taps: int, stride: int, padding: Any, dim: int) -> tuple[int, int, int]:
    """How often the filter is laid on, and what is added before and after."""
    if padding == "SAME":
        steps = -(-size // stride)
        both = max((steps - 1) * stride + taps - size, 0)
        return steps, both // 2, both - both // 2
    before, after = (0, 0) if padding == "VALID" else padding[2 * dim : 2 * dim + 2]
    return max((size + before + after - taps) // stride + 1, 0), before, after


def case(
    x_shape: tuple[int, ...], filter_shape: tuple[int, ...], strides: tuple[int, ...], padding: Any, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """An input, and what comes back for it."""
    sizes = [around(x_shape[dim], filter_shape[dim - 1], strides[dim], padding, dim)[0] for dim in (1, 2)]
    draw = np.random.default_rng(sum(x_shape))
    x = draw.normal(size=x_shape)
    back = draw.normal(size=(x_shape[0], *sizes, filter_shape[2] * filter_shape[3]))
    return x.astype(dtype), back.astype(dtype)


def written_out(
    x: np.ndarray, back: np.ndarray, filter_shape: tuple[int, ...], strides: tuple[int, ...], padding: Any
) -> np.ndarray:
    """The sums, a tap of the filter at a time."""
    (rows, *above), (columns, *left) = (
        around(x.shape[dim], filter_shape[dim - 1], strides[dim], padding, dim) for dim in (1, 2)
    )
    padded = np.pad(x.astype("float64"), [(0, 0), above, left, (0, 0)])
    many = back.astype("float64").reshape((*back.shape[:3], *filter_shape[2:]))
    found = np.zeros(filter_shape)
    for i, j in np.ndindex(*filter_shape[:2]):
        seen = padded[:, i : i + rows * strides[1] : strides[1], j : j + columns * strides[2] : strides[2]]
        found[i, j] = np.einsum("nhwc,nhwcm->cm", seen[:, :rows, :columns], many)
    return found


def assert_close(found: np.ndarray, expected: Any, dtype: str) -> None:
    assert found.dtype == dtype
    expected = np.asarray(expected)
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("channels", [1, 3, 7, 16, 65, 384])
@pytest.mark.parametrize("padding", ["SAME", "VALID", EXPLICIT])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_gradient_is_that_of_tensorflows_kernel(stride: int, padding: Any, channels: int, multiplier: int) -> None:
    strides = (1, stride, stride, 1)
    for taps in ((3, 3), (5, 5), (1, 1), (2, 4)):
        for images, height, width in ((1, 9, 6), (8, 5, 7)):
            filter_shape, x_shape = (*taps, channels, multiplier), (images, height, width, channels)
            x, back = case(x_shape, filter_shape, strides, padding, "float64")
            explicit = [] if isinstance(padding, str) else list(padding)
            expected = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
                input=x, filter_sizes=filter_shape, out_backprop=back, strides=strides,
                padding="EXPLICIT" if explicit else padding, explicit_paddings=explicit,
            )  # fmt: skip
            assert_close(gradient(x, back, filter_shape, strides, padding), expected, "float64")
            x, back = x.astype("float32"), back.astype("float32")
            expected = written_out(x, back, filter_shape, strides, padding)
            assert_close(gradient(x, back, filter_shape, strides, padding), expected, "float32")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("x_shape", "taps", "strides", "padding"),
    [
        ((8, 2, 2, 24), (3, 3), (1, 1), "SAME"),  # smaller than the filter
        ((8, 1, 1, 40), (3, 3), (1, 1), "SAME"),
        ((2, 2, 3, 9), (7, 5), (1, 1), "SAME"),
        ((2, 2, 3, 9), (7, 7), (2, 2), (0, 0, 4, 3, 3, 3, 0, 0)),
        ((1, 1, 5, 8), (3, 3), (2, 2), (0, 0, 5, 6, 7, 8, 0, 0)),  # some places see nothing but padding
        ((3, 7, 9, 10), (3, 3), (2, 1), "SAME"),  # strides that differ, of which TensorFlow has no kernel
        ((3, 7, 9, 10), (3, 2), (1, 3), "VALID"),
        ((3, 7, 9, 10), (2, 2), (3, 4), EXPLICIT),
        ((2, 3, 4, 8), (5, 5), (1, 1), "VALID"),  # nothing comes back
        ((40, 3, 3, 8), (3, 3), (1, 1), "SAME"),  # many images of one tile
        ((2, 5, 300, 48), (3, 3), (1, 1), "SAME"),  # rows longer than a tile, and divided over threads
        ((9, 56, 14, 33), (3, 3), (1, 1), "SAME"),
    ],
)
@pytest.mark.parametrize("multiplier", [1, 3])
def test_sizes_of_all_kinds(
    x_shape: tuple[int, ...], taps: tuple[int, int], strides: tuple[int, int], padding: Any, multiplier: int, dtype: str
) -> None:
    filter_shape, all_strides = (*taps, x_shape[3], multiplier), (1, *strides, 1)
    x, back = case(x_shape, filter_shape, all_strides, padding, dtype)
    found = gradient(x, back, filter_shape, all_strides, padding)
    assert_close(found, written_out(x, back, filter_shape, all_strides, padding), dtype)


@pytest.mark.parametrize("x_shape", [(8, 24, 24, 16), (4, 3, 3, 2000)])  # divided by rows, and by channels
def test_a_gradient_has_the_same_bits_each_time(x_shape: tuple[int, ...]) -> None:
    filter_shape = (3, 3, x_shape[3], 1)
    x, back = case(x_shape, filter_shape, (1, 1, 1, 1), "SAME", "float32")
    found = gradient(x, back, filter_shape, (1, 1, 1, 1), "SAME")
    for _ in range(20):
        np.testing.assert_array_equal(gradient(x, back, filter_shape, (1, 1, 1, 1), "SAME"), found)


def test_a_sum_of_many_keeps_its_digits() -> None:
    """Added one after the other, the million numbers in float32 would be off by a hundredth."""
    x, back = np.full((4, 512, 512, 1), 1.1, np.float32), np.ones((4, 512, 512, 1), np.float32)
    found = gradient(x, back, (1, 1, 1, 1), (1, 1, 1, 1), "SAME")
    np.testing.assert_allclose(found, np.float64(np.float32(1.1)) * (1 << 20), rtol=1e-4)


def test_padding_is_not_multiplied() -> None:
    """What comes back may be infinite: times the zeros of a padding, it would be no number."""
    x, back = np.ones((1, 2, 2, 8), np.float32), np.full((1, 2, 2, 8), np.inf, np.float32)
    np.testing.assert_array_equal(gradient(x, back, (3, 3, 8, 1), (1, 1, 1, 1), "SAME"), np.full((3, 3, 8, 1), np.inf))


@pytest.mark.parametrize("x_shape", [(0, 4, 4, 8), (2, 0, 4, 8)])
def test_nothing_gives_zeros(x_shape: tuple[int, ...]) -> None:
    found = gradient(tf.zeros(x_shape), tf.zeros(x_shape), (3, 3, 8, 1), (1, 1, 1, 1), "SAME")
    np.testing.assert_array_equal(found, np.zeros((3, 3, 8, 1)))


def test_the_shape_is_known_before_it_is_computed() -> None:
    @tf.function
    def of_any(x: tf.Tensor, back: tf.Tensor) -> tf.Tensor:
        found = whale_ops.load_ops().whale_depthwise_filter_gradient(
            x, back, filter_shape=(3, 5, 4, 2), strides=(1, 1, 1, 1), padding="SAME"
        )
        assert found.shape == (3, 5, 4, 2)
        return found

    of_any.get_concrete_function(tf.TensorSpec(None), tf.TensorSpec(None))


GOOD: dict[str, Any] = {
    "x": (2, 4, 6, 3),
    "back": (2, 4, 6, 6),
    "filter_shape": (3, 3, 3, 2),
    "strides": (1, 1, 1, 1),
    "padding": "SAME",
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"x": (4, 6, 3)}, r"input has the shape \[4,6,3\]; expected 4 dimensions, and 3 channels"),
        ({"x": (2, 4, 6, 4)}, r"input has the shape \[2,4,6,4\]; expected 4 dimensions, and 3 channels"),
        ({"back": (2, 4, 6)}, r"out_backprop has the shape \[2,4,6\]; expected \[2,4,6,6\] of the input \[2,4,6,3\]"),
        ({"back": (1, 4, 6, 6)}, r"expected \[2,4,6,6\]"),
        ({"back": (2, 4, 6, 3)}, r"expected \[2,4,6,6\]"),
        ({"padding": "VALID"}, r"expected \[2,2,4,6\] .* strides \[1,1,1,1\] and padding VALID"),
        ({"strides": (1, 2, 1, 1)}, r"expected \[2,2,6,6\] .* strides \[1,2,1,1\]"),
        ({"padding": EXPLICIT}, r"expected \[2,5,7,6\]"),
        ({"strides": (1, 0, 1, 1)}, r"strides are \[1,0,1,1\]; expected \[1, height, width, 1\]"),
        ({"strides": (2, 1, 1, 1)}, r"strides are \[2,1,1,1\]"),
        ({"strides": (1, 1)}, r"strides are \[1,1\]"),
        ({"filter_shape": (3, 3, 3)}, r"filter_shape is \[3,3,3\]; expected \[height, width, channels, multiplier\]"),
        ({"filter_shape": (3, 0, 3, 2)}, r"filter_shape is \[3,0,3,2\]"),
        ({"padding": (0, 0, 1, 1)}, r"explicit_paddings are \[0,0,1,1\] with padding EXPLICIT; expected \[0, 0, top"),
        ({"padding": (0, 0, 1, -1, 1, 1, 0, 0)}, "none negative"),
        ({"padding": (0, 1, 1, 1, 1, 1, 0, 0)}, r"explicit_paddings are \[0,1,1,1,1,1,0,0\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], why: str) -> None:
    given = {**GOOD, **changes}
    x, back = tf.zeros(given.pop("x")), tf.zeros(given.pop("back"))
    with pytest.raises(tf.errors.InvalidArgumentError, match=why):
        gradient(x, back, **given)
