"""Computes nodes of a loop's body for all iterations at once: tensors get the iterations as a first dimension."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from whale.ir.marks import NO_MARKS, Marks
from whale.ir.ops import IDENTITIES
from whale.ir.program import Node, Program, Ref, make_const
from whale.ir.values import DType, TensorType, find_numpy_dtype
from whale.kernels.loops.turns import Item, Items, NotFollowed, Row, Whole, Zeros, require_sizes

_ON_ELEMENTS = IDENTITIES | frozenset(
    """Neg Abs Sign Square Sqrt Rsqrt Reciprocal Inv Exp Log Log1p Expm1 Tanh Sigmoid Relu Relu6 Elu Selu Softplus
    Softsign Erf Sin Cos LogicalNot Cast ZerosLike OnesLike Floor""".split()
)
_ON_PAIRS = frozenset(
    """Add AddV2 Sub Mul RealDiv Maximum Minimum SquaredDifference Greater GreaterEqual Less LessEqual Equal NotEqual
    LogicalAnd LogicalOr Pow""".split()
)
_ON_EQUAL = frozenset(
    "TanhGrad SigmoidGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad ReluGrad Relu6Grad EluGrad SoftplusGrad".split()
)
_REDUCTIONS = frozenset("Sum Mean Max Min Prod".split())


@dataclass
class GraphNodes:
    """Collects nodes that are added to a graph.

    Attributes:
      graph: the graph.
      nodes: the added nodes, by name.
      types: types of results whose nodes are added later.
      prefix: beginning of the names of added nodes.
      scope, marks: those of added nodes.
    """

    graph: Program
    nodes: dict[str, Node] = field(default_factory=dict)
    types: dict[Ref, TensorType] = field(default_factory=dict)
    prefix: str = ""
    scope: str = ""
    marks: Marks = NO_MARKS

    def add_for(self, node: Node) -> GraphNodes:
        """Returns a collector for the same nodes that gives added nodes the name, scope and marks of ``node``."""
        return replace(self, prefix=node.name, scope=node.scope, marks=node.marks)

    def type_of(self, ref: Ref) -> TensorType:
        """Returns the type of a tensor of the graph, or of an added node."""
        if ref in self.types:
            return self.types[ref]
        return (self.nodes.get(ref.node) or self.graph.by_name[ref.node]).outputs[ref.index]

    def name(self, what: str) -> str:
        """Returns an unused node name that begins with the prefix and ``what``."""
        name, n = f"{self.prefix}/{what}", 0
        while name in self.nodes or name in self.graph.by_name:
            n += 1
            name = f"{self.prefix}/{what}_{n}"
        return name

    def keep(self, node: Node) -> Ref:
        """Adds a node unchanged, and returns its first result."""
        self.nodes[node.name] = node
        return Ref(node.name)

    def add(self, op: str, inputs: Sequence[Ref], dtype: str, shape: Sequence[int], **attrs: Any) -> Ref:
        """Adds a node with one result of this dtype and shape, and returns the result."""
        kind = TensorType(dtype, tuple(shape))
        return self.keep(Node(self.name(op), op, tuple(inputs), (), attrs, (kind,), self.scope, False, self.marks))

    def const(self, value: np.ndarray) -> Ref:
        """Adds a constant, and returns it."""
        return self.keep(make_const(self.name("Const"), value, scope=self.scope))

    def reshape(self, ref: Ref, shape: Sequence[int]) -> Ref:
        """Returns the tensor reshaped to ``shape``; the tensor itself if it has that shape."""
        t = self.type_of(ref)
        if t.shape == tuple(shape):
            return ref
        sizes = self.const(np.array(shape, np.int32))
        return self.add("Reshape", (ref, sizes), t.dtype, shape, T=DType(t.dtype), Tshape=DType("int32"))

    def sum(self, ref: Ref, axes: Sequence[int]) -> Ref:
        """Returns the tensor summed over dimensions ``axes``, which are removed."""
        t = self.type_of(ref)
        shape = [n for i, n in enumerate(require_sizes(t)) if i not in axes]
        over = self.const(np.array(axes, np.int32))
        return self.add("Sum", (ref, over), t.dtype, shape, T=DType(t.dtype), Tidx=DType("int32"), keep_dims=False)

    def matmul(self, left: Ref, right: Ref, turn_left: bool = False, turn_right: bool = False) -> Ref:
        """Returns the product of two matrices.

        Args:
          turn_left, turn_right: whether the operand is transposed.
        """
        t = self.type_of(left)
        a, b = require_sizes(t), require_sizes(self.type_of(right))
        shape = (a[1] if turn_left else a[0], b[0] if turn_right else b[1])
        attrs = {"T": DType(t.dtype), "transpose_a": turn_left, "transpose_b": turn_right}
        return self.add("MatMul", (left, right), t.dtype, shape, **attrs)

    def plus(self, a: Ref, b: Ref) -> Ref:
        """Returns the sum of two tensors of the same shape."""
        t = self.type_of(a)
        return self.add("AddV2", (a, b), t.dtype, require_sizes(t), T=DType(t.dtype))

    def cast(self, ref: Ref, dtype: str) -> Ref:
        """Returns the tensor cast to ``dtype``; the tensor itself if it has that dtype."""
        t = self.type_of(ref)
        if t.dtype == dtype:
            return ref
        attrs = {"SrcT": DType(t.dtype), "DstT": DType(dtype), "Truncate": False}
        return self.add("Cast", (ref,), dtype, require_sizes(t), **attrs)

    def zeros(self, dtype: str, shape: Sequence[int]) -> Ref:
        """Returns a tensor of zeros."""
        sizes = self.const(np.array(shape, np.int32))
        value = self.const(np.zeros((), find_numpy_dtype(dtype)))
        return self.add("Fill", (sizes, value), dtype, shape, T=DType(dtype), index_type=DType("int32"))

    def rows(self, ref: Ref, first: int, count: int) -> Ref:
        """Returns ``count`` rows of a tensor, from row ``first`` on."""
        t = self.type_of(ref)
        shape = require_sizes(t)
        if (first, count) == (0, shape[0]):
            return ref
        begin, size = ([at, *[rest] * (len(shape) - 1)] for at, rest in ((first, 0), (count, -1)))
        operands = (ref, *[self.const(np.array(one, np.int32)) for one in (begin, size)])
        return self.add("Slice", operands, t.dtype, (count, *shape[1:]), T=DType(t.dtype), Index=DType("int32"))

    def reverse(self, ref: Ref) -> Ref:
        """Returns the tensor with its rows in reverse order."""
        t = self.type_of(ref)
        axes = self.const(np.array([0], np.int32))
        return self.add("ReverseV2", (ref, axes), t.dtype, require_sizes(t), T=DType(t.dtype), Tidx=DType("int32"))

    def stack(self, items: Items, kind: TensorType | None) -> Ref:
        """Returns a tensor whose rows are the items of a list.

        Args:
          kind: type of an item; None: found from the items.

        Raises:
          NotFollowed: an item is no tensor of the graph, the list is empty, or its type is unknown.
        """
        kind = kind if kind is not None and kind.is_static else self._find_item_type(items)
        shape = require_sizes(kind)
        parts: list[Ref] = []
        for run in _find_runs(items):
            first = run[0]
            if isinstance(first, Zeros):
                parts.append(self.zeros(kind.dtype, (len(run), *shape)))
            elif isinstance(first, Whole):
                parts.append(self.reshape(first.ref, (1, *shape)))
            elif isinstance(first, Row):
                last = run[-1]
                assert isinstance(last, Row)
                part = self.rows(first.ref, min(first.number, last.number), len(run))
                parts.append(self.reverse(part) if last.number < first.number else part)
            else:
                raise NotFollowed(
                    "the items of a list that is to be stacked are not tensors of the graph outside of the loop"
                )
        if len(parts) == 1:
            return parts[0]
        if not parts:
            raise NotFollowed("a list without items is to be stacked, and the type of its items is unknown")
        axis = self.const(np.array(0, np.int32))
        attrs = {"T": DType(kind.dtype), "N": len(parts), "Tidx": DType("int32")}
        return self.add("ConcatV2", (*parts, axis), kind.dtype, (len(items), *shape), **attrs)

    def _find_item_type(self, items: Items) -> TensorType:
        for item in items:
            if isinstance(item, Row):
                t = self.type_of(item.ref)
                return TensorType(t.dtype, require_sizes(t)[1:])
            if isinstance(item, Whole):
                return self.type_of(item.ref)
        raise NotFollowed("the shape of the items of a list that is to be stacked is unknown")


def _find_runs(items: Items) -> list[list[Item]]:
    """Groups consecutive items that one operation can yield: rows of one tensor, ascending or descending, or zeros."""
    runs: list[list[Item]] = []
    for item in items:
        if runs and _goes_on(runs[-1], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _goes_on(run: list[Item], item: Item) -> bool:
    last = run[-1]
    if isinstance(last, Zeros) and isinstance(item, Zeros):
        return True
    if not isinstance(last, Row) or not isinstance(item, Row) or last.ref != item.ref:
        return False
    step = item.number - last.number
    if len(run) == 1:
        return step in (1, -1)
    before = run[-2]
    assert isinstance(before, Row)
    return step == last.number - before.number


def find_steps(items: Items) -> tuple[Ref, int, int] | None:
    """Returns (tensor, first row, distance from item to item) if all items are rows of one tensor at equal distances;
    else None.
    """
    rows = [item for item in items if isinstance(item, Row)]
    if len(rows) != len(items) or len({row.ref for row in rows}) != 1:
        return None
    step = rows[1].number - rows[0].number if len(rows) > 1 else 1
    if any(b.number - a.number != step for a, b in itertools.pairwise(rows)):
        return None
    return rows[0].ref, rows[0].number, step


@dataclass(frozen=True, slots=True)
class Operand:
    """Represents an operand of a stacked node, as a tensor of the graph around the loop.

    Attributes:
      ref: the tensor.
      stacked: whether it holds the values of all iterations, in its first dimension, or one value that is the same in
        each.
    """

    ref: Ref
    stacked: bool


def can_stack(body: Program, node: Node, stacked: Callable[[Ref], bool]) -> bool:
    """Returns True if ``stack_node`` can compute the node for all iterations at once.

    Args:
      body: the loop's body, which contains the node.
      stacked: a function that returns True for an operand that differs between iterations.
    """
    kinds = [*map(body.find_type, node.inputs), *node.outputs]
    if len(node.outputs) != 1 or node.stateful or not all(t.is_static and t.elements for t in kinds):
        return False
    op = node.op
    if op in _ON_ELEMENTS or op in _ON_PAIRS or op in ("Select", "SelectV2", "AddN"):
        return op != "Select" or len({t.shape for t in kinds}) == 1
    if op in _ON_EQUAL:
        return all(map(stacked, node.inputs))
    if op == "BiasAdd":
        return node.attrs.get("data_format", "NHWC") == "NHWC" and not stacked(node.inputs[1])
    if op == "MatMul":
        return True
    if op == "BiasAddGrad":
        return node.attrs.get("data_format", "NHWC") == "NHWC"
    if op in ("Reshape", "ExpandDims", "Squeeze"):
        return True
    if op == "ConcatV2":
        return all(map(stacked, node.inputs[:-1])) and body.const(node.inputs[-1]) is not None
    if op in _REDUCTIONS | {"Transpose", "Tile"}:
        return body.const(node.inputs[1]) is not None
    return False


def stack_node(g: GraphNodes, body: Program, node: Node, operands: Sequence[Operand], turns: int) -> Ref:
    """Adds nodes that compute ``node`` for all iterations at once; returns the result, [iterations, ...].

    Args:
      operands: the node's operands outside of the loop.
      turns: number of iterations.
    """
    op, out = node.op, node.outputs[0]
    shape = (turns, *require_sizes(out))
    kinds = [body.find_type(ref) for ref in node.inputs]

    def as_node(*refs: Ref, of: str = op, **attrs: Any) -> Ref:
        made = Node(g.name(of), of, refs, (), {**node.attrs, **attrs}, (TensorType(out.dtype, shape),), g.scope)
        return g.keep(replace(made, marks=node.marks))

    def padded(number: int) -> Ref:
        """Returns operand ``number`` reshaped so that it broadcasts: sizes of 1 are inserted after the dimension of the
        iterations until the operand has the rank of the result.
        """
        one, own = operands[number], require_sizes(kinds[number])
        missing = len(shape) - 1 - len(own)
        return g.reshape(one.ref, (turns, *(1,) * missing, *own)) if one.stacked and missing else one.ref

    if op in ("Reshape", "ExpandDims", "Squeeze") or op in IDENTITIES:
        return g.reshape(operands[0].ref, shape)
    if op in _ON_ELEMENTS or op in _ON_EQUAL or op == "BiasAdd":
        return as_node(*[one.ref for one in operands])
    if op in _ON_PAIRS:
        return as_node(*[padded(i) for i in range(2)])
    if op in ("Select", "SelectV2"):
        return as_node(*[padded(i) for i in range(3)], of="SelectV2")
    if op == "AddN":
        if all(one.stacked for one in operands):
            return as_node(*[one.ref for one in operands])
        total = operands[0].ref
        for one in operands[1:]:
            total = g.add("AddV2", (total, one.ref), out.dtype, shape, T=DType(out.dtype))
        return total
    if op == "MatMul":
        return _stack_product(g, node, kinds, operands, shape)
    if op == "BiasAddGrad":
        rank = len(kinds[0].shape or ())
        return g.sum(operands[0].ref, range(1, rank))
    if op == "ConcatV2":
        axis = int(np.asarray(body.const(node.inputs[-1])))
        axis = axis % (len(shape) - 1) + 1
        return as_node(*[one.ref for one in operands[:-1]], g.const(np.array(axis, np.int32)), Tidx=DType("int32"))
    given = np.asarray(body.const(node.inputs[1]))
    rank = len(kinds[0].shape or ())
    if op == "Transpose":
        order = [0, *[int(i) % rank + 1 for i in given]]
        return as_node(operands[0].ref, g.const(np.array(order, np.int32)), Tperm=DType("int32"))
    if op == "Tile":
        return as_node(operands[0].ref, g.const(np.array([1, *given], np.int32)), Tmultiples=DType("int32"))
    axes = [int(i) % rank + 1 for i in given.reshape(-1)]
    return as_node(operands[0].ref, g.const(np.array(axes, np.int32)), Tidx=DType("int32"))


def _stack_product(
    g: GraphNodes, node: Node, kinds: Sequence[TensorType], operands: Sequence[Operand], shape: tuple[int, ...]
) -> Ref:
    """Adds the matrix products of all iterations: one product if the right operand is the same in each, else a batch of
    products.
    """
    left, right = operands
    turned = bool(node.attrs.get("transpose_a")), bool(node.attrs.get("transpose_b"))
    if left.stacked and not right.stacked and not turned[0]:
        flat = g.reshape(left.ref, (shape[0] * shape[1], require_sizes(kinds[0])[1]))
        return g.reshape(g.matmul(flat, right.ref, turn_right=turned[1]), shape)
    attrs = {"T": DType(node.outputs[0].dtype), "adj_x": turned[0], "adj_y": turned[1]}
    return g.add("BatchMatMulV2", (left.ref, right.ref), node.outputs[0].dtype, shape, **attrs)


def sum_product(g: GraphNodes, node: Node, operands: Sequence[Operand]) -> Ref | None:
    """Adds the sum over all iterations of the product that ``node`` computes in each, as one product over the rows of
    all iterations; returns its result.

    Returns None if the node is no product ``transpose(left) x right`` of operands that differ between iterations.
    Gradients of weights have this form.

    Args:
      operands: the node's operands outside of the loop.
    """
    left, right = operands
    if not node.attrs.get("transpose_a") or node.attrs.get("transpose_b") or not (left.stacked and right.stacked):
        return None
    flat = []
    for one in operands:
        shape = require_sizes(g.type_of(one.ref))
        flat.append(g.reshape(one.ref, (prod(shape[:-1]), shape[-1])))
    return g.matmul(flat[0], flat[1], turn_left=True)
