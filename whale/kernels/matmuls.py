"""Computes as matrix products what TensorFlow's CPU kernels compute more slowly, in one rank's program.

* ``replace_batches``: batches of products that share a matrix become one product. Keras' projections (EinsumDense, and
  with it all of its attentions) multiply a batch of matrices by one: TensorFlow computes a product for each matrix of
  the batch, and as many gradients of the weight, which it adds up.
* ``replace_convolutions``: small convolutions become products. A convolution with 1x1 filters (as in MobileNet's and
  ResNet's bottlenecks) is the product of the matrices [points, channels] and [channels, filters], and so are its
  gradients; the gradient of any filter is such a product with the image patches from which each point is computed.
  oneDNN reorders weights and images into blocks first and hands parts to its threads, for 0.2 to 0.5 ms a call, and
  more with many weights. If there is little to compute, or there are few points for many weights, that is most of the
  time.
* ``pad_products``: operands whose row strides make oneDNN slow are padded. It multiplies small matrices, and those with
  one small side, in place, without packing them first. With AVX-512 it excludes rows whose length is a multiple of
  1,024 numbers, which collide in the caches; its kernels for AVX2 do not, and take up to 2.7 times as long for them
  (`nocopy_checker_avx2` beside `nocopy_checker_avx512` in oneDNN's src/cpu/x64/gemm/gemm_driver.cpp).

Decisions: 0125, 0127.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np

from whale.ir.emitter import Emitter, replace_size
from whale.ir.program import COMPILED, PRODUCT, Node, Program, Ref
from whale.ir.values import DType, TensorType, require_static_shape
from whale.kernels.choices import ALL, Choices
from whale.kernels.xla import change_other_graphs

_BATCHES = ("BatchMatMul", "BatchMatMulV2")
_FILTERS = "Conv2DBackpropFilter"

# Convolution -> the operands of the product, and whether each is transposed.
_PRODUCTS = {
    "Conv2D": ((0, 1), (False, False)),  # image, filter
    "Conv2DBackpropInput": ((2, 1), (False, True)),  # gradient, filter
    _FILTERS: ((0, 2), (True, False)),  # image, gradient
}
_PADDINGS = ("SAME", "VALID")  # with explicit padding, equal sizes do not prove that there are no strides

# Measured: up to so many multiplications, products took 0.2 to 1.0 of the time of oneDNN's 1x1 convolutions, and with
# so few points 0.4 to 0.9, whatever the channels. Above both limits sometimes one is faster and sometimes the other.
_FEW_MULTIPLICATIONS = 1 << 25
_FEW_POINTS = 64

# Measured: from so many weights on, with few points, gradients of filters took 0.1 to 0.7 of the time with patches.
_MANY_WEIGHTS = 1 << 17
_BAD_ROW = 1024  # float32 numbers in a row that fills whole pages, so that rows share a few sets of the cache
_UNPACKED = 0.0038  # oneDNN packs no operand if 1 / rows + 1 / columns of the result is this or more
_WORD = 8  # float32 numbers in a vector of AVX2
_FEW = 64  # with a smaller side or inner size, padding takes as long as it saves
_LARGEST = 1 << 24  # most numbers in a copy that is worth its memory
_LITTLE = 1 / 8  # most of a side that may be added, relatively, for the work to be worth it
_DTYPES = ("float32", "float64")


def replace_batches(program: Program, choices: Choices = ALL) -> Program:
    """Replaces each batch of products with a common matrix by one product, in one rank's program and its functions."""
    return change_other_graphs(program, lambda graph: _replace_batches_in_graph(graph, choices))


def _replace_batches_in_graph(program: Program, choices: Choices) -> Program:
    if program.ops.isdisjoint(_BATCHES):
        return program
    summed = {name: batch for name, batch in _find_sums(program).items() if choices.takes("products", program, batch)}
    gone = {batch.name for batch in summed.values()}
    products = ProductNodes()
    for node in program.nodes:
        if node.name in gone:
            continue
        batch = summed.get(node.name)
        if batch is not None:
            node = replace(node, controls=tuple(dict.fromkeys((*node.controls, *batch.controls))))
            products.add(node, _list_batch_factors(program, batch))
        elif _has_one_matrix(program, node) and choices.takes("products", program, node):
            products.add(node, _list_batch_factors(program, node))
        else:
            products.keep(node)
    return program.replace_nodes(tuple(products.emitter.nodes.values()))


def _list_batch_factors(program: Program, batch: Node) -> list[Factor]:
    """Returns the operands of a BatchMatMul as factors of a single product of matrices."""
    turned = (bool(batch.attrs.get(key, False)) for key in ("adj_x", "adj_y"))
    return [Factor(ref, program.find_type(ref), turn) for ref, turn in zip(batch.inputs, turned)]


def _has_one_matrix(program: Program, node: Node) -> bool:
    """Returns True if a BatchMatMul multiplies all its matrices by the same one, from the right."""
    if node.op not in _BATCHES:
        return False
    left, right = _list_batch_factors(program, node)
    if left.transposed or not may_multiply(node, (left.type, right.type, node.outputs[0])):
        return False
    return set(require_static_shape(right.type)[:-2]) <= {1}


def _find_sums(program: Program) -> dict[str, Node]:
    """Maps each node that sums all products of a batch to the BatchMatMul, if nothing else reads the batch; together
    they are one product.
    """
    needed = {*program.effects, *[ref.node for ref in program.outputs]}
    needed.update(name for node in program.nodes for name in node.controls)
    found = {}
    for node in program.nodes:
        batch = program.by_name[node.inputs[0].node] if node.op == "Sum" else None
        if batch is None or batch.op not in _BATCHES or batch.name in needed:
            continue
        left, right = _list_batch_factors(program, batch)
        axes = program.const(node.inputs[1])
        if axes is None or not may_multiply(batch, (left.type, right.type, node.outputs[0])):
            continue
        sizes = require_static_shape(left.type)
        rank = len(sizes)
        alone = len(program.consumers[node.inputs[0]]) == 1 and left.transposed and not right.transposed
        whole = sorted(int(axis) % rank for axis in axes.reshape(-1)) == list(range(rank - 2))
        if alone and whole and rank > 2 and sizes[:-2] == require_static_shape(right.type)[:-2]:
            found[node.name] = batch
    return found


def replace_convolutions(program: Program, choices: Choices = ALL) -> Program:
    """Replaces small convolutions and their gradients, in one rank's program and its functions, by products of
    matrices.
    """
    return change_other_graphs(program, lambda graph: _replace_convolutions_in_graph(graph, choices))


def _replace_convolutions_in_graph(program: Program, choices: Choices) -> Program:
    if program.ops.isdisjoint(_PRODUCTS):
        return program
    products = ProductNodes()
    for node in program.nodes:
        factors = _list_convolution_factors(program, node)
        pointwise = bool(factors) and _is_small_pointwise(node, factors)
        patches = bool(factors) and not pointwise and _is_few_points_gradient(node, factors)
        if not (pointwise or patches) or not choices.takes("convolutions", program, node):
            products.keep(node)
        elif pointwise:
            products.add(node, factors)
        else:
            products.add(node, [_emit_patches(products, node, *factors), factors[1]])
    return program.replace_nodes(tuple(products.emitter.nodes.values()))


def _list_convolution_factors(program: Program, node: Node) -> list[Factor]:
    """Returns the two factors of the product that a convolution would be if its filters were 1x1; [] if it is no
    convolution that can be replaced.
    """
    if node.op not in _PRODUCTS or node.attrs.get("data_format", "NHWC") != "NHWC":
        return []
    found = [Factor(node.inputs[i], program.find_type(node.inputs[i]), turn) for i, turn in zip(*_PRODUCTS[node.op])]
    return found if may_multiply(node, (*[one.type for one in found], node.outputs[0])) else []


def _is_small_pointwise(node: Node, factors: list[Factor]) -> bool:
    """Returns True if the node is a small convolution with 1x1 filters, without strides or groups of channels."""
    kernel = node.outputs[0] if node.op == _FILTERS else factors[1].type
    if require_static_shape(kernel)[:2] != (1, 1) or node.attrs["padding"] not in _PADDINGS:
        return False
    (rows, inner), (other, columns) = (one.sides for one in factors)
    # With strides or groups of channels the sizes would differ.
    if inner != other or (rows, columns) != _find_matrix_sizes(node.outputs[0]):
        return False
    points = factors[0].matrix[0]
    return points <= _FEW_POINTS or points * kernel.elements <= _FEW_MULTIPLICATIONS


def _is_few_points_gradient(node: Node, factors: list[Factor]) -> bool:
    """Returns True if the node computes the gradient of a filter with many weights, from an image with few points."""
    if node.op != _FILTERS or node.outputs[0].elements < _MANY_WEIGHTS or factors[1].matrix[0] > _FEW_POINTS:
        return False
    known = node.attrs["padding"] in _PADDINGS and set(node.attrs.get("dilations", (1,))) == {1}
    return (
        known and require_static_shape(node.outputs[0])[2] == factors[0].matrix[1]
    )  # otherwise channels are in groups


def _emit_patches(products: ProductNodes, node: Node, image: Factor, gradient: Factor) -> Factor:
    """Adds a node that extracts, for each point of the result, the image patch that it is computed from; returns the
    patches as a factor.
    """
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


class Padding(NamedTuple):
    """Represents zeros that are appended to one operand of a product.

    Attributes:
      operand: number of the operand.
      dim: the dimension along which they are appended.
      zeros: how many.
    """

    operand: int
    dim: int
    zeros: int


def pad_products(program: Program, choices: Choices = ALL) -> Program:
    """Pads those products of one rank's program and its functions whose row lengths make oneDNN slow."""
    return change_other_graphs(program, lambda graph: _pad_graph(graph, choices))


def find_padding(left: Factor, right: Factor) -> Padding | None:
    """Returns the padding that makes a product of two matrices faster; None if none does."""
    (rows, inner), (_, columns) = left.sides, right.sides
    if right.transposed or min(rows, inner, columns) < _FEW or 1 / rows + 1 / columns < _UNPACKED:
        return None
    bad_left = left.transposed and rows % _BAD_ROW == 0
    if not bad_left and columns % _BAD_ROW:
        return None
    found = [Padding(0 if bad_left else 1, 1, _WORD)]
    if left.transposed:  # otherwise growing a side is no help: oneDNN packs nothing for up to 16 rows a thread either
        larger = [
            Padding(0, 1, _count_missing_until_packed(rows, columns)),
            Padding(1, 1, _count_missing_until_packed(columns, rows)),
        ]
        sides = (rows, columns)
        small = [one for one in larger if 0 < one.zeros <= _LITTLE * sides[one.operand]]
        found = sorted(small, key=lambda one: one.zeros * sides[1 - one.operand]) + found
    return next((one for one in found if _count_copied(one, left, right) <= _LARGEST), None)


def _count_missing_until_packed(side: int, other: int) -> int:
    """Returns by how many indices a side of a product's result has to grow until oneDNN packs the operands, which makes
    their row length harmless; 0 if no size is enough.

    Args:
      side: rows or columns of the result.
      other: the other of the two.
    """
    rest = _UNPACKED - 1 / other
    return _WORD * (int(1 / rest / _WORD) + 1) - side if rest > 0 else 0


def _count_copied(padding: Padding, left: Factor, right: Factor) -> int:
    """Returns the number of elements of the larger copy that padding needs: of the operand, or of the result if its
    rows become longer.
    """
    result = left.sides[0] * right.sides[1] if padding.operand else 0
    return max((left, right)[padding.operand].type.elements, result)


def _pad_graph(program: Program, choices: Choices) -> Program:
    found = {}
    for node in program.nodes:
        padding = _find_node_padding(program, node) if node.op == "MatMul" else None
        if padding is not None and choices.takes("padding", program, node):
            found[node.name] = padding
    if not found:
        return program
    e = Emitter(0, 1, "", "padded")
    for node in program.nodes:
        if node.name in found:
            _add(e, program, node, found[node.name])
        else:
            e.nodes[node.name] = node
    return program.replace_nodes(tuple(e.nodes.values()))


def _find_node_padding(program: Program, node: Node) -> Padding | None:
    types = [program.find_type(ref) for ref in node.inputs]
    if node.outputs[0].dtype != "float32" or not may_multiply(node, (*types, node.outputs[0])):
        return None
    turned = [bool(node.attrs.get(key, False)) for key in ("transpose_a", "transpose_b")]
    left, right = (Factor(*each) for each in zip(node.inputs, types, turned))
    return find_padding(left, right)


def _add(e: Emitter, program: Program, node: Node, padding: Padding) -> None:
    """Adds the padded operand, the product, and the slice of its result that replaces ``node`` under its name."""
    name, result = node.name, node.outputs[0]
    source = node.inputs[padding.operand]
    given = program.find_type(source)
    size = (given.shape or ())[padding.dim] or 0
    wider = TensorType(given.dtype, replace_size(given, padding.dim, size + padding.zeros))
    counts = np.zeros((2, 2), np.int32)
    counts[padding.dim, 1] = padding.zeros
    paddings = e.const(e.name_part(name, "paddings"), counts)
    kinds = {"T": DType(given.dtype), "Tpaddings": DType("int32")}
    # The padding waits for the other operand, so that the padded copy is not held in memory before it is needed.
    after = tuple(dict.fromkeys((*node.controls, node.inputs[1 - padding.operand].node)))
    pad = Node(e.name_part(name, "operand"), "Pad", (source, paddings), after, kinds, (wider,), marks=node.marks)
    e.nodes[pad.name] = pad
    operands = list(node.inputs)
    operands[padding.operand] = Ref(pad.name)
    side = (result.shape or ())[padding.operand] or 0
    made = TensorType(result.dtype, replace_size(result, padding.operand, side + padding.zeros))
    product = replace(node, name=f"{name}/{PRODUCT}", inputs=tuple(operands), outputs=(made,))
    e.nodes[product.name] = product
    e.rows(name, Ref(product.name), made, padding.operand, 0, side)


class Factor(NamedTuple):
    """Represents an operand of a product: a tensor viewed as a matrix (all other dimensions by the last one), possibly
    transposed.
    """

    ref: Ref
    type: TensorType
    transposed: bool

    @property
    def matrix(self) -> tuple[int, int]:
        """Returns (rows, columns) of the tensor viewed as a matrix, before transposition."""
        return _find_matrix_sizes(self.type)

    @property
    def sides(self) -> tuple[int, int]:
        """Returns (rows, columns) in the product, after transposition."""
        return self.matrix[::-1] if self.transposed else self.matrix


def _find_matrix_sizes(t: TensorType) -> tuple[int, int]:
    """Returns (rows, columns) of a tensor viewed as a matrix: all other dimensions by the last one."""
    shape = require_static_shape(t)
    return prod(shape[:-1]), shape[-1]


def may_multiply(node: Node, types: Sequence[TensorType]) -> bool:
    """Returns True if a matrix product can replace ``node``: operands and result, of ``types``, are static floats, and
    neither XLA nor offload wants the node.
    """
    if node.attrs.get(COMPILED) or node.marks.on_host:
        return False
    return all(t.dtype in _DTYPES and t.is_static and t.shape and t.elements for t in types)


@dataclass
class ProductNodes:
    """Collects the nodes of a graph in which matrix products replace some nodes.

    Attributes:
      emitter: collects the nodes.
      matrices: tensor -> its reshape to a matrix, which several products may read.
    """

    emitter: Emitter = field(default_factory=lambda: Emitter(0, 1, "", "matrix"))
    matrices: dict[Ref, Ref] = field(default_factory=dict)

    def keep(self, node: Node) -> None:
        """Adds an unchanged node."""
        self.emitter.nodes[node.name] = node

    def add(self, node: Node, factors: Sequence[Factor]) -> None:
        """Adds the product of ``factors`` in place of ``node``, reshaped to the node's shape and under its name."""
        e, result = self.emitter, node.outputs[0]
        inputs = []
        for number, one in enumerate(factors):
            if len(one.type.shape or ()) == 2:
                inputs.append(one.ref)
                continue
            if one.ref not in self.matrices:
                name = e.name_part(node.name, f"of_{number}")
                self.matrices[one.ref] = e.reshape(name, one.ref, result.dtype, one.matrix)
            inputs.append(self.matrices[one.ref])
        sides = TensorType(result.dtype, (factors[0].sides[0], factors[1].sides[1]))
        transposed = dict(zip(("transpose_a", "transpose_b"), [one.transposed for one in factors]))
        attrs = {"T": DType(result.dtype), **transposed}
        name = node.name if sides == result else f"{node.name}/{PRODUCT}"
        self.keep(replace(node, name=name, op="MatMul", inputs=tuple(inputs), attrs=attrs, outputs=(sides,)))
        if name != node.name:
            e.reshape(node.name, Ref(name), result.dtype, require_static_shape(result))
