"""Pads operands of matrix products with row strides that make oneDNN slow, in a rank's program.

oneDNN multiplies small matrices, and those with one small side, in place, without packing them first. With
AVX-512 it excludes rows whose length is a multiple of 1,024 numbers, which collide in the caches;
its kernels for AVX2 do not, and take up to 2.7 times as long for them (`nocopy_checker_avx2` beside
`nocopy_checker_avx512` in oneDNN's src/cpu/x64/gemm/gemm_driver.cpp).

Decision: 0127.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from whale.ir.emitter import Emitter, replace_size
from whale.ir.program import PRODUCT, Node, Program, Ref
from whale.ir.values import DType, TensorType
from whale.kernels.choices import ALL, Choices
from whale.kernels.matmuls.matrices import Factor, may_multiply
from whale.kernels.xla import change_other_graphs

_BAD_ROW = 1024  # numbers of float32: whole pages, so that rows share the same few sets of a cache
_UNPACKED = 0.0038  # of 1 / rows + 1 / columns of a result, from which on oneDNN packs nothing
_WORD = 8  # numbers of float32 in a vector of AVX2
_FEW = 64  # of a side or the inner size: with fewer, padding takes as long as it saves
_LARGEST = 1 << 24  # numbers that are worth a copy's memory
_LITTLE = 1 / 8  # of a side, by which more work is still worth it


class Padding(NamedTuple):
    """Zeros appended to one operand: which operand, along which dimension, and how many."""

    operand: int
    dim: int
    zeros: int


def pad_products(program: Program, choices: Choices = ALL) -> Program:
    """Pads the products of one rank's program, and of its functions, with rows for which oneDNN is slow."""
    return change_other_graphs(program, lambda graph: _pad_graph(graph, choices))


def find_padding(left: Factor, right: Factor) -> Padding | None:
    """Returns the padding that makes a product of two matrices faster, if any does."""
    (rows, inner), (_, columns) = left.sides, right.sides
    if right.transposed or min(rows, inner, columns) < _FEW or 1 / rows + 1 / columns < _UNPACKED:
        return None
    bad_left = left.transposed and rows % _BAD_ROW == 0
    if not bad_left and columns % _BAD_ROW:
        return None
    found = [Padding(0 if bad_left else 1, 1, _WORD)]
    if left.transposed:  # of others oneDNN packs nothing for 16 rows a thread and fewer, either
        larger = [
            Padding(0, 1, _count_missing_until_packed(rows, columns)),
            Padding(1, 1, _count_missing_until_packed(columns, rows)),
        ]
        sides = (rows, columns)
        small = [one for one in larger if 0 < one.zeros <= _LITTLE * sides[one.operand]]
        found = sorted(small, key=lambda one: one.zeros * sides[1 - one.operand]) + found
    return next((one for one in found if _count_copied(one, left, right) <= _LARGEST), None)


def _count_missing_until_packed(side: int, other: int) -> int:
    """Returns by how much one side of a result has to grow until oneDNN packs operands; 0: no size is enough."""
    rest = _UNPACKED - 1 / other
    return _WORD * (int(1 / rest / _WORD) + 1) - side if rest > 0 else 0


def _count_copied(padding: Padding, left: Factor, right: Factor) -> int:
    """Counts the elements of the larger copy: of the operand, or of the result if its rows become longer."""
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
    """Adds a product of a padded operand, and a slice of its result under the node's name."""
    name, result = node.name, node.outputs[0]
    source = node.inputs[padding.operand]
    given = program.find_type(source)
    size = (given.shape or ())[padding.dim] or 0
    wider = TensorType(given.dtype, replace_size(given, padding.dim, size + padding.zeros))
    counts = np.zeros((2, 2), np.int32)
    counts[padding.dim, 1] = padding.zeros
    paddings = e.const(e.name_part(name, "paddings"), counts)
    kinds = {"T": DType(given.dtype), "Tpaddings": DType("int32")}
    # The padding waits until the product can be computed: a copy of an activation or a weight would be held until then.
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
