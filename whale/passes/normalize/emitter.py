"""Adds the simple nodes that replace a composite op to a program."""

from __future__ import annotations

from typing import Any

import numpy as np

from whale.ir.marks import NO_MARKS, Marks
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Dims, DType, Tensor, TensorType, find_numpy_dtype


class NodeEmitter:
    """Adds the nodes that replace one composite node.

    They are named ``<composite>/...``, and get its scope, its control inputs, and its mark for XLA compilation.

    Attributes:
      dtype: the dtype of added nodes, unless a call names another; at first that of the composite node's first operand.
    """

    def __init__(self, program: Program, node: Node, nodes: dict[str, Node], taken: set[str]) -> None:
        self.program, self.node, self.nodes, self.taken = program, node, nodes, taken
        self.dtype = self.type_of(node.inputs[0]).dtype

    def type_of(self, ref: Ref) -> TensorType:
        """Returns dtype and shape of a tensor of the program, or of an added node."""
        return (self.nodes.get(ref.node) or self.program.by_name[ref.node]).outputs[ref.index]

    def add(self, suffix: str, op: str, inputs: tuple[Ref, ...], shape: Dims, dtype: str = "", **attrs: Any) -> Ref:
        """Adds a node with one result, and returns the result.

        Args:
          suffix: the node's name after that of the composite node; made unique if taken.
          shape: shape of the result.
          dtype: dtype of the result, and the attribute ``T``; "": the emitter's.
          attrs: more attributes.
        """
        kind = TensorType(dtype or self.dtype, shape)
        return self.node_of(suffix, op, inputs, kind, {"T": DType(kind.dtype), **attrs})

    def node_of(
        self,
        suffix: str,
        op: str,
        inputs: tuple[Ref, ...],
        kind: TensorType,
        attrs: dict[str, Any],
        marks: Marks = NO_MARKS,
    ) -> Ref:
        """Adds a node with exactly these attributes and the result type ``kind``, and returns the result."""
        name, n = f"{self.node.name}/{suffix}", 1
        while name in self.taken:
            name, n = f"{self.node.name}/{suffix}_{n}", n + 1
        self.taken.add(name)
        if self.node.marks.compiled:
            marks = marks.replace_marks(compiled=True)
        # The composite node's control inputs come before every node that replaces it.
        self.nodes[name] = Node(name, op, inputs, self.node.controls, attrs, (kind,), self.node.scope, False, marks)
        return Ref(name)

    def const(self, suffix: str, value: np.ndarray) -> Ref:
        """Adds a constant with the dtype of the array ``value``, and returns it."""
        tensor = Tensor.from_numpy(value)
        attrs = {"dtype": DType(tensor.dtype), "value": tensor}
        return self.node_of(suffix, "Const", (), TensorType(tensor.dtype, tensor.shape), attrs)

    def scalar(self, suffix: str, value: float) -> Ref:
        """Adds a scalar constant of the emitter's ``dtype``, and returns it."""
        return self.const(suffix, np.asarray(value, find_numpy_dtype(self.dtype)))

    def binary(self, suffix: str, op: str, a: Ref, b: Ref) -> Ref:
        """Adds an elementwise op of two operands; the result has the shape that they broadcast to."""
        x, y = self.type_of(a), self.type_of(b)
        shape: Dims
        assert x.shape is not None and y.shape is not None, (a, b)
        if len(x.shape) == len(y.shape):
            shape = tuple(n if m == 1 or (m is None and n != 1) else m for m, n in zip(x.shape, y.shape))
        else:
            shape = max(x.shape, y.shape, key=len)
        return self.add(suffix, op, (a, b), shape)

    def cast(self, suffix: str, source: Ref, dtype: str) -> Ref:
        """Casts ``source`` to ``dtype``; returns ``source`` itself if it has that dtype."""
        own = self.type_of(source)
        if own.dtype == dtype:
            return source
        attrs = {"SrcT": DType(own.dtype), "DstT": DType(dtype), "Truncate": False}
        return self.node_of(suffix, "Cast", (source,), TensorType(dtype, own.shape), attrs)

    def reduce_over(self, suffix: str, op: str, source: Ref, axes: tuple[int, ...], keep: bool) -> Ref:
        """Adds the reduction ``op`` ("Sum", "Max", ..) over dimensions ``axes``; with ``keep`` they stay as size 1."""
        dims = self.type_of(source).shape
        assert dims is not None, source
        shape = tuple(1 if i in axes else d for i, d in enumerate(dims) if keep or i not in axes)
        numbers = self.const(f"{suffix}/axes", np.array(axes, np.int32))
        return self.add(suffix, op, (source, numbers), shape, Tidx=DType("int32"), keep_dims=keep)
