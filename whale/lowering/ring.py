"""Attention on one rank, whose queries, keys and values are parts of a sequence: keys and values go round the ranks.

Rank r holds block r. At step j it has keys and values of block r + j (mod p), which it hands on to rank r - 1. Forward,
the softmax is summed up as blocks come (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Liu,
Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023): with m the largest score so far, l the sum of
exp(score - m) and O that of exp(score - m) v, a block with a larger score first scales l and O by exp(m - m'). Backward
the scores are computed again, and shares = exp(score - (m + log l)); what a block's keys and values get as gradients
travels with the block, and is home one step after its last. A block is begun when the one before is done, so a rank
holds the scores of one block, the block at hand and the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whale.ir.layout import Split, Strategy
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Shape, TensorType, numpy_dtype, static_shape
from whale.lowering.emit import Emitter
from whale.rules.math.einsum import product_letters
from whale.rules.nn.attention import ATTENTION, sides_of
from whale.rules.structure.communication import ROUND


def emit_attention(
    e: Emitter, node: Node, body: Program, strategy: Strategy, operands: Sequence[Ref], types: Sequence[TensorType]
) -> dict[int, Ref]:
    """Nodes of an attention, or its gradient, on one rank; where each of its results is.

    Args:
      body: what the node stands for.
      operands: its operands on this rank, of these ``types``.
    """
    cut = strategy.inputs[0]
    assert isinstance(cut, Split), (node.name, strategy)
    ring = _Ring(e, node, body, cut.sizes, list(zip(operands, types)))
    return ring.forward() if node.op == ATTENTION else ring.backward()


_Tensor = tuple[Ref, TensorType]


class _Ring:
    """The nodes of one such operation."""

    def __init__(self, e: Emitter, node: Node, body: Program, sizes: Sequence[int], operands: Sequence[_Tensor]):
        self.e, self.node, self.body, self.sizes, self.operands = e, node, body, sizes, operands
        self.dims: Any = node.attrs["dims"]
        self.turn: Any = node.attrs["turn"]
        self.number = 0
        self.after: tuple[str, ...] = ()  # what the next block waits for

    # -- simple nodes

    def run(
        self, op: str, inputs: Sequence[_Tensor], t: TensorType, attrs: Mapping[str, Any], waits: Sequence[str] = ()
    ) -> _Tensor:
        """A new node with exactly these attributes, this type, and behind what it ``waits`` for."""
        self.number += 1
        name = f"{self.node.name}/{self.e.prefix}_{self.number}_{op}"
        refs = tuple(r for r, _ in inputs)
        self.e.nodes[name] = Node(name, op, refs, tuple(waits), attrs, (t,), self.node.scope)
        return Ref(name), t

    def add(self, op: str, inputs: Sequence[_Tensor], shape: Sequence[int], **attrs: Any) -> _Tensor:
        """A new node of the type of its first operand."""
        t = TensorType(inputs[0][1].dtype, tuple(shape))
        return self.run(op, inputs, t, {"T": DType(t.dtype), **attrs})

    def const(self, value: np.ndarray) -> _Tensor:
        self.number += 1
        ref = self.e.const(f"{self.node.name}/{self.e.prefix}_{self.number}_const", value)
        return ref, self.e.nodes[ref.node].outputs[0]

    def each(self, op: str, *inputs: _Tensor) -> _Tensor:
        """An elementwise op, whose operands broadcast."""
        return self.add(op, inputs, np.broadcast_shapes(*(static_shape(t) for _, t in inputs)))

    def over(self, op: str, source: _Tensor, axes: Sequence[int]) -> _Tensor:
        shape = [1 if i in axes else n for i, n in enumerate(static_shape(source[1]))]
        numbers = self.const(np.array(axes, np.int32))
        return self.add(op, (source, numbers), shape, Tidx=DType("int32"), keep_dims=True)

    def transposed(self, source: _Tensor, order: Sequence[int]) -> _Tensor:
        if list(order) == sorted(order):
            return source
        shape = static_shape(source[1])
        return self.add("Transpose", (source, self.const(np.array(order, np.int32))), [shape[i] for i in order],
                        Tperm=DType("int32"))  # fmt: skip

    def over_result(self, each: _Tensor) -> _Tensor:
        """One number for each query [.., queries, 1], so that it broadcasts over the result."""
        return self.transposed(each, self.turn)

    # -- blocks

    @property
    def rank(self) -> int:
        return self.e.rank

    def block(self, step: int) -> int:
        """Whose keys and values the rank has at a step."""
        return (self.rank + step) % len(self.sizes)

    def handed_on(self, what: str, step: int, tensor: _Tensor, dim: int, coming: int) -> _Tensor:
        """``tensor`` is sent to the rank before this one, and the next one's of block ``coming`` is received."""
        e, p, t = self.e, len(self.sizes), tensor[1]
        key = f"{self.node.name}/{what}_{step}"  # what stands before the last "/" is the plan's name for all of them
        shape = tuple(self.sizes[coming] if i == dim else n for i, n in enumerate(static_shape(t)))
        before, behind = (self.rank - 1) % p, (self.rank + 1) % p
        attrs = {"key": f"{key}_{self.rank}to{before}", "peer": before, ROUND: dim}
        e.comm_op(f"{key}/send", "WhaleSend", (tensor[0],), t, attrs, ())
        out = TensorType(t.dtype, shape)
        attrs = {"key": f"{key}_{behind}to{self.rank}", "peer": behind, "shape": Shape(shape), ROUND: dim}
        ref = e.comm_op(f"{key}/recv", "WhaleRecv", (tensor[0],), t, attrs, (out,))
        waits = self.after or (self.operands[0][0].node,)
        e.nodes[ref.node] = replace(e.nodes[ref.node], controls=waits)
        return ref, out

    def next_block(self, step: int, key: _Tensor, value: _Tensor) -> tuple[_Tensor, _Tensor]:
        """The keys and values of the step behind this one, for which these are handed on; behind the last, these."""
        if step + 1 == len(self.sizes):
            return key, value
        coming = self.block(step + 1)
        return (
            self.handed_on("key", step, key, self.dims[1], coming),
            self.handed_on("value", step, value, self.dims[2], coming),
        )

    def side(self, i: int, block: int) -> _Tensor:
        """What scores of a block are scaled or masked by: of the block's keys only."""
        ref, t = self.operands[sides_of(self.node) + i]
        if not self.node.attrs["keyed"][i]:
            return ref, t
        begin, shape = np.zeros(len(t.shape or ()), np.int32), list(static_shape(t))
        begin[-1], shape[-1] = sum(self.sizes[:block]), self.sizes[block]
        bounds = [self.const(x) for x in (begin, np.array(shape, np.int32))]
        out = TensorType(t.dtype, tuple(shape))
        return self.run("Slice", ((ref, t), *bounds), out, {"T": DType(t.dtype), "Index": DType("int32")}, self.after)

    def replayed(self, known: Mapping[Ref, _Tensor], until: str = "") -> dict[Ref, _Tensor]:
        """The nodes of the body that are not known yet, for one block, up to that called ``until``."""
        found = dict(known)
        for node in self.body.nodes:
            if node.name == until:
                break
            if Ref(node.name) in found:
                continue
            inputs = [found[r] for r in node.inputs]
            t = TensorType(node.outputs[0].dtype, _shape_of(node, [static_shape(t) for _, t in inputs]))
            found[Ref(node.name)] = self.run(node.op, inputs, t, node.attrs, self.after)
        return found

    def given(self, key: _Tensor, value: _Tensor, block: int, more: Sequence[_Tensor] = ()) -> dict[Ref, _Tensor]:
        """The body's arguments for a block."""
        sides = [self.side(i, block) for i in range(len(self.operands) - sides_of(self.node))]
        arguments = (self.operands[0], key, value, *more, *sides)
        return {Ref(name): tensor for name, tensor in zip(self.body.inputs, arguments)}

    # -- the two directions

    def forward(self) -> dict[int, Ref]:
        """(result, the logarithm of the sum of each query's exponentials)."""
        key, value = self.operands[1:3]
        softmax = self.body.by_name[str(self.node.attrs["softmax"])]
        largest = total = result = None
        for step in range(len(self.sizes)):
            block = self.block(step)
            ahead = self.next_block(step, key, value)
            known = self.replayed(self.given(key, value, block), softmax.name)
            scores = known[softmax.inputs[0]]
            axis = len(static_shape(scores[1])) - 1
            # A row whose scores are all minus infinity so far has no difference from them.
            lowest = self.const(np.array(np.finfo(numpy_dtype(scores[1].dtype)).min, numpy_dtype(scores[1].dtype)))
            most = self.each("Maximum", self.over("Max", scores, [axis]), lowest)
            most = most if largest is None else self.each("Maximum", largest, most)
            shares = self.each("Exp", self.each("Sub", scores, most))
            mixed = self.replayed({**known, Ref(softmax.name): shares})[Ref(str(self.node.attrs["mixed"]))]
            sums = self.over("Sum", shares, [axis])
            if largest is None or total is None or result is None:
                total, result = sums, mixed
            else:
                scale = self.each("Exp", self.each("Sub", largest, most))
                total = self.each("AddV2", self.each("Mul", total, scale), sums)
                result = self.each("AddV2", self.each("Mul", result, self.over_result(scale)), mixed)
            largest, key, value = most, *ahead
            self.after = (result[0].node, total[0].node)
        assert largest is not None and total is not None and result is not None
        result = self.each("RealDiv", result, self.over_result(total))
        return {0: result[0], 1: self.each("AddV2", largest, self.each("Log", total))[0]}

    def backward(self) -> dict[int, Ref]:
        """The gradients of queries, keys and values."""
        key, value, slope, result, log = self.operands[1:6]
        p, attrs = len(self.sizes), self.node.attrs
        softmax = self.body.by_name[str(attrs["softmax"])]
        names = [Ref(str(n)) for n in attrs["gradients"]]
        within = [Ref(str(n)) for n in (*attrs["within"], attrs["scores"])]  # what the sums over keys stand for
        features = self.turn.index(len(self.turn) - 1)
        # Of each query: the sum of its shares' gradients, weighted by the shares, is that of its result's.
        pull = self.over("Sum", self.each("Mul", slope, result), [features])
        pull = self.transposed(pull, [self.turn.index(i) for i in range(len(self.turn))])
        of_query: _Tensor | None = None
        own: list[_Tensor] = []
        travelling: list[_Tensor] = []
        for step in range(p):
            block = self.block(step)
            ahead = self.next_block(step, key, value)
            known = self.replayed(self.given(key, value, block, (slope,)), softmax.name)
            scores = known[softmax.inputs[0]]
            shares = self.each("Exp", self.each("Sub", scores, log))
            known = self.replayed({**known, Ref(softmax.name): shares}, within[0].node)
            change = self.each("Mul", self.each("Sub", known[Ref(str(attrs["slope"]))], pull), shares)
            known = self.replayed({**known, **dict.fromkeys(within, change)})
            part = known[names[0]]
            of_query = part if of_query is None else self.each("AddV2", of_query, part)
            gained = [known[names[1]], known[names[2]]]
            if step == 0:
                own = gained  # stays at home
            elif step == 1:
                travelling = gained
            else:
                travelling = [self.each("AddV2", a, b) for a, b in zip(travelling, gained)]
            self.after = (of_query[0].node, *(t[0].node for t in (travelling or own)))
            if step:
                # To the rank that has the block next; after the last step to the one whose it is.
                coming = self.block(step + 1) if step + 1 < p else self.rank
                travelling = [
                    self.handed_on(f"d{what}", step, t, self.dims[at], coming)
                    for what, at, t in (("key", 1, travelling[0]), ("value", 2, travelling[1]))
                ]
            key, value = ahead
        assert of_query is not None
        found = [self.each("AddV2", a, b) for a, b in zip(own, travelling)] if travelling else own
        return {0: of_query[0], 1: found[0][0], 2: found[1][0]}


def without_examples(program: Program) -> Program:
    """``program`` whose receives have no operands by which they lie: what a rank runs."""

    def plain(node: Node) -> Node:
        return replace(node, inputs=node.inputs[:1]) if node.op == "WhaleRecv" and len(node.inputs) > 1 else node

    if not any(ROUND in n.attrs for graph in (program, *program.functions.values()) for n in graph.nodes):
        return program
    functions = {name: body.with_nodes(tuple(map(plain, body.nodes))) for name, body in program.functions.items()}
    return program.with_nodes(tuple(map(plain, program.nodes)), functions=functions)


def _shape_of(node: Node, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of what a product, or an op element by element, makes of operands of these shapes."""
    words = product_letters(node, len(shapes[0]))
    if not words:
        return tuple(np.broadcast_shapes(*shapes))
    sizes = {c: n for word, shape in zip(words, shapes) for c, n in zip(word, shape)}
    return tuple(sizes[c] for c in words[-1])
