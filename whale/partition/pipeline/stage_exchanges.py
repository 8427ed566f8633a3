"""Emits the sends and receives between one rank of a stage group and the ranks of other groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from whale.ir.crossing import Part, Span, split_dim_in_runs
from whale.ir.emitter import COMMUNICATOR, Emitter
from whale.ir.layout import Shard, shard
from whale.ir.marks import NO_MARKS, Marks
from whale.ir.plan import STAGE_INPUT, STAGE_OUTPUT
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Shape, TensorType, find_numpy_dtype, require_static_shape
from whale.partition.pipeline.stages import Stages
from whale.partition.spmd import list_unread_communication


def connect_stages(
    stages: Stages, program: Program, rank: int, comm: str, rows: Mapping[Ref, Shard], check: tuple[str, str]
) -> Program:
    """Replaces the inputs and outputs of a stage group's program, on one rank, by receives and sends.

    Args:
      program: the group's part of the program, lowered for ``rank``.
      comm: name of the communicator.
      rows: tensor that is sent for each micro-batch -> how micro-batches cut this rank's part of it.
      check: (fingerprint, description of the program), which all ranks compare.
    """
    return _Connector(stages, program, rank, comm, rows).run(check)


class _Connector:
    def __init__(self, stages: Stages, program: Program, rank: int, comm: str, rows: Mapping[Ref, Shard]):
        self.stages, self.program, self.rank, self.comm = stages, program, rank, comm
        self.number, _ = stages.locate(rank)
        self.position = stages.meshes[self.number].ranks.index(rank)
        self.rows = {str(ref): by for ref, by in rows.items()}
        self.emitter = Emitter(self.position, len(stages.meshes[self.number].ranks), comm)
        self.nodes = self.emitter.nodes
        self.effects: list[str] = []

    def run(self, check: tuple[str, str]) -> Program:
        attrs = {"communicator": self.comm, "rank": self.rank}
        self.nodes[COMMUNICATOR] = Node(
            COMMUNICATOR, "WhaleCommunicator", (), (), attrs, (TensorType("resource", ()),), "", True
        )
        moved: dict[Ref, Ref] = {}
        for node in self.program.nodes:
            if node.op == STAGE_INPUT:
                moved.update(self._receive(node))
            elif node.op == STAGE_OUTPUT:
                self._send(node)
            elif node.name != COMMUNICATOR:
                self.nodes[node.name] = node
        if moved:
            for name, node in self.nodes.items():
                if any(r in moved for r in node.inputs):
                    self.nodes[name] = replace(node, inputs=tuple(moved.get(r, r) for r in node.inputs))
        said = {"key": "whale/check", "fingerprint": check[0], "what": check[1], "ranks": ()}
        self._add("whale/check", "WhaleCheck", (Ref(COMMUNICATOR),), said, ())
        outputs = tuple(moved.get(r, r) for r in self.program.outputs)
        effects = [n for n in self.program.effects if n in self.nodes] + self.effects
        effects += list_unread_communication(self.nodes, [r.node for r in outputs] + effects)
        return self.program.replace_nodes(
            tuple(self.nodes.values()), outputs=outputs, effects=tuple(dict.fromkeys(effects))
        )

    def _add(
        self,
        name: str,
        op: str,
        inputs: tuple[Ref, ...],
        attrs: dict,
        outputs: tuple[TensorType, ...],
        marks: Marks = NO_MARKS,
    ) -> None:
        self.nodes[name] = Node(name, op, inputs, (), attrs, outputs, "", True, marks)
        self.effects.append(name)

    def _receive(self, node: Node) -> dict[Ref, Ref]:
        """Emits receives for the outputs of a stage input node; returns output of the node -> received tensor."""
        found = {}
        source, travelling = int(node.attrs["source"]), self.stages.cuts[self.number].keys
        for index, key in enumerate(node.attrs["keys"]):
            if key not in travelling:
                continue
            name = node.name if index == 0 else f"{node.name}/whale_output_{index}"
            mine = self.stages.list_parts_for(key, source, self.number, self.position)
            t = node.outputs[index]
            pieces = [self._emit_piece(name, t, key, source, part, len(mine) == 1) for part in mine]
            found[Ref(node.name, index)] = self._join_pieces(name, t, key, source, mine, pieces)
        return found

    def _emit_piece(self, name: str, own: TensorType, key: str, source: int, part: Part, alone: bool) -> Ref:
        t = own if part.spans is None else TensorType(own.dtype, tuple(s.size for s in part.spans))
        name = name if alone else f"{name}/from_{part.sender}"
        peer = self.stages.meshes[source].ranks[part.sender]
        attrs = {
            "T": DType(t.dtype), "ranks": (), "key": self._make_key(key, source, self.number, part), "peer": peer,
            "shape": Shape(t.shape),
        }  # fmt: skip
        marks = self._make_marks(key, t, part, (source, self.number))
        self._add(name, "WhaleRecv", (Ref(COMMUNICATOR),), attrs, (t,), marks)
        return Ref(name)

    def _join_pieces(
        self, name: str, t: TensorType, key: str, source: int, parts: Sequence[Part], pieces: Sequence[Ref]
    ) -> Ref:
        """Joins the parts of a tensor that several ranks sent; yields an empty tensor if this rank gets nothing."""
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            nothing = self.emitter.const(name, np.zeros(require_static_shape(t), find_numpy_dtype(t.dtype)))
            cut = self._find_rows(key, t, self.stages.is_direct(source, self.number)) if key in self.rows else None
            if cut is not None and cut.extent:  # so that each micro-batch takes its part of the empty tensor
                self.nodes[name] = self.nodes[name].with_marks(micro_batch_rows=str(cut))
            return nothing
        block = self.stages.find_block(key, source, self.number, self.position)
        return self._join_along(name, t.dtype, [(p.spans or (), ref) for p, ref in zip(parts, pieces)], block, 0)

    def _join_along(
        self, name: str, dtype: str, pieces: list[tuple[tuple[Span, ...], Ref]], block: tuple[Span, ...], dim: int
    ) -> Ref:
        """Joins the received pieces of a block: groups them by their span in dimension ``dim``, joins each group along
        the following dimensions, and concatenates the groups along ``dim``.

        Args:
          pieces: (spans, tensor) of each piece; all spans of dimensions before ``dim`` are equal.
          block: the whole block.
        """
        if len(pieces) == 1:
            return pieces[0][1]
        groups: dict[Span, list[tuple[tuple[Span, ...], Ref]]] = {}
        for spans, ref in pieces:
            groups.setdefault(spans[dim], []).append((spans, ref))
        inner = [self._join_along(f"{name}/at_{s.first}", dtype, group, block, dim + 1) for s, group in groups.items()]
        if len(inner) == 1:
            return inner[0]
        return self._concatenate(name, dtype, inner, dim, next(iter(groups)).blocks)

    def _concatenate(self, name: str, dtype: str, refs: Sequence[Ref], dim: int, blocks: int) -> Ref:
        """Concatenates tensors along dimension ``dim``, run by run if it consists of several (``blocks``) runs."""
        e = self.emitter
        shapes = [require_static_shape(self.nodes[r.node].outputs[r.index]) for r in refs]
        whole = (*shapes[0][:dim], sum(s[dim] for s in shapes), *shapes[0][dim + 1 :])
        axis, joined = dim, whole
        if blocks > 1:
            refs = [
                e.reshape(f"{name}/runs_{i}", ref, dtype, split_dim_in_runs(s, dim, blocks))
                for i, (ref, s) in enumerate(zip(refs, shapes))
            ]
            axis, joined = dim + 1, split_dim_in_runs(whole, dim, blocks)
        runs = name if blocks == 1 else f"{name}/joined"
        operands = (*refs, e.const(f"{name}/axis", np.array(axis, np.int32)))
        attrs = {"T": DType(dtype), "Tidx": DType("int32"), "N": len(refs)}
        found = e.add(runs, "ConcatV2", operands, attrs, (TensorType(dtype, joined),))
        return found if blocks == 1 else e.reshape(name, found, dtype, whole)

    def _send(self, node: Node) -> None:
        target, key = int(node.attrs["target"]), str(node.attrs["key"])
        (source,) = node.inputs
        whole = self.program.find_type(source)
        for part in self.stages.list_parts_from(key, self.number, target, self.position):
            name = node.name if part.spans is None else f"{node.name}/{part.receiver}"
            value = self._emit_cut(name, source, whole, part) if part.cut else source
            t = self.nodes[value.node].outputs[value.index] if part.cut else whole
            attrs = {
                "T": DType(t.dtype), "ranks": (), "key": self._make_key(key, self.number, target, part),
                "peer": self.stages.meshes[target].ranks[part.receiver],
            }  # fmt: skip
            marks = self._make_marks(key, t, part, (self.number, target))
            self._add(f"{name}/sent", "WhaleSend", (Ref(COMMUNICATOR), value), attrs, (), marks)

    def _emit_cut(self, name: str, source: Ref, t: TensorType, part: Part) -> Ref:
        """Emits the slice of this rank's tensor that one receiving rank gets."""
        e, shape, dtype = self.emitter, require_static_shape(t), t.dtype
        for dim, blocks, first, count in part.cut:
            at = f"{name}/along_{dim}"
            if blocks == 1:
                source = e.rows(f"{at}/part", source, TensorType(dtype, shape), dim, first, count)
                shape = (*shape[:dim], count, *shape[dim + 1 :])
                continue
            runs = split_dim_in_runs(shape, dim, blocks)
            view = e.reshape(f"{at}/runs", source, dtype, runs)
            found = e.rows(f"{at}/rows", view, TensorType(dtype, runs), dim + 1, first, count)
            shape = (*shape[:dim], blocks * count, *shape[dim + 1 :])
            source = e.reshape(f"{at}/part", found, dtype, shape)
        return source

    def _make_key(self, key: str, source: int, target: int, part: Part) -> str:
        ends = part.sender if part.sender == part.receiver else f"{part.sender}to{part.receiver}"
        return f"{key}@{source}to{target}/{ends}"

    def _make_marks(self, key: str, t: TensorType, part: Part, edge: tuple[int, int]) -> Marks:
        """Returns the marks of a send or receive: how micro-batches cut its tensor, and between which groups it
        goes.
        """
        if key not in self.rows:
            return NO_MARKS
        return Marks(micro_batch_rows=str(self._find_rows(key, t, part.spans is None)), edge=edge)

    def _find_rows(self, key: str, t: TensorType, direct: bool) -> Shard:
        """Returns how micro-batches cut the part of a tensor that this rank sends or receives.

        Args:
          key: name of the tensor.
          t: type of the part.
          direct: True if the part is all that the sender holds. It is then cut as the tensor is, if all groups have the
            same plan; otherwise the part is cut evenly.
        """
        cut = self.rows[key]
        if direct and not self.stages.plan.others:
            return cut
        micro_batches = self.stages.plan.micro_batches  # ``cut`` has the sizes of another mesh
        n = require_static_shape(t)[cut.dim] // (micro_batches * cut.blocks)
        return shard(cut.dim, (n,) * micro_batches, cut.blocks)
