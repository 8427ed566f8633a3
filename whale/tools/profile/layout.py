"""Operations on images in the layout in which steps compute them on a GPU.

TensorFlow's layout optimizer lets GPUs compute on images with the channels first where that is faster for them: it
turns operations and puts transposes around each run of them. Measured alone, an operation would keep the layout that
the program has, or be measured with transposes that steps do not have.

  find_channels_first  asks the optimizer about this machine's GPU
  turn                 an operation with the channels first
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from whale.ir.program import Node, Program, Ref, make_const
from whale.ir.values import TensorType

# By op: the operands that are images, those that are the sizes of one, and the results that are images.
TURNED: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = MappingProxyType(
    {
        "Conv2D": ((0,), (), (0,)),
        "Conv2DBackpropInput": ((2,), (0,), (0,)),
        "Conv2DBackpropFilter": ((0, 2), (), ()),
        "DepthwiseConv2dNative": ((0,), (), (0,)),
        "DepthwiseConv2dNativeBackpropInput": ((2,), (0,), (0,)),
        "DepthwiseConv2dNativeBackpropFilter": ((0, 2), (), ()),
        "MaxPool": ((0,), (), (0,)),
        "MaxPoolGrad": ((0, 1, 2), (), (0,)),
        "AvgPool": ((0,), (), (0,)),
        "AvgPoolGrad": ((1,), (0,), (0,)),
        "BiasAdd": ((0,), (), (0,)),
        "BiasAddGrad": ((0,), (), ()),
        "FusedBatchNormV3": ((0,), (), (0,)),
        "FusedBatchNormGradV3": ((0, 1), (), (0,)),
    }
)
_FIRST = (0, 3, 1, 2)  # the places of what stands in NHWC, in NCHW
_BY_DIMENSION = ("strides", "ksize", "dilations")


def find_channels_first(dtype: str) -> bool:
    """Tells whether steps on this process's first GPU compute convolutions of a type with the channels first."""
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.grappler import tf_optimizer

    if not tf.config.list_logical_devices("GPU") or tf.config.optimizer.get_experimental_options().get(
        "layout_optimizer", True
    ) in (False, "off"):
        return False
    with tf.Graph().as_default() as graph, tf.device("/GPU:0"):
        x = tf.compat.v1.placeholder(dtype, (8, 32, 32, 16))
        found = tf.identity(tf.nn.conv2d(x, tf.zeros((3, 3, 16, 16), dtype), 1, "SAME"), "found")
    graph.add_to_collection(tf.compat.v1.GraphKeys.TRAIN_OP, found)
    meta = tf.compat.v1.train.export_meta_graph(graph=graph)
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.optimizers.append("layout")
    options.layout_optimizer = rewriter_config_pb2.RewriterConfig.ON
    options.min_graph_nodes = -1
    made = tf_optimizer.OptimizeGraph(config, meta, verbose=False)
    return any(node.op == "Conv2D" and node.attr["data_format"].s == b"NCHW" for node in made.node)


def turn(program: Program, node: Node) -> tuple[Program, Node]:
    """Returns an operation with the channels first, and a program that has its operands; as they are where it has none.

    Args:
      program: that ``node`` stands in.
    """
    places = TURNED.get(node.op)
    types = [program.find_type(ref) for ref in node.inputs]
    if places is None or node.attrs.get("data_format", "NHWC") != "NHWC":
        return program, node
    images, sizes, results = places
    if any(len(types[i].shape or ()) != 4 for i in images) or any(t.dtype == "resource" for t in types):
        return program, node
    operands: list[Node] = []
    for i, (ref, t) in enumerate(zip(node.inputs, types)):
        name, value = f"operand_{i}", program.const(ref)
        if value is not None and i in sizes:
            operands.append(make_const(name, np.asarray(value)[list(_FIRST)], t.dtype))
        elif value is not None and i not in images:
            operands.append(replace(program.by_name[ref.node], name=name, controls=(), outputs=(t,)))
        else:
            operands.append(Node(name, "Placeholder", outputs=(_turn_type(t) if i in images else t,)))
    outputs = tuple(_turn_type(t) if i in results else t for i, t in enumerate(node.outputs))
    inputs = tuple(Ref(one.name) for one in operands)
    turned = replace(node, inputs=inputs, controls=(), attrs=_turn_attrs(node.attrs), outputs=outputs)
    return Program(program.name, (*operands, turned)), turned


def _turn_type(t: TensorType) -> TensorType:
    shape = t.shape
    return t if shape is None or len(shape) != 4 else TensorType(t.dtype, tuple(shape[i] for i in _FIRST))


def _turn_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    turned = {**attrs, "data_format": "NCHW"}
    for name in _BY_DIMENSION:
        if name in attrs:
            turned[name] = tuple(attrs[name][i] for i in _FIRST)
    if pads := attrs.get("explicit_paddings"):
        turned["explicit_paddings"] = tuple(pads[2 * i + side] for i in _FIRST for side in (0, 1))
    return turned
