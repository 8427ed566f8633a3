"""Counts the FLOPs of matrix products, einsums and convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from whale.ir.ops import CONVOLUTIONS, EINSUMS, FILTER_GRADIENTS, MATMULS
from whale.ir.program import Node
from whale.ir.values import TensorType


def count_matmul_flops(node: Node, inputs: Sequence[TensorType]) -> int:
    """Counts the FLOPs of a matrix product or convolution (2 per multiply-add), 0 for any other op."""
    op = node.op
    if op in MATMULS:
        shape = inputs[0].shape
        if not shape or len(shape) < 2:
            return 0
        transposed = node.attrs.get("transpose_a" if op == "MatMul" else "adj_x", False)
        return 2 * node.outputs[0].elements * (shape[-2 if transposed else -1] or 1)
    if op in EINSUMS:
        return _count_einsum_flops(node, inputs)
    if op in CONVOLUTIONS:
        if op in FILTER_GRADIENTS:
            image, kernel = inputs[-1], node.outputs[0]
        elif "BackpropInput" in op:
            image, kernel = inputs[2], inputs[1]
        else:
            image, kernel = node.outputs[0], inputs[1]
        if not kernel.shape:
            return 0
        channels = 1
        for size in kernel.shape[-2:] if "Depthwise" in op else kernel.shape[-1:]:
            channels *= size or 1
        return 2 * image.elements * (kernel.elements // max(1, channels))
    return 0


def _count_einsum_flops(node: Node, inputs: Sequence[TensorType]) -> int:
    equation = str(node.attrs.get("equation", "")).split("->")[0].split(",")
    sizes: dict[str, int] = {}
    rest = 1
    for labels, tensor in zip(equation, inputs):
        if tensor.shape is None:
            return 0
        head, _, tail = labels.partition("...")
        named = list(zip(head, tensor.shape)) + (
            list(zip(reversed(tail), reversed(tensor.shape))) if "..." in labels else []
        )
        sizes.update((label, size or 1) for label, size in named)
        if "..." in labels:
            free = 1
            for size in tensor.shape[len(head) : len(tensor.shape) - len(tail)]:
                free *= size or 1
            rest = max(rest, free)
    for size in sizes.values():
        rest *= size
    return 2 * rest if len(inputs) > 1 else 0
