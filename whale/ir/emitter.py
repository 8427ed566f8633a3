"""Builds the nodes of one rank's program: local slices, fills and reshapes, and the communication ops of whale_ops."""

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
    """Collects the nodes that lowering adds to one graph of one rank's program.

    ``whale.partition`` creates one emitter per graph and rank; its methods add nodes and return references to their
    outputs.

    Attributes:
      rank: the rank's coordinate on the mesh axis that is being lowered.
      size: number of coordinates of that axis.
      comm: name of the communicator that the communication ops look up at run time.
      prefix: start of the names of added nodes; different for each mesh axis, so that names stay unique.
      nodes: the nodes of the graph by name, in the order in which they were added.
      communicates: True once a communication op was added.
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
        """Adds a node and returns a reference to its first output."""
        self.nodes[name] = Node(name, op, tuple(inputs), (), attrs, tuple(outputs), "", stateful, marks)
        return Ref(name)

    def name_part(self, name: str, what: str) -> str:
        """Returns a name for a helper node of the node ``name``: ``NAME/PREFIX_what``.

        The prefix keeps the helper apart from nodes of the user's program, which may themselves be called
        ``NAME/shape``.
        """
        return f"{name}/{self.prefix}_{what}"

    def const(self, name: str, value: np.ndarray) -> Ref:
        """Adds a Const node with the dtype and shape of ``value`` and returns a reference to it."""
        self.nodes[name] = make_const(name, value)
        return Ref(name)

    def communicator(self) -> Ref:
        """Returns the handle of the communicator, which every communication op takes first; adds its node at the first
        call.
        """
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
        """Adds a communication op of whale_ops, and returns a reference to its first output.

        Args:
          inputs: the operands, without the communicator handle.
          t: type of the tensor that is sent, for the attribute ``T``.
          attrs: further attributes; all ranks of the communicator take part unless ``attrs["ranks"]`` names some.
        """
        attrs = {"T": DType(t.dtype), "ranks": (), **attrs}
        return self.add(name, op, (self.communicator(), *inputs), attrs, outputs, True, marks)

    # -- local forms

    def fill(self, name: str, like: Ref, t: TensorType, op: str) -> Ref:
        """Adds a Fill of the shape and dtype of ``like``, with the identity element of the reduction ``op`` (0 for
        "sum").

        A rank that contributes nothing to a partial result holds such a tensor.

        Args:
          t: the type of ``like``; if sizes are unknown, the shape is read from ``like`` at run time.
        """
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
        """Adds a product of ``source`` and the constant ``weight``.

        For a weight of 0 it adds zeros instead, since 0 times an infinite or NaN ``source`` would be NaN.
        """
        if weight == 0:
            return self.fill(name, source, t, "sum")
        factor = self.const(self.name_part(name, "weight"), np.array(weight, find_numpy_dtype(t.dtype)))
        return self.add(name, "Mul", (source, factor), {"T": DType(t.dtype)}, (t,))

    def cut(self, name: str, source: Ref, t: TensorType, target: Shard) -> Ref:
        """Slices this rank's shard out of a replicated tensor; returns ``source`` itself if the shard is the whole
        tensor.
        """
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
        """Pads this rank's shard to the global shape, with the identity element of the reduction ``op`` outside of the
        shard.

        The result is the rank's contribution to a partial tensor (``S -> P``), which needs no communication.
        """
        paddings = np.zeros((len(t.shape or ()), 2), np.int32)
        before = layout.offset(self.rank)
        paddings[layout.dim] = before, layout.run - before - layout.sizes[self.rank]
        value = self.const(
            self.name_part(name, "value"), np.array(find_identity(op, t.dtype), find_numpy_dtype(t.dtype))
        )
        operands = (source, self.const(self.name_part(name, "paddings"), paddings), value)
        return self.add(name, "PadV2", operands, {"T": DType(t.dtype), "Tpaddings": DType("int32")}, (t,))

    def reshape(self, name: str, source: Ref, dtype: str, shape: tuple[int, ...]) -> Ref:
        """Adds a Reshape to a shape whose sizes are all known."""
        operands = (source, self.const(self.name_part(name, "shape"), np.array(shape, np.int32)))
        return self.add(
            name, "Reshape", operands, {"T": DType(dtype), "Tshape": DType("int32")}, (TensorType(dtype, shape),)
        )

    def reshape_to(self, name: str, source: Ref, dtype: str, shape: tuple[int | None, ...], size: Ref | None) -> Ref:
        """Adds a Reshape to a shape with at most one unknown size, given by None and computed at run time by ``size``
        (int32).
        """
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
        """Renames ``node`` to ``NAME/first`` and puts the binary op ``op``, of its result and a constant, under its old
        name.

        Readers of ``node`` thus read the changed result. A mean over a sharded dimension uses this: a sum, then a
        division.

        Args:
          first: suffix of the name that ``node`` gets.
          op: the op type applied afterwards, such as ``RealDiv``.
          word: suffix of the constant's name.
          value: the constant, cast to the dtype of the result.
        """
        name, t = node.name, node.outputs[0]
        self.nodes[f"{name}/{first}"] = replace(node, name=f"{name}/{first}")
        both = (Ref(f"{name}/{first}"), self.const(f"{name}/{word}", value.astype(find_numpy_dtype(t.dtype))))
        self.nodes[name] = Node(name, op, both, (), {"T": DType(t.dtype)}, (t,), node.scope)

    def pick(self, name: str, source: Ref, dtype: str, at: int) -> Ref:
        """Adds a StridedSlice that returns element ``at`` of the vector ``source`` as a scalar."""
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
        """Adds one fused all-gather of several shards with the same split, and returns the first gathered tensor.

        Args:
          sources: this rank's shards.
          types: the global types of the gathered tensors.
          layout: how the tensors are sharded.
          key: name of the operation, equal on all ranks.
        """
        attrs = {"key": key, "axis": layout.dim, "sizes": layout.sizes, "N": len(sources)}
        return self.comm_op(name, "WhaleAllGather", sources, types[0], attrs, types)

    def all_reduce(self, name: str, sources: Sequence[Ref], types: Sequence[TensorType], r: Reshard, key: str) -> Ref:
        """Adds one fused all-reduce of several partial tensors, and returns the first reduced tensor.

        Args:
          r: the reshard, or the first of a fused group, that says which reduction, backend and wire dtype to use.
          key: name of the operation, equal on all ranks.
        """
        assert isinstance(r.source, Partial), r
        op = r.source.op
        if r.backend == "horovod":
            return self._horovod_all_reduce(name, sources, types)
        attrs: dict[str, Any] = {"key": key, "reduction": op, "N": len(sources)}
        if r.wire_dtype:
            attrs["wire_dtype"] = r.wire_dtype
        return self.comm_op(name, "WhaleAllReduce", sources, types[0], attrs, types)

    def _horovod_all_reduce(self, name: str, sources: Sequence[Ref], types: Sequence[TensorType]) -> Ref:
        """Adds Horovod's grouped all-reduce (sum); Horovod matches the ranks' operations by the name of this node."""
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
        """Scatters a tensor of the first rank over all ranks, with an all-to-all in which only the first rank has data.

        Args:
          source: the tensor on the first rank; None on other ranks, which contribute an empty tensor.
          t: the tensor's global type.
          target: the shards to make.
          key: name of the operation, equal on all ranks.
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
        """Slices ``count`` indices of dimension ``dim``, from index ``start`` on, out of a local tensor."""
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
    """Returns the shape of ``t`` with the size of dimension ``dim`` replaced by ``size``."""
    return tuple(size if d == dim else n for d, n in enumerate(t.shape or ()))
