"""Emits attention in blocks: of queries, and of keys if the sequence is sharded over ranks (ring attention).

Rank r starts with block r of keys and values. At step j it has block r + j (mod p), which it sends on to rank r - 1.
Forward, the softmax is accumulated block by block (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023): with m the largest score so far, l
the sum of exp(score - m) and O that of exp(score - m) v, a block with a larger score m' first scales l and O by exp(m -
m'). Backward, the scores are recomputed, and shares = exp(score - (m + log l)); the gradients of a block's keys and
values travel with the block, and reach its rank one step after the last one. Within a rank queries are processed block
by block (Dao et al., "FlashAttention", 2022). Each block begins when the one before has ended, so a rank stores only
the scores of one block of queries, the present block of keys, and the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from whale.ir.emitter import Emitter
from whale.ir.layout import Shard, Strategy
from whale.ir.marks import NO_MARKS, Marks
from whale.ir.program import Node, Program, Ref, rewire
from whale.ir.values import DType, Shape, TensorType, find_numpy_dtype, require_static_shape
from whale.sharding_rules.math.einsum import find_product_letters
from whale.sharding_rules.nn.attention import ATTENTION, RINGS, count_leading_operands


def emit_attention(
    e: Emitter, node: Node, body: Program, strategy: Strategy, operands: Sequence[Ref], types: Sequence[TensorType]
) -> dict[int, Ref]:
    """Emits an attention op, or its gradient, on one rank, and returns its results by output number.

    Args:
      node: the attention op in the program.
      body: the function of the original nodes that the op replaces.
      strategy: the node's placements; the queries are sharded along the sequence.
      operands: the operands on this rank.
      types: the types of ``operands``.
    """
    cut = strategy.inputs[0]
    assert isinstance(cut, Shard), (node.name, strategy)
    return _emit_attention(_Blocks(e, node, body, cut.sizes, list(zip(operands, types))))


def divide_attention_in_blocks(program: Program) -> Program:
    """Rewrites each attention op of a rank's program to nodes that process the queries block by block."""
    rings = [node for node in program.nodes if node.op in RINGS]
    if not rings:
        return program
    e = Emitter(0, 1, "", "blocks")
    moved: dict[Ref, Ref] = {}
    for node in program.nodes:
        if node.op not in RINGS:
            e.nodes[node.name] = node
            continue
        body = program.functions[node.attrs["body"].name]
        operands = [(moved.get(r, r), program.find_type(r)) for r in node.inputs]
        keys = require_static_shape(operands[1][1])[node.attrs["dims"][1]]
        moved |= {Ref(node.name, i): r for i, r in _emit_attention(_Blocks(e, node, body, (keys,), operands)).items()}
    bodies = {node.attrs["body"].name for node in rings}
    functions = {name: body for name, body in program.functions.items() if name not in bodies}
    return rewire(replace(program, functions=functions), e.nodes, moved)


MOST_BLOCKS, LEAST_QUERIES = 16, 64
_Tensor = tuple[Ref, TensorType]


class _Blocks:
    """Emits the nodes of one attention op, or of its gradient, in blocks.

    Attributes:
      sizes: number of keys in each rank's block; one entry if the rank has all keys.
      queries: (first query, number of queries) of each block of queries.
    """

    def __init__(self, e: Emitter, node: Node, body: Program, sizes: Sequence[int], operands: Sequence[_Tensor]):
        self.e, self.node, self.body, self.sizes = e, node, body, sizes
        self.operands = list(operands[: count_leading_operands(node)])
        self.dims: Any = node.attrs["dims"]
        self.turn: Any = node.attrs["turn"]
        self.number = 0
        # The nodes that the next block waits for. In the backward pass the first block waits for the result's gradient;
        # its scores could be computed long before, and would be kept.
        self.after: tuple[str, ...] = (operands[0 if node.op == ATTENTION else 3][0].node,)
        self.softmax = body.by_name[str(node.attrs["softmax"])]
        self.count = require_static_shape(operands[0][1])[self.dims[0]]  # of queries
        scores, most = self.softmax.outputs[0], int(node.attrs["scores_bytes"])
        # Nodes whose values may be equal in all micro-batches, so that they are computed once.
        self.alike = {ref.node for ref, _ in operands[count_leading_operands(node) :]}
        self.operands += [self.hide_constant(t) for t in operands[count_leading_operands(node) :]]
        held = scores.bytes // prod(require_static_shape(scores)[-2:]) * self.count * max(sizes)
        self.queries = _divide_queries(self.count, -(-MOST_BLOCKS * held // most) if most else 1)

    # -- simple nodes

    def run(
        self,
        op: str,
        inputs: Sequence[_Tensor],
        t: TensorType,
        attrs: Mapping[str, Any],
        waits: Sequence[str] = (),
        marks: Marks = NO_MARKS,
    ) -> _Tensor:
        """Emits a node with exactly these attributes and this result type, which runs after the nodes ``waits``."""
        self.number += 1
        name = f"{self.node.name}/{self.e.prefix}_{self.number}_{op}"
        refs = tuple(r for r, _ in inputs)
        if all(r.node in self.alike for r in refs):
            self.alike.add(name)
        elif waits:
            marks = marks.replace_marks(recomputed=True)  # so that micro-batches keep its control edges
        self.e.nodes[name] = Node(name, op, refs, tuple(waits), attrs, (t,), self.node.scope, False, marks)
        return Ref(name), t

    def add(self, op: str, inputs: Sequence[_Tensor], shape: Sequence[int], **attrs: Any) -> _Tensor:
        """Emits a node whose result has the dtype of its first operand, and this shape."""
        t = TensorType(inputs[0][1].dtype, tuple(shape))
        return self.run(op, inputs, t, {"T": DType(t.dtype), **attrs})

    def const(self, value: np.ndarray) -> _Tensor:
        self.number += 1
        ref = self.e.const(f"{self.node.name}/{self.e.prefix}_{self.number}_const", value)
        self.alike.add(ref.node)
        return ref, self.e.nodes[ref.node].outputs[0]

    def hide_constant(self, tensor: _Tensor) -> _Tensor:
        """Returns ``tensor``, behind a WhaleHold op if it is computed from constants alone.

        TensorFlow's constant folding would otherwise compute the masks of all blocks before the step, and keep them in
        memory.
        """
        waiting, found = [tensor[0].node], set[str]()
        while waiting:
            node = self.e.nodes[waiting.pop()]
            if node.stateful or not (node.inputs or node.op == "Const"):
                return tensor
            found.add(node.name)
            waiting += [r.node for r in node.inputs if r.node not in found]
        return self.run("WhaleHold", [tensor], tensor[1], {"T": DType(tensor[1].dtype)})

    def emit_elementwise(self, op: str, *inputs: _Tensor) -> _Tensor:
        """Emits an elementwise op whose operands broadcast against each other."""
        return self.add(op, inputs, np.broadcast_shapes(*(require_static_shape(t) for _, t in inputs)))

    def emit_reduction(self, op: str, source: _Tensor, axes: Sequence[int]) -> _Tensor:
        shape = [1 if i in axes else n for i, n in enumerate(require_static_shape(source[1]))]
        numbers = self.const(np.array(axes, np.int32))
        return self.add(op, (source, numbers), shape, Tidx=DType("int32"), keep_dims=True)

    def transpose(self, source: _Tensor, order: Sequence[int]) -> _Tensor:
        if list(order) == sorted(order):
            return source
        shape = require_static_shape(source[1])
        return self.add("Transpose", (source, self.const(np.array(order, np.int32))), [shape[i] for i in order],
                        Tperm=DType("int32"))  # fmt: skip

    def broadcast_over_result(self, each: _Tensor) -> _Tensor:
        """Transposes a tensor with one number per query, [.., queries, 1], so that it broadcasts over the attention's
        result.
        """
        return self.transpose(each, self.turn)

    # -- blocks

    @property
    def rank(self) -> int:
        return self.e.rank

    def find_block(self, step: int) -> int:
        """Returns the number of the block of keys and values that this rank has at ring step ``step``."""
        return (self.rank + step) % len(self.sizes)

    def slice_part(self, tensor: _Tensor, spans: Mapping[int, tuple[int, int]]) -> _Tensor:
        """Slices a tensor in the dimensions of ``spans``, dimension -> (first index, count); does nothing if all is
        covered.
        """
        ref, t = tensor
        begin, shape = np.zeros(len(t.shape or ()), np.int32), list(require_static_shape(t))
        for dim, (first, count) in spans.items():
            begin[dim], shape[dim] = first, count
        if tuple(shape) == t.shape:
            return tensor
        bounds = [self.const(x) for x in (begin, np.array(shape, np.int32))]
        out = TensorType(t.dtype, tuple(shape))
        return self.run("Slice", ((ref, t), *bounds), out, {"T": DType(t.dtype), "Index": DType("int32")}, self.after)

    def concatenate(self, parts: Sequence[_Tensor], dim: int) -> Ref:
        """Concatenates the results of all blocks of queries along dimension ``dim``."""
        if len(parts) == 1:
            return parts[0][0]
        shape = [self.count if i == dim else n for i, n in enumerate(require_static_shape(parts[0][1]))]
        axis = self.const(np.array(dim, np.int32))
        return self.add("ConcatV2", (*parts, axis), shape, Tidx=DType("int32"), N=len(parts))[0]

    def hand_on(self, what: str, step: int, tensor: _Tensor, dim: int, coming: int) -> _Tensor:
        """Sends ``tensor`` to the previous rank of the ring, and returns the tensor received from the next rank.

        Args:
          what: what is sent ("key", "value", "dkey", "dvalue"), for names and keys.
          step: the ring step.
          dim: the dimension of ``tensor`` that is sharded over the ranks.
          coming: number of the block that is received.
        """
        e, p, t = self.e, len(self.sizes), tensor[1]
        key = f"{self.node.name}/{what}_{step}"  # plans name all exchanges of the node by the part before the last "/"
        shape = tuple(self.sizes[coming] if i == dim else n for i, n in enumerate(require_static_shape(t)))
        before, behind = (self.rank - 1) % p, (self.rank + 1) % p
        attrs = {"key": f"{key}_{self.rank}to{before}", "peer": before}
        marks = Marks(ring_dim=dim)
        e.comm_op(f"{key}/send", "WhaleSend", (tensor[0],), t, attrs, (), marks)
        out = TensorType(t.dtype, shape)
        attrs = {"key": f"{key}_{behind}to{self.rank}", "peer": behind, "shape": Shape(shape)}
        ref = e.comm_op(f"{key}/recv", "WhaleRecv", (tensor[0],), t, attrs, (out,), marks)
        for one in (f"{key}/send", ref.node):
            e.nodes[one] = replace(e.nodes[one], controls=self.after)
        return ref, out

    def emit_next_block(self, step: int, key: _Tensor, value: _Tensor) -> tuple[_Tensor, _Tensor]:
        """Sends keys and values on, and returns the received ones for the next step; at the last step, the present
        ones.
        """
        if step + 1 == len(self.sizes):
            return key, value
        coming = self.find_block(step + 1)
        return (
            self.hand_on("key", step, key, self.dims[1], coming),
            self.hand_on("value", step, value, self.dims[2], coming),
        )

    def slice_side(self, i: int, block: int, span: tuple[int, int]) -> _Tensor:
        """Slices side operand ``i`` (a mask or scale of the scores) to one block of keys and one block of queries."""
        attrs: Any = self.node.attrs
        spans = {}
        tensor = self.operands[count_leading_operands(self.node) + i]
        last = len(tensor[1].shape or ()) - 1
        if attrs["keyed"][i]:
            spans[last] = sum(self.sizes[:block]), self.sizes[block]
        if attrs["queried"][i]:
            spans[last - 1] = span
        return self.slice_part(tensor, spans)

    def emit_body(self, known: Mapping[Ref, _Tensor], until: str = "") -> dict[Ref, _Tensor]:
        """Emits the nodes of the op's body for one block, up to but without the node ``until``; "" means all nodes.

        Args:
          known: tensors of the body that exist already, such as its arguments.

        Returns:
          tensor of the body -> the emitted tensor and its type.
        """
        found = dict(known)
        for node in self.body.nodes:
            if node.name == until:
                break
            if Ref(node.name) in found:
                continue
            inputs = [found[r] for r in node.inputs]
            t = TensorType(
                node.outputs[0].dtype, _find_result_shape(node, [require_static_shape(t) for _, t in inputs])
            )
            found[Ref(node.name)] = self.run(node.op, inputs, t, node.attrs, self.after, node.marks)
        return found

    def map_body_arguments(
        self, key: _Tensor, value: _Tensor, block: int, span: tuple[int, int], more: Sequence[_Tensor] = ()
    ) -> dict[Ref, _Tensor]:
        """Returns the arguments of the op's body for one block of keys and one block of queries.

        Args:
          more: arguments between the values and the side operands: the result's gradient in a backward pass.
        """
        sides = [self.slice_side(i, block, span) for i in range(len(self.operands) - count_leading_operands(self.node))]
        arguments = (self.slice_part(self.operands[0], {self.dims[0]: span}), key, value, *more, *sides)
        return {Ref(name): tensor for name, tensor in zip(self.body.inputs, arguments)}

    # -- the two directions

    def emit_local(self) -> dict[int, Ref]:
        """Emits the results if the rank has all keys: runs the body for each block of queries, and joins its
        results.
        """
        key, value = self.operands[1:3]
        forward = self.node.op == ATTENTION
        names = [str(self.node.attrs["mixed"])] if forward else self.node.attrs["gradients"]
        results: list[list[_Tensor]] = []
        for span in self.queries:
            more = [] if forward else [self.slice_part(self.operands[3], {self.dims[3]: span})]
            known = self.emit_body(self.map_body_arguments(key, value, 0, span, more))
            found = [known[Ref(str(name))] for name in names]
            if results:
                found[1:] = [self.emit_elementwise("AddV2", a, b) for a, b in zip(results[-1][1:], found[1:])]
            results.append(found)
            self.after = tuple(t[0].node for t in found)
        of_queries = self.concatenate([found[0] for found in results], self.dims[3 if forward else 0])
        return {0: of_queries, **{i: t[0] for i, t in enumerate(results[-1]) if i}}

    def emit_forward(self) -> dict[int, Ref]:
        """Emits the forward pass around the ring.

        Returns:
          {0: the attention's result, 1: the logarithm of the sum of exponentials of each query's scores}.
        """
        key, value = self.operands[1:3]
        states: list[tuple[_Tensor, _Tensor, _Tensor] | None] = [None] * len(self.queries)
        for step in range(len(self.sizes)):
            ahead = self.emit_next_block(step, key, value)
            for i, span in enumerate(self.queries):
                states[i] = self.update_softmax(
                    self.map_body_arguments(key, value, self.find_block(step), span), states[i]
                )
            key, value = ahead
        results, logs = [], []
        for largest, total, result in filter(None, states):
            results.append(self.emit_elementwise("RealDiv", result, self.broadcast_over_result(total)))
            logs.append(self.emit_elementwise("AddV2", largest, self.emit_elementwise("Log", total)))
        return {
            0: self.concatenate(results, self.dims[3]),
            1: self.concatenate(logs, len(require_static_shape(logs[0][1])) - 2),
        }

    def update_softmax(
        self, known: Mapping[Ref, _Tensor], before: tuple[_Tensor, _Tensor, _Tensor] | None
    ) -> tuple[_Tensor, _Tensor, _Tensor]:
        """Updates the running softmax of each query with one more block of keys.

        Args:
          known: arguments of the op's body for this block.
          before: the return value for the blocks so far; None at the first block.

        Returns:
          for each query: largest score, sum of exponentials, sum of exponentials times values.
        """
        softmax = self.softmax
        known = self.emit_body(known, softmax.name)
        scores = known[softmax.inputs[0]]
        axis = len(require_static_shape(scores[1])) - 1
        # A row whose scores are all minus infinity so far would yield NaN: minus infinity less itself.
        lowest = self.const(
            np.array(np.finfo(find_numpy_dtype(scores[1].dtype)).min, find_numpy_dtype(scores[1].dtype))
        )
        most = self.emit_elementwise("Maximum", self.emit_reduction("Max", scores, [axis]), lowest)
        most = most if before is None else self.emit_elementwise("Maximum", before[0], most)
        shares = self.emit_elementwise("Exp", self.emit_elementwise("Sub", scores, most))
        result = self.emit_body({**known, Ref(softmax.name): shares})[Ref(str(self.node.attrs["mixed"]))]
        total = self.emit_reduction("Sum", shares, [axis])
        if before is not None:
            scale = self.emit_elementwise("Exp", self.emit_elementwise("Sub", before[0], most))
            total = self.emit_elementwise("AddV2", self.emit_elementwise("Mul", before[1], scale), total)
            result = self.emit_elementwise(
                "AddV2", self.emit_elementwise("Mul", before[2], self.broadcast_over_result(scale)), result
            )
        self.after = (result[0].node, total[0].node)
        return most, total, result

    def emit_backward(self) -> dict[int, Ref]:
        """Emits the backward pass around the ring; returns the gradients of queries (0), keys (1) and values (2)."""
        key, value, slope, result = self.operands[1:5]
        p = len(self.sizes)
        features = self.turn.index(len(self.turn) - 1)
        # For each query, the sum of its shares' gradients, weighted by the shares, equals the sum of its result's
        # gradients, weighted by the result.
        pull = self.emit_reduction("Sum", self.emit_elementwise("Mul", slope, result), [features])
        pull = self.transpose(pull, [self.turn.index(i) for i in range(len(self.turn))])
        of_queries: list[_Tensor | None] = [None] * len(self.queries)
        own: list[_Tensor] = []  # gradients of this rank's own keys and values, from its own queries
        travelling: list[_Tensor] = []  # gradients of the present block, summed over the ranks that it has passed
        for step in range(p):
            ahead = self.emit_next_block(step, key, value)
            gained: list[_Tensor] = travelling if step else []
            for i, span in enumerate(self.queries):
                of_query, *more = self.emit_gradients(key, value, self.find_block(step), span, pull)
                of_queries[i] = self.add_tensors(of_queries[i], of_query)
                gained = [self.add_tensors(a, b) for a, b in zip(gained or (None, None), more)]
                self.after = tuple(t[0].node for t in (of_queries[i], *gained) if t is not None)
            if step == 0:
                own = gained
            else:
                # The gradients go to the rank that has the block next; after the last step to the block's own rank.
                coming = self.find_block(step + 1) if step + 1 < p else self.rank
                travelling = [
                    self.hand_on(f"d{what}", step, t, self.dims[at], coming)
                    for what, at, t in (("key", 1, gained[0]), ("value", 2, gained[1]))
                ]
            key, value = ahead
        joined = self.concatenate([t for t in of_queries if t is not None], self.dims[0])
        found = [self.emit_elementwise("AddV2", a, b) for a, b in zip(own, travelling)] if travelling else own
        return {0: joined, 1: found[0][0], 2: found[1][0]}

    def emit_gradients(
        self, key: _Tensor, value: _Tensor, block: int, span: tuple[int, int], pull: _Tensor
    ) -> tuple[_Tensor, _Tensor, _Tensor]:
        """Emits the gradients that one block of queries and one block of keys and values give each other.

        Args:
          pull: for each query, the sum of the result's gradient times the result.

        Returns:
          contributions to the gradients of (queries, keys, values).
        """
        attrs = self.node.attrs
        names = [Ref(str(n)) for n in attrs["gradients"]]
        # The nodes of the softmax's gradient, which sums over all keys; the formula with ``pull`` replaces them.
        within = [Ref(str(n)) for n in (*attrs["within"], attrs["scores"])]
        slope, log = (self.slice_part(self.operands[i], {dim: span}) for i, dim in ((3, self.dims[3]), (5, -2)))
        known = self.emit_body(self.map_body_arguments(key, value, block, span, (slope,)), self.softmax.name)
        shares = self.emit_elementwise("Exp", self.emit_elementwise("Sub", known[self.softmax.inputs[0]], log))
        known = self.emit_body({**known, Ref(self.softmax.name): shares}, within[0].node)
        less = self.emit_elementwise("Sub", known[Ref(str(attrs["slope"]))], self.slice_part(pull, {-2: span}))
        known = self.emit_body({**known, **dict.fromkeys(within, self.emit_elementwise("Mul", less, shares))})
        return known[names[0]], known[names[1]], known[names[2]]

    def add_tensors(self, a: _Tensor | None, b: _Tensor) -> _Tensor:
        return b if a is None else self.emit_elementwise("AddV2", a, b)


def _divide_queries(queries: int, wanted: int) -> list[tuple[int, int]]:
    """Divides ``queries`` queries into about ``wanted`` equal blocks, with at least 64 queries in each.

    Returns:
      (first query, number of queries) of each block.
    """
    count = max(1, min(wanted, MOST_BLOCKS, queries // LEAST_QUERIES))
    ends = [queries * i // count for i in range(count + 1)]
    return [(first, end - first) for first, end in pairwise(ends)]


def _emit_attention(blocks: _Blocks) -> dict[int, Ref]:
    if len(blocks.sizes) == 1:
        return blocks.emit_local()
    return blocks.emit_forward() if blocks.node.op == ATTENTION else blocks.emit_backward()


def remove_examples(program: Program) -> Program:
    """Removes the second operand of ring attention's receives, which only told the planner their placement."""

    def remove_example(node: Node) -> Node:
        return replace(node, inputs=node.inputs[:1]) if node.op == "WhaleRecv" and len(node.inputs) > 1 else node

    if not any(n.marks.ring_dim is not None for graph in (program, *program.functions.values()) for n in graph.nodes):
        return program
    functions = {
        name: body.replace_nodes(tuple(map(remove_example, body.nodes))) for name, body in program.functions.items()
    }
    return program.replace_nodes(tuple(map(remove_example, program.nodes)), functions=functions)


def _find_result_shape(node: Node, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of a node's result: a matrix product, an elementwise op, or a Sum or Softmax along the keys."""
    if node.op == "Const":
        return require_static_shape(node.outputs[0])
    if node.op in ("Sum", "Softmax"):
        return (*shapes[0][:-1], 1 if node.op == "Sum" else shapes[0][-1])
    words = find_product_letters(node, len(shapes[0]))
    if not words:
        return tuple(np.broadcast_shapes(*shapes))
    sizes = {c: n for word, shape in zip(words, shapes) for c, n in zip(word, shape)}
    return tuple(sizes[c] for c in words[-1])
