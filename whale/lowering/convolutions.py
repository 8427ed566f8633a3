"""Convolutions as products of matrices, where TensorFlow's kernels take longer on processors, in what one rank runs.

A convolution of single points (1x1 filters, as in MobileNet's and ResNet's bottlenecks) is the product of the matrices
[points, channels] and [channels, filters], and so are its gradients; the gradient of any filter is such a product with
the patches of the image that each point is made of. oneDNN lays weights and images out in blocks first and hands parts
to its threads, for 0.2 to 0.5 ms a call, and more with many weights. Where there is little to compute, or there are few
points for many weights, that is most of the time.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import NamedTuple

from whale.ir.program import COMPILED, ON_HOST, Node, Program, Ref
from whale.ir.values import DType, TensorType, static_shape
from whale.lowering.compiled import in_other_graphs
from whale.lowering.emit import Emitter

_DTYPES = ("float32", "float64")
_FILTERS = "Conv2DBackpropFilter"
# Convolution -> the operands of the product, and whether each is transposed.
_PRODUCTS = {
    "Conv2D": ((0, 1), (False, False)),  # image, filter
    "Conv2DBackpropInput": ((2, 1), (False, True)),  # gradient, filter
    _FILTERS: ((0, 2), (True, False)),  # image, gradient
}
# Products took 0.2 to 1.0 of the time of oneDNN's convolutions of points up to so many multiplications, and 0.4 to 0.9
# for so few points, whatever the channels; with more of both, either of them is faster now and then.
_FEW_MULTIPLICATIONS = 1 << 25
_FEW_POINTS = 64
# From so many weights on, gradients of filters of few points took 0.1 to 0.7 of the time with patches.
_MANY_WEIGHTS = 1 << 17


class _Factor(NamedTuple):
    """An operand of a product."""

    ref: Ref
    type: TensorType
    transposed: bool

    @property
    def matrix(self) -> tuple[int, int]:
        """Its sizes as a matrix, before it is transposed."""
        return _matrix(self.type)

    @property
    def sides(self) -> tuple[int, int]:
        """Its sizes in the product."""
        return self.matrix[::-1] if self.transposed else self.matrix


def convolutions_as_products(program: Program) -> Program:
    """``program`` of one rank, and its functions, with products of matrices in place of small convolutions."""
    return in_other_graphs(program, _with_products)


def _with_products(program: Program) -> Program:
    e = Emitter(0, 1, "", "matrix")
    matrices: dict[Ref, Ref] = {}  # tensor -> the same as a matrix
    for node in program.nodes:
        factors = _factors(program, node)
        if factors and _of_small_points(node, factors):
            _emit_product(e, node, factors, matrices)
        elif factors and _of_few_points(node, factors):
            _emit_product(e, node, [_emit_patches(e, node, *factors), factors[1]], matrices)
        else:
            e.nodes[node.name] = node
    return program.with_nodes(tuple(e.nodes.values()))


def _matrix(t: TensorType) -> tuple[int, int]:
    """The sizes of an image, or a filter of one point, as a matrix."""
    shape = static_shape(t)
    return prod(shape[:-1]), shape[-1]


def _factors(program: Program, node: Node) -> list[_Factor]:
    """What a convolution would be the product of; [] where it is none that may become one."""
    if node.op not in _PRODUCTS or node.attrs.get(COMPILED) or node.attrs.get(ON_HOST):
        return []
    found = [_Factor(node.inputs[i], program.type_of(node.inputs[i]), turn) for i, turn in zip(*_PRODUCTS[node.op])]
    types = (*[one.type for one in found], node.outputs[0])
    fits = all(t.dtype in _DTYPES and t.is_static and t.elements for t in types)
    return found if fits and node.attrs.get("data_format", "NHWC") == "NHWC" else []


def _of_small_points(node: Node, factors: list[_Factor]) -> bool:
    """Whether it is a convolution of single points, and small."""
    kernel = node.outputs[0] if node.op == _FILTERS else factors[1].type
    if static_shape(kernel)[:2] != (1, 1):
        return False
    (rows, inner), (other, columns) = (one.sides for one in factors)
    # Strides, paddings and groups of channels give other sizes.
    if inner != other or (rows, columns) != _matrix(node.outputs[0]):
        return False
    points = factors[0].matrix[0]
    return points <= _FEW_POINTS or points * kernel.elements <= _FEW_MULTIPLICATIONS


def _of_few_points(node: Node, factors: list[_Factor]) -> bool:
    """Whether it is the gradient of a filter with many weights for its points."""
    if node.op != _FILTERS or node.outputs[0].elements < _MANY_WEIGHTS or factors[1].matrix[0] > _FEW_POINTS:
        return False
    known = node.attrs["padding"] in ("SAME", "VALID") and set(node.attrs.get("dilations", (1,))) == {1}
    return known and static_shape(node.outputs[0])[2] == factors[0].matrix[1]  # otherwise channels are in groups


def _emit_patches(e: Emitter, node: Node, image: _Factor, gradient: _Factor) -> _Factor:
    """Adds what gathers the patches of an image for the gradient of a filter: of each point, in the filter's order."""
    height, width, depth, _ = static_shape(node.outputs[0])
    attrs = {
        "T": DType(image.type.dtype),
        "ksizes": (1, height, width, 1),
        "strides": node.attrs["strides"],
        "rates": (1, 1, 1, 1),
        "padding": node.attrs["padding"],
    }
    patches = TensorType(image.type.dtype, (*static_shape(gradient.type)[:3], height * width * depth))
    name = e.part(node.name, "patches")
    e.nodes[name] = replace(
        node, name=name, op="ExtractImagePatches", inputs=(image.ref,), attrs=attrs | _marks(node), outputs=(patches,)
    )
    return image._replace(ref=Ref(name), type=patches)


def _emit_product(e: Emitter, node: Node, factors: list[_Factor], matrices: dict[Ref, Ref]) -> None:
    """Adds a product, which waits for what ``node`` does, and what gives it the shape and the name of its result."""
    result = node.outputs[0]
    for number, one in enumerate(factors):
        if one.ref not in matrices:
            matrices[one.ref] = e.reshape(e.part(node.name, f"of_{number}"), one.ref, result.dtype, one.matrix)
    transposed = dict(zip(("transpose_a", "transpose_b"), [one.transposed for one in factors]))
    attrs = {"T": DType(result.dtype), **transposed, **_marks(node)}
    name = e.part(node.name, "product")
    inputs = tuple([matrices[one.ref] for one in factors])
    outputs = (TensorType(result.dtype, _matrix(result)),)
    e.nodes[name] = replace(node, name=name, op="MatMul", inputs=inputs, attrs=attrs, outputs=outputs)
    e.reshape(node.name, Ref(name), result.dtype, static_shape(result))


def _marks(node: Node) -> dict[str, object]:
    """What Whale noted of a node, as that it computes again."""
    return {key: value for key, value in node.attrs.items() if key.startswith("_whale")}
