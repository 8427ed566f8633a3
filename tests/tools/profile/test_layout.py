"""Operations on images, turned so that the channels come first, as steps on GPUs have them."""

from __future__ import annotations

import numpy as np
import pytest

from whale.ir.program import Node, Program, Ref, make_const
from whale.ir.values import DType, TensorType
from whale.tools.profile.operations import TURNED, turn


def image(*shape: int) -> TensorType:
    return TensorType("float32", shape)


def program(op: str, *operands: TensorType | np.ndarray, outputs: tuple[TensorType, ...], **attrs: object) -> Program:
    """A program of one operation; arrays are constants."""
    nodes = [
        make_const(f"c{i}", one) if isinstance(one, np.ndarray) else Node(f"x{i}", "Placeholder", outputs=(one,))
        for i, one in enumerate(operands)
    ]
    attrs = {"T": DType("float32"), "data_format": "NHWC", **attrs}
    return Program("p", (*nodes, Node("it", op, tuple(Ref(n.name) for n in nodes), (), attrs, outputs)))


def turned(before: Program) -> tuple[list[tuple[int | None, ...] | None], Node, Program]:
    """Shapes of the operands, the node, and its program."""
    after, node = turn(before, before.by_name["it"])
    return [after.find_type(ref).shape for ref in node.inputs], node, after


def test_a_convolution_has_the_channels_first() -> None:
    x, w, y = image(8, 32, 30, 3), image(5, 4, 3, 16), image(8, 16, 10, 16)
    pads = (0, 0, 1, 2, 3, 4, 0, 0)
    before = program("Conv2D", x, w, outputs=(y,), strides=(1, 2, 3, 1), dilations=(1, 1, 1, 1), explicit_paddings=pads)
    shapes, node, _ = turned(before)
    assert shapes == [(8, 3, 32, 30), (5, 4, 3, 16)] and node.outputs[0].shape == (8, 16, 16, 10)
    assert node.attrs["data_format"] == "NCHW" and node.attrs["strides"] == (1, 1, 2, 3)
    assert node.attrs["explicit_paddings"] == (0, 0, 0, 0, 1, 2, 3, 4)


def test_sizes_that_are_constants_are_turned_too() -> None:
    x, w, y = image(8, 32, 30, 3), image(5, 5, 3, 16), image(8, 32, 30, 16)
    before = program(
        "Conv2DBackpropInput", np.array([8, 32, 30, 3], np.int32), w, y, outputs=(x,), strides=(1, 1, 1, 1)
    )
    shapes, node, after = turned(before)
    assert after.const(node.inputs[0]).tolist() == [8, 3, 32, 30]  # type: ignore[union-attr]
    assert shapes[1:] == [(5, 5, 3, 16), (8, 16, 32, 30)] and node.outputs[0].shape == (8, 3, 32, 30)
    sizes = np.array([5, 5, 3, 16], np.int32)
    before = program("Conv2DBackpropFilter", x, sizes, y, outputs=(w,), strides=(1, 1, 1, 1))
    shapes, node, after = turned(before)
    assert after.const(node.inputs[1]).tolist() == [5, 5, 3, 16], "a filter keeps its layout"  # type: ignore[union-attr]
    assert shapes[0] == (8, 3, 32, 30) and node.outputs[0].shape == (5, 5, 3, 16)


@pytest.mark.parametrize("op", ["MatMul", "Conv2D"])
def test_others_stay_as_they_are(op: str) -> None:
    before = program(op, image(4, 4), image(4, 4), outputs=(image(4, 4),))
    assert turn(before, before.by_name["it"]) == (before, before.by_name["it"])
    first = program(op, image(8, 3, 4, 4), image(1, 1, 3, 3), outputs=(image(8, 3, 4, 4),), data_format="NCHW")
    assert turn(first, first.by_name["it"])[1] is first.by_name["it"]


def test_statistics_keep_their_shapes() -> None:
    assert {"MaxPoolGrad", "FusedBatchNormV3"} <= set(TURNED)
    x, c = image(8, 6, 5, 3), image(3)
    shapes, node, _ = turned(program("FusedBatchNormV3", x, c, c, c, c, outputs=(x, c, c, c, c, c), epsilon=1e-3))
    assert shapes == [(8, 3, 6, 5), (3,), (3,), (3,), (3,)]
    assert [t.shape for t in node.outputs] == [(8, 3, 6, 5), (3,), (3,), (3,), (3,), (3,)]
