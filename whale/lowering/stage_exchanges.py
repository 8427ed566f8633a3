"""What one rank of a stage group sends to and receives from the ranks of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from whale.ir.crossing import Crossing, Part, in_runs_of, parts
from whale.ir.layout import Split, split
from whale.ir.ops import EXCHANGES
from whale.ir.plan import STAGE_INPUT, STAGE_OUTPUT, StageGroup
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Shape, TensorType, numpy_dtype, static_shape
from whale.lowering.emit import COMMUNICATOR, Emitter, unread_communication
from whale.rules.structure.communication import EDGE, ROWS


class Connector:
    """Puts sends and receives in the place of the ends of a stage group's program on one rank.

    Args:
      program: the group's program, lowered for ``coordinate``.
      groups: all stage groups; ``number`` is this one's.
      found: how each tensor travels.
      rows: what travels for each micro-batch: key -> how these cut the part that a coordinate has.
      micro_batches: their number.
    """

    def __init__(
        self,
        program: Program,
        groups: Sequence[StageGroup],
        number: int,
        coordinate: int,
        comm: str,
        found: Mapping[tuple[str, int, int], Crossing],
        rows: Mapping[str, Split],
        micro_batches: int,
    ):
        self.program, self.groups, self.number, self.coordinate = program, groups, number, coordinate
        self.found, self.rows, self.micro_batches = found, rows, micro_batches
        self.emitter = Emitter(coordinate, len(groups[number].ranks), comm)
        self.nodes = self.emitter.nodes
        self.effects: list[str] = []

    def run(self, check: tuple[str, str] | None) -> Program:
        """The rank's program.

        Args:
          check: (fingerprint, what a person would call this run), which all ranks compare; None: they do not.
        """
        rank = self.groups[self.number].ranks[self.coordinate]
        self.nodes[COMMUNICATOR] = Node(
            COMMUNICATOR, "WhaleCommunicator", (), (), {"communicator": self.emitter.comm, "rank": rank},
            (TensorType("resource", ()),), "", True,
        )  # fmt: skip
        moved: dict[Ref, Ref] = {}
        for node in self.program.nodes:
            if node.op == STAGE_INPUT:
                moved.update(self._receive(node))
            elif node.op == STAGE_OUTPUT:
                self._send(node)
            elif node.name != COMMUNICATOR:
                self.nodes[node.name] = self._of_place(node) if node.op in EXCHANGES else node
        if moved:
            for name, node in self.nodes.items():
                if any(r in moved for r in node.inputs):
                    self.nodes[name] = replace(node, inputs=tuple(moved.get(r, r) for r in node.inputs))
        if check is not None:
            attrs = {"key": "whale/check", "fingerprint": check[0], "what": check[1], "ranks": ()}
            self._add("whale/check", "WhaleCheck", (Ref(COMMUNICATOR),), attrs, ())
        outputs = tuple(moved.get(r, r) for r in self.program.outputs)
        effects = [n for n in self.program.effects if n in self.nodes] + self.effects
        effects += unread_communication(self.nodes, [r.node for r in outputs] + effects)
        return self.program.with_nodes(
            tuple(self.nodes.values()), outputs=outputs, effects=tuple(dict.fromkeys(effects))
        )

    def _add(self, name: str, op: str, inputs: tuple[Ref, ...], attrs: dict, outputs: tuple[TensorType, ...]) -> None:
        self.nodes[name] = Node(name, op, inputs, (), attrs, outputs, "", True)
        self.effects.append(name)

    def _receive(self, node: Node) -> dict[Ref, Ref]:
        """Receives each output that is read; output -> where it is now."""
        found = {}
        for index, key in enumerate(node.attrs["keys"]):
            source = int(node.attrs["source"])
            crossing = self.found.get((key, source, self.number))
            if crossing is None:
                continue
            name = node.name if index == 0 else f"{node.name}/whale_output_{index}"
            ends = len(self.groups[source].ranks), len(self.groups[self.number].ranks)
            mine = [part for part in parts(crossing, *ends) if part.receiver == self.coordinate]
            t = node.outputs[index]
            pieces = [self._piece(name, t, key, source, part, crossing.direct, len(mine) == 1) for part in mine]
            found[Ref(node.name, index)] = self._joined(name, t, crossing, pieces)
        return found

    def _piece(self, name: str, whole: TensorType, key: str, source: int, part: Part, direct: bool, alone: bool) -> Ref:
        t = TensorType(whole.dtype, part.shape(whole.shape))
        name = name if alone else f"{name}/from_{part.sender}"
        attrs = {
            "T": DType(t.dtype), "ranks": (), "key": self._key(key, source, self.number, part),
            "peer": self.groups[source].ranks[part.sender], "shape": Shape(t.shape),
        }  # fmt: skip
        self._add(
            name, "WhaleRecv", (Ref(COMMUNICATOR),), self._marked(attrs, key, t, direct, (source, self.number)), (t,)
        )
        return Ref(name)

    def _joined(self, name: str, t: TensorType, crossing: Crossing, pieces: list[Ref]) -> Ref:
        """The parts of a tensor that several coordinates sent, one behind the other in each run."""
        if len(pieces) == 1:
            return pieces[0]
        e, shape = self.emitter, static_shape(t)
        if not pieces:
            return e.const(name, np.zeros(shape, numpy_dtype(t.dtype)))
        cut = crossing.sent
        assert isinstance(cut, Split)
        axis = cut.dim + (cut.blocks > 1)
        if cut.blocks > 1:
            pieces = [
                e.reshape(f"{ref.node}/runs", ref, t.dtype, in_runs_of(self._shape_of(ref), cut.dim, cut.blocks))
                for ref in pieces
            ]
        joined = in_runs_of(shape, cut.dim, cut.blocks) if cut.blocks > 1 else shape
        operands = (*pieces, e.const(name + "/axis", np.array(axis, np.int32)))
        attrs = {"T": DType(t.dtype), "Tidx": DType("int32"), "N": len(pieces)}
        runs = name if cut.blocks == 1 else f"{name}/joined"
        found = e.add(runs, "ConcatV2", operands, attrs, (TensorType(t.dtype, joined),))
        return found if cut.blocks == 1 else e.reshape(name, found, t.dtype, shape)

    def _shape_of(self, ref: Ref) -> tuple[int, ...]:
        return static_shape(self.nodes[ref.node].outputs[ref.index])

    def _send(self, node: Node) -> None:
        target, key = int(node.attrs["target"]), str(node.attrs["key"])
        (source,) = node.inputs
        whole = self.program.type_of(source)
        ends = len(self.groups[self.number].ranks), len(self.groups[target].ranks)
        crossing = self.found[key, self.number, target]
        for part in parts(crossing, *ends):
            if part.sender != self.coordinate:
                continue
            name = node.name if crossing.direct else f"{node.name}/{part.receiver}"
            value = self._cut(name, source, whole, part) if part.cut else source
            t = self.nodes[value.node].outputs[value.index] if part.cut else whole
            attrs = {
                "T": DType(t.dtype), "ranks": (), "key": self._key(key, self.number, target, part),
                "peer": self.groups[target].ranks[part.receiver],
            }  # fmt: skip
            marked = self._marked(attrs, key, t, crossing.direct, (self.number, target))
            self._add(f"{name}/sent", "WhaleSend", (Ref(COMMUNICATOR), value), marked, ())

    def _cut(self, name: str, source: Ref, t: TensorType, part: Part) -> Ref:
        """What one coordinate gets of the tensor that this one has."""
        e, shape = self.emitter, static_shape(t)
        first, count = part.first, part.count
        if part.blocks == 1:
            return e.rows(f"{name}/part", source, t, part.dim, first, count)
        runs = in_runs_of(shape, part.dim, part.blocks)
        view = e.reshape(f"{name}/runs", source, t.dtype, runs)
        found = e.rows(f"{name}/rows", view, TensorType(t.dtype, runs), part.dim + 1, first, count)
        return e.reshape(
            f"{name}/part", found, t.dtype, (*shape[: part.dim], part.blocks * count, *shape[part.dim + 1 :])
        )

    def _key(self, key: str, source: int, target: int, part: Part) -> str:
        ends = part.sender if part.sender == part.receiver else f"{part.sender}to{part.receiver}"
        return f"{key}@{source}to{target}/{ends}"

    def _marked(self, attrs: dict, key: str, t: TensorType, direct: bool, edge: tuple[int, int]) -> dict:
        if key not in self.rows:
            return attrs
        cut = self.rows[key]
        if not direct:
            n = static_shape(t)[cut.dim] // (self.micro_batches * cut.blocks)
            cut = split(cut.dim, (n,) * self.micro_batches, cut.blocks)
        return {**attrs, ROWS: str(cut), EDGE: edge}

    def _of_place(self, node: Node) -> Node:
        """A communication op among the group's ranks."""
        ranks = self.groups[self.number].ranks
        attrs = {**node.attrs, "key": f"{node.attrs['key']}@{self.number}"}
        if "peer" in attrs:
            attrs["peer"] = ranks[attrs["peer"]]
        else:
            attrs["ranks"] = ranks
        return replace(node, attrs=attrs)
