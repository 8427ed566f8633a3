"""Encodes programs as TensorFlow protos: a node as a NodeDef, a program as a GraphDef, a function as a FunctionDef."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, graph_pb2, node_def_pb2, tensor_pb2
from tensorflow.python.framework import op_def_registry, versions

from whale.capture.attrs import RECOMPUTED, NodeAttrs, find_dtype_enum
from whale.errors import ProgramError
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Func, Shape, Tensor

# Colocations name nodes that may be gone, recorded shapes are those of another graph, and the rest describes the
# trace that the node came from.
_DROPPED = frozenset(
    {"_class", "_output_shapes", "_user_specified_name", "_has_manual_control_dependencies", "api_implements",
     "api_preferred_device", "forward_function_name", "backward_function_name"}
)  # fmt: skip
HOST_DEVICE = "/device:CPU:0"
_LIST_FIELD = {"string": "s", "int": "i", "float": "f", "bool": "b", "type": "type", "shape": "shape",
               "tensor": "tensor", "func": "func"}  # fmt: skip


@cache
def find_attr_types(op: str) -> Mapping[str, str]:
    """Maps an op type's attribute names to their types (``int``, ``list(type)``, ...); empty for an unregistered op."""
    op_def = op_def_registry.get(op)
    return {a.name: a.type for a in op_def.attr} if op_def is not None else {}


def encode_tensor(value: Tensor) -> Any:
    """Encodes a Tensor as a TensorProto."""
    proto = tensor_pb2.TensorProto(dtype=find_dtype_enum(value.dtype))
    for size in value.shape:
        proto.tensor_shape.dim.add(size=size)
    if value.dtype == "string":
        proto.string_val.extend(value.data)
    else:
        proto.tensor_content = value.data
    return proto


def encode_shape(dims: tuple[int | None, ...] | None) -> Any:
    """Encodes sizes as a TensorShapeProto; a size of None is unknown, and ``dims=None`` is an unknown rank."""
    return tf.TensorShape(dims).as_proto()


def _encode_field(value: Any, kind: str) -> tuple[str, Any]:
    """Returns (field name of AttrValue, value to store in the field).

    Args:
      kind: type of the attribute in the OpDef, such as ``int``; "" if the op does not define the attribute.
    """
    if isinstance(value, DType) or kind == "type":
        return "type", find_dtype_enum(str(value))
    if isinstance(value, (bool, np.bool_)):
        return "b", bool(value)
    if kind == "float":
        return "f", float(value)
    if isinstance(value, (int, np.integer)):
        return "i", int(value)
    if isinstance(value, (float, np.floating)):
        return "f", float(value)
    if isinstance(value, (str, bytes)):
        return "s", value.encode() if isinstance(value, str) else value
    if isinstance(value, Shape):
        return "shape", encode_shape(value.dims)
    if isinstance(value, Tensor):
        return "tensor", encode_tensor(value)
    if isinstance(value, Func):
        func = attr_value_pb2.NameAttrList(name=value.name)
        for key, item in value.attrs.items():
            func.attr[key].CopyFrom(encode(item))
        return "func", func
    raise ProgramError(
        "an attribute value has no proto form: it cannot be written to an AttrValue",
        given=f"{type(value).__name__} {value!r}",
        expected="bool, int, float, text, DType, Shape, Tensor, Func or a tuple of one of these",
        action="give the attribute one of the types of whale.ir.values",
    )


def encode(value: Any, kind: str = "") -> Any:
    """Encodes a plain value as an AttrValue proto.

    Args:
      value: a value as in whale.ir.values, or a tuple of them; None gives an AttrValue without a value.
      kind: type of the attribute in the OpDef, such as ``list(int)``; "" if it is not known.

    Raises:
      ProgramError: an attribute cannot hold a value of this type.
    """
    proto = attr_value_pb2.AttrValue()
    if isinstance(value, (tuple, list)):
        inner = kind[5:-1] if kind.startswith("list(") else ""
        proto.list.SetInParent()
        for item in value:
            field, encoded = _encode_field(item, inner)
            repeated = getattr(proto.list, field)
            repeated.append(encoded)
    elif value is not None:
        field, encoded = _encode_field(value, kind)
        if field in ("shape", "tensor", "func"):
            getattr(proto, field).CopyFrom(encoded)
        else:
            setattr(proto, field, encoded)
    return proto


def encode_node_def(node: Node, name: str, inputs: Sequence[str], known: dict[int, Any] | None = None) -> Any:
    """Encodes ``node`` as a NodeDef with the given name and inputs; the device is empty, or the CPU if the node is
    on_host.

    Args:
      inputs: operands as a GraphDef spells them (``a``, ``a:1``), then control inputs (``^a``).
      known: cache of NodeDefs by ``id(node.attrs)``, for attributes that several nodes share; it is added to. The
        caller keeps the attributes alive as long as the cache.
    """
    attrs = node.attrs
    common = None if known is None else known.get(id(attrs))
    if common is None or common.op != node.op:
        common = _encode_attrs(node)
        if known is not None:
            known[id(attrs)] = common
    node_def = node_def_pb2.NodeDef()
    node_def.CopyFrom(common)
    node_def.device = HOST_DEVICE if node.marks.on_host else ""
    if node.marks.recomputed:
        node_def.attr[RECOMPUTED].b = True
    node_def.name = name
    del node_def.input[:]
    node_def.input.extend(inputs)
    return node_def


def _encode_attrs(node: Node) -> Any:
    """Returns a NodeDef with the op type and the attributes of ``node``."""
    node_def, attrs = node_def_pb2.NodeDef(), node.attrs
    if isinstance(attrs, NodeAttrs) and attrs.node_def.op == node.op:
        node_def.CopyFrom(attrs.node_def)
        for key in _DROPPED:
            node_def.attr.pop(key, None)
        return node_def
    node_def.op = node.op
    kinds = find_attr_types(node.op)
    for key, value in attrs.items():
        node_def.attr[key].CopyFrom(encode(value, kinds.get(key, "")))
    return node_def


def format_operand(ref: Ref) -> str:
    """Returns an operand as a GraphDef spells it: ``a`` for output 0 of node a, ``a:1`` for output 1."""
    return ref.node if ref.index == 0 else f"{ref.node}:{ref.index}"


def encode_graph_def(program: Program) -> Any:
    """Encodes ``program`` as a GraphDef; node names are kept, and its functions become the GraphDef's library."""
    graph_def = graph_pb2.GraphDef()
    graph_def.versions.producer = versions.GRAPH_DEF_VERSION
    graph_def.versions.min_consumer = versions.GRAPH_DEF_VERSION_MIN_CONSUMER
    graph_def.node.extend(
        encode_node_def(n, n.name, [*map(format_operand, n.inputs), *(f"^{c}" for c in n.controls)])
        for n in program.nodes
    )
    graph_def.library.function.extend(encode_function_def(body, name) for name, body in program.functions.items())
    return graph_def


def encode_function_def(program: Program, name: str) -> Any:
    """Encodes ``program`` as a FunctionDef: its inputs become arguments, its outputs results, its effects control
    outputs.

    Node names are kept; arguments are called ``arg_0``, ..., and results ``result_0``, ... Control outputs always run.
    Functions that ``program`` calls are not included.
    """
    function = function_pb2.FunctionDef()
    signature = function.signature
    signature.name = name
    by_name = program.by_name
    taken = set(by_name)
    texts: dict[str, str] = {}
    for i, node_name in enumerate(program.inputs):
        argument = _make_unused_name(f"arg_{i}", taken)
        signature.input_arg.add(name=argument, type=find_dtype_enum(by_name[node_name].outputs[0].dtype))
        texts[node_name] = argument
    spelled = {n.name: _format_outputs(n) for n in program.nodes if n.name not in texts}

    def operand(ref: Ref) -> str:
        return texts[ref.node] if ref.node in texts else f"{ref.node}:{spelled[ref.node][ref.index]}"

    known: dict[int, Any] = {}
    for node in program.nodes:
        if node.name not in texts:
            controls = (f"^{texts.get(c, c)}" for c in node.controls)
            function.node_def.append(encode_node_def(node, node.name, [*map(operand, node.inputs), *controls], known))
            signature.is_stateful = signature.is_stateful or node.stateful
    for i, ref in enumerate(program.outputs):
        result = f"result_{i}"
        signature.output_arg.add(name=result, type=find_dtype_enum(program.find_type(ref).dtype))
        function.ret[result] = operand(ref)
    for i, effect in enumerate(program.effects):
        control = f"effect_{i}"
        signature.control_output.append(control)
        function.control_ret[control] = effect
    return function


def _make_unused_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _format_outputs(node: Node) -> list[str]:
    """Returns each output of ``node`` as a FunctionDef spells it: ``<output argument>:<index>``, e.g. ``product:0``.

    Raises:
      ProgramError: the op type is not registered in this process.
    """
    op_def = op_def_registry.get(node.op)
    if op_def is None:
        raise ProgramError(
            "an op type is not registered",
            op=node.name,
            given=node.op,
            expected="an op type that this process has registered",
            action="call tf.load_op_library() for the library with this op on every rank, before the step is called",
        )
    texts: list[str] = []
    for argument in op_def.output_arg:
        count = 1
        if argument.number_attr:
            count = node.attrs[argument.number_attr]
        elif argument.type_list_attr:
            count = len(node.attrs[argument.type_list_attr])
        texts.extend(f"{argument.name}:{i}" for i in range(count))
    return texts
