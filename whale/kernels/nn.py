"""Replaces TensorFlow ops that are slow on CPUs by Whale's own, in one rank's program.

Decision: 0126.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.program import COMPILED, Node, Program
from whale.ir.values import DType, Shape, require_static_shape
from whale.kernels.choices import ALL, Choices
from whale.kernels.xla import change_other_graphs

CROSS_ENTROPY = "WhaleSparseCrossEntropy"
DEPTHWISE = "WhaleDepthwiseFilterGradient"
REPLACED = frozenset(("SparseSoftmaxCrossEntropyWithLogits", "DepthwiseConv2dNativeBackpropFilter"))


def replace_nn_kernels(program: Program, choices: Choices = ALL) -> Program:
    """Replaces sparse softmax cross-entropies and gradients of depthwise filters, in one rank's program and its
    functions, by ops of whale_ops.
    """
    return change_other_graphs(program, lambda graph: _replace_in_graph(graph, choices))


def _replace_in_graph(program: Program, choices: Choices) -> Program:
    if program.ops.isdisjoint(REPLACED):
        return program
    return program.replace_nodes(tuple([_replace_node(program, node, choices) for node in program.nodes]))


def _replace_node(program: Program, node: Node, choices: Choices) -> Node:
    """Returns Whale's op in place of ``node``; ``node`` itself if there is none, or the choices leave it out."""
    if node.op not in REPLACED or node.attrs.get(COMPILED) or node.marks.on_host:
        return node
    if not choices.takes("nn", program, node):
        return node
    if node.op == "SparseSoftmaxCrossEntropyWithLogits":
        return _replace_cross_entropy(program, node)
    return _replace_depthwise_gradient(program, node)


def _replace_cross_entropy(program: Program, node: Node) -> Node:
    """Replaces a sparse softmax cross-entropy in float32; for float64 TensorFlow's kernel is as good.

    Whale's kernel passes over each row three times while it is in the cache; TensorFlow's passes over all rows five
    times.
    """
    if program.find_type(node.inputs[0]).dtype != "float32":
        return node
    return replace(node, op=CROSS_ENTROPY, attrs={"Tlabels": node.attrs["Tlabels"]})


def _replace_depthwise_gradient(program: Program, node: Node) -> Node:
    """Replaces the gradient of a depthwise convolution's filter: oneDNN's kernel takes 1 to 5 ms even for images of 2 x
    2.
    """
    image, _, gradient = node.inputs
    types = [program.find_type(image), program.find_type(gradient), node.outputs[0]]
    attrs = node.attrs
    known = attrs.get("data_format", "NHWC") == "NHWC" and set(attrs.get("dilations", (1,))) == {1}
    if not known or any(t.dtype not in ("float32", "float64") for t in types):
        return node
    if not node.outputs[0].is_static or not node.outputs[0].elements:
        return node
    own = {
        "T": DType(types[0].dtype),
        "filter_shape": Shape(require_static_shape(node.outputs[0])),
        "strides": attrs["strides"],
        "padding": attrs["padding"],
        "explicit_paddings": attrs.get("explicit_paddings", ()),
    }
    return replace(node, op=DEPTHWISE, inputs=(image, gradient), attrs=own)
