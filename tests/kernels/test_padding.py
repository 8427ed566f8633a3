"""Products with rows that oneDNN is slow at: of wider matrices, with the values of the ones that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.kernels.one_rank import without
from tests.programs import Builder
from whale.ir.program import PRODUCT, Ref
from whale.ir.values import DType, TensorType, require_static_shape
from whale.kernels.matmuls import Factor, Padding, find_padding, pad_products
from whale.passes.analysis.uses import tensor_kinds
from whale.runtime.compile import settings
from whale_ops import processor

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def _multiplies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(settings, "can_multiply_by_avx2", lambda: True)
    yield
    wh.shutdown()


def alone(**config: Any) -> None:
    wh.init({"communication.in_process_ranks": 1, **config})


def padded(step: Any, *given: tf.Tensor) -> int:
    """How many products of a step are wider than the program's."""
    return sum(node.op == "Pad" for node in step._step(given, {}).compiled.ranks[0].nodes)


@pytest.mark.parametrize(
    ("left", "right", "turned", "padding"),
    [
        # The gradient of a weight: of logits, and of either half of a feed-forward network.
        ((512, 256), (512, 8192), True, Padding(0, 1, 16)),
        ((512, 256), (512, 1024), True, Padding(1, 1, 8)),
        ((512, 1024), (512, 256), True, Padding(0, 1, 8)),
        ((512, 8192), (512, 256), True, Padding(1, 1, 16)),
        # Of two that oneDNN would pack, the one with less to compute.
        ((512, 16384), (512, 267), True, Padding(1, 1, 5)),
        # Few rows.
        ((256, 512), (512, 8192), False, Padding(1, 1, 8)),
        ((128, 512), (512, 1024), False, Padding(1, 1, 8)),
        # Packed by oneDNN.
        ((512, 512), (512, 8192), True, None),
        ((1024, 256), (256, 1024), False, None),
        # Rows of other lengths.
        ((512, 256), (512, 1536), True, None),
        ((256, 1024), (1024, 512), False, None),
        # Too little to save.
        ((512, 48), (512, 1024), True, None),
        ((48, 256), (48, 1024), True, None),
        # Too large a copy.
        ((128, 2048), (2048, 102400), False, None),
        ((70000, 256), (70000, 8192), True, None),
        ((65536, 72), (65536, 1 << 18), True, None),
    ],
)
def test_what_is_padded(left: tuple[int, int], right: tuple[int, int], turned: bool, padding: Padding | None) -> None:
    factors = [Factor(Ref("x"), TensorType("float32", left), turned)]
    factors.append(Factor(Ref("y"), TensorType("float32", right), False))
    assert find_padding(*factors) == padding
    turned_right = Factor(Ref("y"), TensorType("float32", right[::-1]), True)
    assert find_padding(factors[0], turned_right) is None  # oneDNN reads both operands along their rows


@pytest.mark.parametrize(
    ("left", "right", "turned"),
    [
        ((72, 256), (72, 8192), True),
        ((72, 1024), (72, 72), True),
        ((72, 4096), (72, 256), True),
        ((250, 72), (72, 8192), False),
        ((64, 72), (72, 2048), False),
    ],
)
def test_values(left: tuple[int, int], right: tuple[int, int], turned: bool) -> None:
    draw = np.random.default_rng(1)
    given = tuple(tf.constant(draw.normal(size=shape), tf.float32) for shape in (left, right))

    def multiplied(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, w, transpose_a=turned)

    alone()
    step = wh.function(multiplied)
    np.testing.assert_allclose(step(*given), tf.function(multiplied)(*given), rtol=1e-4, atol=1e-4)
    assert padded(step, *given) == 1


def trained(function: Callable[..., Any]) -> tuple[list[np.ndarray], Any]:
    """Weights after three steps of a network with a wide layer."""
    tf.keras.utils.set_random_seed(1)
    draw = np.random.default_rng(1)
    x = tf.constant(draw.normal(size=(128, 64)), tf.float32)
    weights = [tf.Variable(draw.normal(size=shape) / 8, dtype=tf.float32) for shape in ((64, 1024), (1024, 64))]

    @function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[1]) - x))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.5 * gradient)
        return loss

    for _ in range(3):
        step(x)
    return [weight.numpy() for weight in weights], step


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_network_learns_the_same(ranks: int) -> None:
    expected, _ = trained(tf.function)
    wh.init({"communication.in_process_ranks": ranks})
    found, step = trained(wh.function)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    # The first layer's product, and the gradients of both weights, also of half of the rows.
    program = step._step((tf.zeros((128, 64)),), {}).compiled.ranks[0]
    assert sum(node.op == "Pad" for node in program.nodes) == 3
    kinds = tensor_kinds(program)
    assert [kinds.get(Ref(n.name)) for n in program.nodes if n.name.endswith(PRODUCT)].count("gradients") == 2


def test_copies_are_made_when_the_product_can_be_computed() -> None:
    """An activation's copy is not made in the forward pass already, to be held until the backward pass."""
    b = Builder()
    x, dy = b.input("x", (128, 256), "float32"), b.input("dy", (128, 8192), "float32")
    late = b.op("Neg", dy, name="late", T=DType("float32"))
    kinds = {"transpose_a": True, "transpose_b": False, "T": DType("float32")}
    built = b.build([b.op("MatMul", x, late, name="product", controls=["dy"], **kinds)])
    *others, product = built.nodes
    marked = product.with_marks(recomputed=True)
    program = pad_products(built.replace_nodes((*others, marked)))
    nodes = program.by_name
    (pad,) = [node for node in program.nodes if node.op == "Pad"]
    assert set(pad.controls) == {"late", "dy"} and pad.marks.recomputed
    assert nodes["product/whale_product"].controls == ("dy",)
    assert (nodes["product"].op, require_static_shape(nodes["product"].outputs[0])) == ("Slice", (256, 8192))
    assert pad_products(program).nodes == program.nodes


def test_the_key_and_other_processors_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tf.ones((64, 64)), tf.ones((64, 1024))

    def now(**config: Any) -> int:
        alone(**config)
        step = wh.function(tf.matmul)
        np.testing.assert_array_equal(step(*given), tf.fill((64, 1024), 64.0))
        found = padded(step, *given)
        wh.shutdown()
        return found

    assert now() == 1
    assert now(**without("padding")) == 0
    monkeypatch.setattr(settings, "can_multiply_by_avx2", lambda: False)
    assert now() == 0


@pytest.mark.parametrize(
    ("on", "flags", "expected"),
    [
        (True, "fpu avx avx2 fma", True),
        (True, "fpu avx avx2 fma avx512f avx512bw avx512dq avx512vl", False),
        (True, "fpu avx avx2 fma avx512f avx512cd", True),  # not the sets that oneDNN wants
        (True, "fpu avx", False),
        (False, "fpu avx avx2 fma", False),
    ],
)
def test_the_processor(on: bool, flags: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(processor.built, "IsMklEnabled", lambda: on)
    assert processor.can_multiply_by_avx2(tmp_path) == expected


def test_a_processor_of_another_kind_has_no_such_flags(tmp_path: Path) -> None:
    assert not processor.can_multiply_by_avx2(tmp_path / "nothing")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert not processor.can_multiply_by_avx2(tmp_path)
