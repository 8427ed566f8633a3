"""Powers with constant exponents are other operations, of the same values; others stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tests.capture.roundtrip import rebuilt
from whale.capture.function import capture_function
from whale.passes.normalize.folding.fold import powers

pytestmark = pytest.mark.core
X = np.array([0.0, 0.25, 1.5, 9.0], np.float32)


@pytest.mark.parametrize(
    "raised, op",
    [
        (lambda x: x**0.5, "Sqrt"),
        (lambda x: x**2.0, "Square"),
        (lambda x: x**-0.5, "Rsqrt"),
        (lambda x: x**-1.0, "Reciprocal"),
        (lambda x: x**1.0, "Identity"),
        (lambda x: x**1.5, "Pow"),
        (lambda x: tf.cast(x, tf.int32) ** 2, "Pow"),
        (lambda x: x ** tf.constant([0.5] * 4), "Pow"),
        (lambda x: 2.0**x, "Pow"),
        (lambda x: tf.constant(2.0) ** x[0], "Pow"),
    ],
)
def test_each_exponent_has_its_operation(raised: Callable[[tf.Tensor], tf.Tensor], op: str) -> None:
    captured = capture_function(raised, [tf.constant(X)])
    before, after = captured.program, powers(captured.program)
    (node,) = (one for one, other in zip(after.nodes, before.nodes, strict=True) if other.op == "Pow")
    assert node.op == op and node.outputs == before.by_name[node.name].outputs
    np.testing.assert_allclose(rebuilt(captured, (powers,))(tf.constant(X))[0], raised(tf.constant(X)), rtol=1e-6)
