"""Rewrites lookups of unique ids (`tf.unique`) as lookups of all ids, which can be sharded.

`tf.nn.embedding_lookup_sparse` and similar user code deduplicate the ids of a whole batch, ``once, back =
tf.unique(ids)``, and expand the rows again: ``tf.gather(tf.gather(table, once), back)``. This saves work on one device,
but is costly for a sharded table: the number of rows is known only at run time, and which of them a rank needs depends
on the whole batch. This pass reads ``tf.gather(table, ids)`` instead, and adds gradients to a table row by row, without
summing them by id first. When rows are exchanged between ranks, duplicates are removed again
(``whale.sharding_rules.embedding``).

A tensor with a row for each unique id is replaced by one with a row for every id (``spread``), or it is the sum of one
by id (``added``). The program is changed only if no node needs the unique ids afterwards.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whale.ir.marks import NO_MARKS, Marks
from whale.ir.ops import IDENTITIES
from whale.ir.program import Node, Program, Ref, prune
from whale.ir.values import DType, TensorType, find_numpy_dtype
from whale.passes.analysis.scopes import split_scope
from whale.passes.normalize.emitter import NodeEmitter
from whale.passes.normalize.folding.fold import fold

_ALONG = IDENTITIES | {"Cast", "Reshape", "EnsureShape"}
_SCALED = frozenset({"Mul", "RealDiv", "Neg"})
_SUMS = {"SparseSegmentSum": "sum", "SparseSegmentMean": "mean", "SparseSegmentSqrtN": "sqrtn"}
_SLOPES = {"SparseSegmentSumGrad": "sum", "SparseSegmentMeanGrad": "mean", "SparseSegmentSqrtNGrad": "sqrtn"}
_ADDING = frozenset({"ResourceScatterAdd", "ResourceScatterSub"})


def gather_all_ids(program: Program) -> Program:
    """Rewrites lookups of unique ids under split scopes as lookups of every id, if nothing else needs unique ids."""
    changed = program
    for node in program.nodes:
        if node.op == "Unique" and program.find_type(node.inputs[0]).is_static and _is_looked_up(program, node):
            found = _Rewriter(changed, node.name).run()
            kept = None if found is None else prune(found)
            if kept is not None and node.name not in kept.by_name:
                changed = kept
    return program if changed is program else fold(changed)


def _is_looked_up(program: Program, unique: Node) -> bool:
    """Returns True if a table under a split scope is looked up by the results of the ``Unique`` node."""
    readers = program.consumers.get(Ref(unique.name), ())
    return any(r.op == "ResourceGather" and i == 1 and split_scope(r.scope) is not None for r, i in readers)


class _Rewriter:
    """Rewrites a graph, in one pass over its nodes, so that it does not need one ``Unique`` node.

    It notes what each tensor with a row for each unique id corresponds to, in terms of all ids:

        back    index, for every id, of its row among the unique ones (second result of ``Unique``), and views of that
        spread  tensor with a row for each unique id -> tensor with a row for every id, which replaces it
        added   tensor with a row for each unique id -> tensor with a row for every id, whose sum by id it is
        moved   tensor -> its replacement, which does not need the unique ids
    """

    def __init__(self, program: Program, unique: str) -> None:
        self.program, self.unique = program, program.by_name[unique]
        self.back = {Ref(unique, 1)}  # for each id the index of its row among the unique ones, and views of that
        self.places: set[Ref] = set()  # the same, of a second Unique over the unique ids
        self.spread: dict[Ref, Ref] = {Ref(unique): self.unique.inputs[0]}
        self.added: dict[Ref, Ref] = {}
        self.moved: dict[Ref, Ref] = {}  # a tensor -> its replacement, which does not need the unique ids
        self.nodes: dict[str, Node] = {}
        self.taken = set(program.by_name)
        self.done = False

    def run(self) -> Program | None:
        """Returns the rewritten graph, still with nodes that are no longer needed; None if nothing was replaced."""
        for node in self.program.nodes:
            self.nodes.setdefault(node.name, self._move(node))
            self._visit(node)
        if not self.done:
            return None
        nodes = tuple(self.nodes.values())
        outputs = tuple(self.moved.get(r, r) for r in self.program.outputs)
        return self.program.replace_nodes(nodes, outputs=outputs)

    def _move(self, node: Node) -> Node:
        if not any(r in self.moved for r in node.inputs):
            return node
        return replace(node, inputs=tuple(self.moved.get(r, r) for r in node.inputs))

    def _type(self, ref: Ref) -> TensorType:
        return self.nodes[ref.node].outputs[ref.index]

    def _emit_beside(self, node: Node) -> NodeEmitter:
        return NodeEmitter(self.program, node, self.nodes, self.taken)

    def _visit(self, node: Node) -> None:
        first = node.inputs[0] if node.inputs else None
        if node.op in _ALONG and first is not None:
            self._along(node, first)
        elif node.op == "ResourceGather" and node.inputs[1] in self.spread and not node.attrs.get("batch_dims", 0):
            self._read(node, self.spread[node.inputs[1]])
        elif node.op == "GatherV2" and first in self.spread and node.inputs[1] in self.back:
            axis = self.program.const(node.inputs[2])
            if axis is not None and int(axis) == 0 and not node.attrs.get("batch_dims", 0):
                self._becomes(node, self.spread[first])
        elif node.op in _SUMS and first in self.spread and node.inputs[1] in self.back:
            self._segments(node, self.spread[first])
        elif node.op in _SLOPES and node.inputs[1] in self.back:
            self._slopes(node)
        elif node.op == "UnsortedSegmentSum" and node.inputs[1] in self.back and first is not None:
            self.added[Ref(node.name)] = self.moved.get(first, first)
        elif node.op == "Unique" and first in self.spread and first is not None:
            # Optimizers take the unique ids of unique ids: those of all ids are the same.
            ids = self.spread[first]
            places = TensorType(node.outputs[1].dtype, self._type(ids).shape)
            self.nodes[node.name] = replace(node, inputs=(ids,), outputs=(node.outputs[0], places))
            self.places.add(Ref(node.name, 1))
        elif node.op == "UnsortedSegmentSum" and node.inputs[1] in self.places and first in self.added:
            numbers = self.moved.get(node.inputs[1], node.inputs[1])
            self.nodes[node.name] = replace(node, inputs=(self.added[first], numbers, node.inputs[2]))
            self.done = True
        elif node.op in _SCALED:
            self._scale(node)
        elif node.op in _ADDING and node.inputs[1] in self.spread and node.inputs[2] in self.added:
            inputs = (node.inputs[0], self.spread[node.inputs[1]], self.added[node.inputs[2]])
            self.nodes[node.name] = replace(node, inputs=inputs)
            self.done = True

    def _becomes(self, node: Node, ref: Ref) -> None:
        self.moved[Ref(node.name)] = ref
        self.done = True

    def _read(self, node: Node, ids: Ref) -> None:
        """Makes a lookup read a row for every id. The node keeps its name, since updates of the table wait for it by
        that name.
        """
        t = node.outputs[0]
        found = TensorType(t.dtype, (*(self._type(ids).shape or ()), *(t.shape or ())[1:]))
        self.nodes[node.name] = replace(node, inputs=(node.inputs[0], ids), outputs=(found,))
        self.spread[Ref(node.name)] = Ref(node.name)

    def _along(self, node: Node, first: Ref) -> None:
        """Follows rows through a node that passes them on unchanged (Identity, Cast, Reshape); a reshape must keep rows
        as dimension 0.

        Args:
          first: the node's first operand, whose rows are followed.
        """
        before, after = self.program.find_type(first), node.outputs[0]
        if first in self.back:
            if node.op != "Cast" and after.shape == before.shape:
                self.back.add(Ref(node.name))
            return
        for known in (self.spread, self.added):
            if first not in known or before.shape is None or after.shape is None:
                continue
            if len(before.shape) != len(after.shape) or before.shape[1:] != after.shape[1:] or None in after.shape[1:]:
                continue
            source = known[first]
            if node.op == "Cast":
                t = TensorType(after.dtype, self._type(source).shape)
                source = self._emit_beside(node).node_of(
                    "of_every_id", "Cast", (source,), t, dict(node.attrs), node.marks
                )
            known[Ref(node.name)] = source

    def _scale(self, node: Node) -> None:
        """Scales rows before they are summed by id, not afterwards, if a node multiplies such sums by a scalar."""
        for i, ref in enumerate(node.inputs):
            others = [self.program.find_type(r) for j, r in enumerate(node.inputs) if j != i]
            if ref not in self.added or any(t.shape != () for t in others) or (node.op == "RealDiv" and i):
                continue
            inputs = tuple(self.added[ref] if j == i else self.moved.get(r, r) for j, r in enumerate(node.inputs))
            t = self._type(self.added[ref])
            self.added[Ref(node.name)] = self._emit_beside(node).node_of(
                "of_every_id", node.op, inputs, t, dict(node.attrs), node.marks
            )

    def _segments_of(self, node: Node) -> tuple[np.ndarray, int, int] | None:
        """Returns (segment number of each row, number of segments, rows per segment) if they are known and all segments
        are equally long runs of rows; else None.
        """
        found = self.program.const(node.inputs[2])
        if found is None or not found.size or (np.diff(found) < 0).any() or found[0] != 0:
            return None
        counts = np.bincount(found)
        return (found.astype(np.int64), len(counts), int(counts[0])) if (counts == counts[0]).all() else None

    def _segments(self, node: Node, rows: Ref) -> None:
        """Replaces a sparse segment sum (or mean) over unique rows by a sum over consecutive rows of all ids.

        Args:
          node: the segment sum.
          rows: the tensor with a row for every id that replaces its operand.
        """
        known = self._segments_of(node)
        if known is None:
            return
        numbers, count, each = known
        t, emit = node.outputs[0], self._emit_beside(node)
        found = TensorType(t.dtype, (count, *(t.shape or ())[1:]))
        operands = (rows, emit.const("segments", numbers), emit.const("count", np.array(count, np.int32)))
        kinds = {"T": DType(t.dtype), "Tindices": DType("int64"), "Tnumsegments": DType("int32")}
        summed = emit.node_of("sums", "UnsortedSegmentSum", operands, found, kinds, _blocks(count))
        self._becomes(node, _divide(emit, summed, found, _SUMS[node.op], each))

    def _slopes(self, node: Node) -> None:
        """Replaces the gradient of a sparse segment sum: each row gets the gradient of its segment."""
        known = self._segments_of(node)
        slope = self.moved.get(node.inputs[0], node.inputs[0])
        t, emit = self._type(slope), self._emit_beside(node)
        if known is None or t.shape is None or t.shape[0] not in (None, known[1]):
            return
        numbers, count, each = known
        found = TensorType(t.dtype, (len(numbers), *t.shape[1:]))
        kinds = {"Tparams": DType(t.dtype), "Tindices": DType("int64")}
        operands = (slope, emit.const("segments", numbers[:, None]))
        rows = emit.node_of("rows", "GatherNd", operands, found, kinds, _blocks(count))
        self.added[Ref(node.name)] = _divide(emit, rows, found, _SLOPES[node.op], each)


def _divide(emit: NodeEmitter, ref: Ref, t: TensorType, combined: str, each: int) -> Ref:
    if combined == "sum" or each == 1:
        return ref
    by = emit.const("by", np.array(each if combined == "mean" else np.sqrt(each), find_numpy_dtype(t.dtype)))
    return emit.node_of("divided", "RealDiv", (ref, by), t, {"T": DType(t.dtype)})


def _blocks(count: int) -> Marks:
    """Returns the mark that indices stay within ``count`` blocks; no mark if there is only one."""
    return Marks(blocks=count) if count > 1 else NO_MARKS
