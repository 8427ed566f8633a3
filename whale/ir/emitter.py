"""Builds the nodes of one rank's program: local cuts, fills and reshapes, and the communication ops of whale_ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from whale.ir.layout import Partial, Shard, find_identity, local_shape
from whale.ir.marks import NO_MARKS, Marks
from whale.ir.ops import HOROVOD_ALL_REDUCE
from whale.ir.plan import Reshard
from whale.ir.program import Node, Ref, make_const
from whale.ir.values import DType, TensorType, find_numpy_dtype, require_static_shape

COMMUNICATOR = "whale/communicator"
_HOROVOD_SUM = 1  # horovod.tensorflow.Sum


@dataclass
class Emitter:
    """Collects one rank's nodes of one graph.

    Attributes:
      rank, size: coordinate on the mesh axis and its extent.
      comm: name of the communicator that the ops look up.
      prefix: of the names of added nodes; different for each axis for which the program is lowered.
    """

    rank: int
    size: int
    comm: str
    prefix: str = "whale"
    nodes: dict[str, Node] = field(default_factory=dict)
    communicates: bool = False

    def add(
        self,
        name: str,
        op: str,
        inputs: Sequence[Ref],
        attrs: dict[str, Any],
        outputs: Sequence[TensorType],
        stateful: bool = False,
        marks: Marks = NO_MARKS,
    ) -> Ref:
        """Adds a node; returns its first output."""
        self.nodes[name] = Node(name, op, tuple(inputs), (), attrs, tuple(outputs), "", stateful, marks)
        return Ref(name)

    def name_part(self, name: str, what: str) -> str:
        """Names a part of what is added as ``name``; never NAME/shape, as a node's own operands are called."""
        return f"{name}/{self.prefix}_{what}"

    def const(self, name: str, value: np.ndarray) -> Ref:
        """Adds a constant of the array's own type and shape."""
        self.nodes[name] = make_const(name, value)
        return Ref(name)

    def communicator(self) -> Ref:
        """Returns the communicator handle, the first operand of every communication op of this graph."""
        self.communicates = True
        if COMMUNICATOR not in self.nodes:
            attrs = {"communicator": self.comm, "rank": self.rank}
            self.add(COMMUNICATOR, "WhaleCommunicator", (), attrs, (TensorType("resource", ()),), stateful=True)
        return Ref(COMMUNICATOR)

    def comm_op(
        self,
        name: str,
        op: str,
        inputs: Sequence[Ref],
        t: TensorType,
        attrs: dict,
        outputs: Sequence[TensorType],
        marks: Marks = NO_MARKS,
    ) -> Ref:
        """Adds an op of ``whale_ops`` between all ranks, or those that ``attrs`` names; returns its first output."""
        attrs = {"T": DType(t.dtype), "ranks": (), **attrs}
        return self.add(name, op, (self.communicator(), *inputs), attrs, outputs, True, marks)

    # -- local forms

    def fill(self, name: str, like: Ref, t: TensorType, op: str) -> Ref:
        """Adds a tensor of the type of ``like`` that holds the identity of reduction ``op``."""
        scalar = self.const(
            self.name_part(name, "value"), np.array(find_identity(op, t.dtype), find_numpy_dtype(t.dtype))
        )
        if t.is_static:
            dims = self.const(self.name_part(name, "dims"), np.array(t.shape, np.int32))
        else:
            dims = self.add(
                self.name_part(name, "dims"),
                "Shape",
                (like,),
                {"T": DType(t.dtype), "out_type": DType("int32")},
                (TensorType("int32", (None,)),),
            )
        return self.add(name, "Fill", (dims, scalar), {"T": DType(t.dtype), "index_type": DType("int32")}, (t,))

    def multiply_by_weight(self, name: str, source: Ref, t: TensorType, weight: float) -> Ref:
        """Multiplies ``source`` by ``weight``; yields zeros where that is 0, whatever ``source`` holds."""
        if weight == 0:
            return self.fill(name, source, t, "sum")
        factor = self.const(self.name_part(name, "weight"), np.array(weight, find_numpy_dtype(t.dtype)))
        return self.add(name, "Mul", (source, factor), {"T": DType(t.dtype)}, (t,))

    def cut(self, name: str, source: Ref, t: TensorType, target: Shard) -> Ref:
        """Slices this rank's part out of a replicated tensor."""
        if target.sizes[self.rank] == target.run:
            return source
        rank_of_tensor = len(t.shape or ())
        begin, size = np.zeros(rank_of_tensor, np.int32), np.full(rank_of_tensor, -1, np.int32)
        first, end = target.find_span(self.rank)
        begin[target.dim], size[target.dim] = first, end - first
        operands = (
            source,
            self.const(self.name_part(name, "begin"), begin),
            self.const(self.name_part(name, "size"), size),
        )
        out = TensorType(t.dtype, local_shape(t.shape, target, self.rank))
        return self.add(name, "Slice", operands, {"T": DType(t.dtype), "Index": DType("int32")}, (out,))

    def pad(self, name: str, source: Ref, t: TensorType, layout: Shard, op: str) -> Ref:
        """Pads this rank's slice to a tensor of the whole shape, filled with the identity of ``op`` elsewhere."""
        paddings = np.zeros((len(t.shape or ()), 2), np.int32)
        before = layout.offset(self.rank)
        paddings[layout.dim] = before, layout.run - before - layout.sizes[self.rank]
        value = self.const(
            self.name_part(name, "value"), np.array(find_identity(op, t.dtype), find_numpy_dtype(t.dtype))
        )
        operands = (source, self.const(self.name_part(name, "paddings"), paddings), value)
        return self.add(name, "PadV2", operands, {"T": DType(t.dtype), "Tpaddings": DType("int32")}, (t,))

    def reshape(self, name: str, source: Ref, dtype: str, shape: tuple[int, ...]) -> Ref:
        """Adds a Reshape to a fully known shape."""
        operands = (source, self.const(self.name_part(name, "shape"), np.array(shape, np.int32)))
        return self.add(
            name, "Reshape", operands, {"T": DType(dtype), "Tshape": DType("int32")}, (TensorType(dtype, shape),)
        )

    def reshape_to(self, name: str, source: Ref, dtype: str, shape: tuple[int | None, ...], size: Ref | None) -> Ref:
        """Adds a Reshape to a shape of which one size may be None; it is the int32 ``size``."""
        if None not in shape or size is None:
            return self.reshape(name, source, dtype, require_static_shape(TensorType(dtype, shape)))
        sizes = [
            size if n is None else self.const(self.name_part(name, f"size_{i}"), np.array(n, np.int32))
            for i, n in enumerate(shape)
        ]
        kinds = {"T": DType("int32"), "N": len(sizes), "axis": 0}
        dims = self.add(self.name_part(name, "shape"), "Pack", sizes, kinds, (TensorType("int32", (len(sizes),)),))
        attrs = {"T": DType(dtype), "Tshape": DType("int32")}
        return self.add(name, "Reshape", (source, dims), attrs, (TensorType(dtype, shape),))

    def apply_after(self, node: Node, first: str, op: str, word: str, value: np.ndarray) -> None:
        """Adds ``node`` under the name ``first``, and in its place ``op`` applied to its result and a constant."""
        name, t = node.name, node.outputs[0]
        self.nodes[f"{name}/{first}"] = replace(node, name=f"{name}/{first}")
        both = (Ref(f"{name}/{first}"), self.const(f"{name}/{word}", value.astype(find_numpy_dtype(t.dtype))))
        self.nodes[name] = Node(name, op, both, (), {"T": DType(t.dtype)}, (t,), node.scope)

    def pick(self, name: str, source: Ref, dtype: str, at: int) -> Ref:
        """Adds a node that returns element ``at`` of a vector."""
        bounds = [
            self.const(f"{name}/{n}", np.array([v], np.int32)) for n, v in (("from", at), ("to", at + 1), ("by", 1))
        ]
        masks = {"begin_mask": 0, "end_mask": 0, "ellipsis_mask": 0, "new_axis_mask": 0, "shrink_axis_mask": 1}
        kinds = {"T": DType(dtype), "Index": DType("int32"), **masks}
        return self.add(name, "StridedSlice", (source, *bounds), kinds, (TensorType(dtype, ()),))

    # -- communication

    def all_gather(
        self, name: str, sources: Sequence[Ref], types: Sequence[TensorType], layout: Shard, key: str
    ) -> Ref:
        """Gathers slices that are split as ``layout`` to whole tensors, of these types, on every rank, in one fused op;
        returns the first result.
        """
        attrs = {"key": key, "axis": layout.dim, "sizes": layout.sizes, "N": len(sources)}
        return self.comm_op(name, "WhaleAllGather", sources, types[0], attrs, types)

    def all_reduce(self, name: str, sources: Sequence[Ref], types: Sequence[TensorType], r: Reshard, key: str) -> Ref:
        """Reduces tensors in one fused op, as ``r`` (or its group) says, and returns the first result."""
        assert isinstance(r.source, Partial), r
        op = r.source.op
        if r.backend == "horovod":
            return self._horovod_all_reduce(name, sources, types)
        attrs: dict[str, Any] = {"key": key, "reduction": op, "N": len(sources)}
        if r.wire_dtype:
            attrs["wire_dtype"] = r.wire_dtype
        return self.comm_op(name, "WhaleAllReduce", sources, types[0], attrs, types)

    def _horovod_all_reduce(self, name: str, sources: Sequence[Ref], types: Sequence[TensorType]) -> Ref:
        """Sums tensors through Horovod, whose ranks meet under the node's name."""
        self.communicates = True
        dtype = DType(types[0].dtype)
        # Horovod's op is no stateful one: where all its operands are constants (a rank without rows), TensorFlow runs
        # it while it optimises the graph, on that rank alone, and waits for the others for ever.
        first = self.add(name + "/held", "WhaleHold", sources[:1], {"T": dtype}, types[:1], stateful=True)
        attrs = {
            "T": dtype,
            "num_tensors": len(sources),
            "reduce_op": _HOROVOD_SUM,
            "prescale_factor": 1.0,
            "postscale_factor": 1.0,
            "ignore_name_scope": False,
            "process_set_id": 0,
        }
        return self.add(name, HOROVOD_ALL_REDUCE, (first, *sources[1:]), attrs, types)

    def scatter(self, name: str, source: Ref | None, t: TensorType, target: Shard, key: str) -> Ref:
        """Splits the first rank's tensor over the ranks, by an all-to-all in which only the first rank sends data.

        ``source`` is None on the other ranks, which contribute a part of size zero of another dimension.
        """
        shape = require_static_shape(t)
        work = shape + (1,) if len(shape) == 1 else shape
        other = 0 if target.dim != 0 else 1
        if source is None:
            empty = tuple(0 if d == other else n for d, n in enumerate(work))
            source = self.const(self.name_part(name, "nothing"), np.zeros(empty, find_numpy_dtype(t.dtype)))
        elif len(shape) == 1:
            source = self.reshape(self.name_part(name, "as_matrix"), source, t.dtype, work)
        sizes = (work[other],) + (0,) * (self.size - 1)
        attrs = {
            "key": key,
            "split_axis": target.dim,
            "split_sizes": target.sizes,
            "concat_axis": other,
            "concat_sizes": sizes,
        }
        mine = tuple(target.sizes[self.rank] if d == target.dim else n for d, n in enumerate(work))
        got = self.comm_op(name, "WhaleAllToAll", (source,), t, attrs, (TensorType(t.dtype, mine),))
        return self.reshape(self.name_part(name, "as_vector"), got, t.dtype, mine[:1]) if len(shape) == 1 else got

    def rows(self, name: str, source: Ref, t: TensorType, dim: int, start: int, count: int) -> Ref:
        """Slices ``count`` indices of dimension ``dim`` out of a local tensor, from ``start``."""
        begin, size = np.zeros(len(t.shape or ()), np.int32), np.full(len(t.shape or ()), -1, np.int32)
        begin[dim], size[dim] = start, count
        operands = (
            source,
            self.const(self.name_part(name, "begin"), begin),
            self.const(self.name_part(name, "size"), size),
        )
        out = TensorType(t.dtype, replace_size(t, dim, count))
        return self.add(name, "Slice", operands, {"T": DType(t.dtype), "Index": DType("int32")}, (out,))


def replace_size(t: TensorType, dim: int, size: int) -> tuple[int | None, ...]:
    """Returns the shape of ``t`` with another size of one dimension."""
    return tuple(size if d == dim else n for d, n in enumerate(t.shape or ()))
