"""Replaces convolutions by products of matrices, where TensorFlow's kernels take longer on processors.

A convolution of single points (1x1 filters, as in MobileNet's and ResNet's bottlenecks) is the product of the matrices
[points, channels] and [channels, filters], and so are its gradients; the gradient of any filter is such a product with
the patches of the image that each point is made of. oneDNN lays weights and images out in blocks first and hands parts
to its threads, for 0.2 to 0.5 ms a call, and more with many weights. Where there is little to compute, or there are few
points for many weights, that is most of the time.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, TensorType, require_static_shape
from whale.kernels.choices import ALL, Choices
from whale.kernels.matmuls.matrices import Factor, ProductNodes, find_matrix_sizes, may_multiply
from whale.kernels.xla import change_other_graphs

_FILTERS = "Conv2DBackpropFilter"
# Convolution -> the operands of the product, and whether each is transposed.
_PRODUCTS = {
    "Conv2D": ((0, 1), (False, False)),  # image, filter
    "Conv2DBackpropInput": ((2, 1), (False, True)),  # gradient, filter
    _FILTERS: ((0, 2), (True, False)),  # image, gradient
}
_PADDINGS = ("SAME", "VALID")  # others add points whose number may be that of those which strides leave out
# Products took 0.2 to 1.0 of the time of oneDNN's convolutions of points up to so many multiplications, and 0.4 to 0.9
# for so few points, whatever the channels; with more of both, either of them is faster now and then.
_FEW_MULTIPLICATIONS = 1 << 25
_FEW_POINTS = 64
# From so many weights on, gradients of filters of few points took 0.1 to 0.7 of the time with patches.
_MANY_WEIGHTS = 1 << 17


def replace_convolutions(program: Program, choices: Choices = ALL) -> Program:
    """Replaces small convolutions of one rank's program, and of its functions, by products of matrices."""
    return change_other_graphs(program, lambda graph: _replace_in_graph(graph, choices))


def _replace_in_graph(program: Program, choices: Choices) -> Program:
    if program.ops.isdisjoint(_PRODUCTS):
        return program
    products = ProductNodes()
    for node in program.nodes:
        factors = _list_factors(program, node)
        pointwise = bool(factors) and _is_small_pointwise(node, factors)
        patches = bool(factors) and not pointwise and _is_few_points_gradient(node, factors)
        if not (pointwise or patches) or not choices.takes("convolutions", program, node):
            products.keep(node)
        elif pointwise:
            products.add(node, factors)
        else:
            products.add(node, [_emit_patches(products, node, *factors), factors[1]])
    return program.replace_nodes(tuple(products.emitter.nodes.values()))


def _list_factors(program: Program, node: Node) -> list[Factor]:
    """Returns the operands of the product equivalent to a convolution; [] if there is none."""
    if node.op not in _PRODUCTS or node.attrs.get("data_format", "NHWC") != "NHWC":
        return []
    found = [Factor(node.inputs[i], program.find_type(node.inputs[i]), turn) for i, turn in zip(*_PRODUCTS[node.op])]
    return found if may_multiply(node, (*[one.type for one in found], node.outputs[0])) else []


def _is_small_pointwise(node: Node, factors: list[Factor]) -> bool:
    """Tells whether the node is a convolution of single points, and small."""
    kernel = node.outputs[0] if node.op == _FILTERS else factors[1].type
    if require_static_shape(kernel)[:2] != (1, 1) or node.attrs["padding"] not in _PADDINGS:
        return False
    (rows, inner), (other, columns) = (one.sides for one in factors)
    # Strides and groups of channels give other sizes.
    if inner != other or (rows, columns) != find_matrix_sizes(node.outputs[0]):
        return False
    points = factors[0].matrix[0]
    return points <= _FEW_POINTS or points * kernel.elements <= _FEW_MULTIPLICATIONS


def _is_few_points_gradient(node: Node, factors: list[Factor]) -> bool:
    """Tells whether the node computes the gradient of a filter with many weights compared with the points of the
    image.
    """
    if node.op != _FILTERS or node.outputs[0].elements < _MANY_WEIGHTS or factors[1].matrix[0] > _FEW_POINTS:
        return False
    known = node.attrs["padding"] in _PADDINGS and set(node.attrs.get("dilations", (1,))) == {1}
    return (
        known and require_static_shape(node.outputs[0])[2] == factors[0].matrix[1]
    )  # otherwise channels are in groups


def _emit_patches(products: ProductNodes, node: Node, image: Factor, gradient: Factor) -> Factor:
    """Emits the patches of an image for the gradient of a filter: those of each point, in the filter's order."""
    height, width, depth, _ = require_static_shape(node.outputs[0])
    attrs = {
        "T": DType(image.type.dtype),
        "ksizes": (1, height, width, 1),
        "strides": node.attrs["strides"],
        "rates": (1, 1, 1, 1),
        "padding": node.attrs["padding"],
    }
    patches = TensorType(image.type.dtype, (*require_static_shape(gradient.type)[:3], height * width * depth))
    name = products.emitter.name_part(node.name, "patches")
    products.keep(
        replace(
            node,
            name=name,
            op="ExtractImagePatches",
            inputs=(image.ref,),
            attrs=attrs,
            outputs=(patches,),
        )
    )
    return image._replace(ref=Ref(name), type=patches)
