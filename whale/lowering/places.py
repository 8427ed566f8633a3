"""What one rank of a place sends to and receives from the ranks of other places."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from whale.ir.plan import STAGE_INPUT, STAGE_OUTPUT, Place
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, Shape, TensorType
from whale.lowering.emit import COMMUNICATION, COMMUNICATOR
from whale.rules.communication import ROWS


class Connector:
    """Puts sends and receives in the place of the ends of a place's program on one rank.

    Args:
      program: the place's program, lowered for ``coordinate``.
      places: all places; ``number`` is this one's.
      senders: what a source stands for: its name -> (output, number of the place that makes it, key) of each.
      receivers: what a sink stands for: its name -> (numbers of the places that read it, key).
      rows: keys of what has the rows of the batch, and travels for each micro-batch.
    """

    def __init__(
        self,
        program: Program,
        places: Sequence[Place],
        number: int,
        coordinate: int,
        comm: str,
        senders: dict[str, list[tuple[int, int, str]]],
        receivers: dict[str, tuple[tuple[int, ...], str]],
        rows: Collection[str] = (),
    ):
        self.program, self.places, self.number, self.coordinate, self.comm = program, places, number, coordinate, comm
        self.senders, self.receivers, self.rows = senders, receivers, frozenset(rows)
        self.nodes: dict[str, Node] = {}
        self.effects: list[str] = []

    def run(self, check: tuple[str, str] | None) -> Program:
        """The rank's program.

        Args:
          check: (fingerprint, what a person would call this run), which all ranks compare; None: they do not.
        """
        rank = self.places[self.number].ranks[self.coordinate]
        self.nodes[COMMUNICATOR] = Node(
            COMMUNICATOR, "WhaleCommunicator", (), (), {"communicator": self.comm, "rank": rank},
            (TensorType("resource", ()),), "", True,
        )  # fmt: skip
        moved: dict[Ref, Ref] = {}
        for node in self.program.nodes:
            if node.op == STAGE_INPUT:
                moved.update(self._receive(node))
            elif node.op == STAGE_OUTPUT:
                self._send(node)
            elif node.name != COMMUNICATOR:
                self.nodes[node.name] = self._of_place(node) if node.op in COMMUNICATION else node
        if moved:
            for name, node in self.nodes.items():
                if any(r in moved for r in node.inputs):
                    self.nodes[name] = replace(node, inputs=tuple(moved.get(r, r) for r in node.inputs))
        if check is not None:
            attrs = {"key": "whale/check", "fingerprint": check[0], "what": check[1], "ranks": ()}
            self._add("whale/check", "WhaleCheck", (Ref(COMMUNICATOR),), attrs, ())
        outputs = tuple(moved.get(r, r) for r in self.program.outputs)
        effects = [n for n in self.program.effects if n in self.nodes] + self.effects
        return self.program.with_nodes(
            tuple(self.nodes.values()), outputs=outputs, effects=tuple(dict.fromkeys(effects))
        )

    def _add(self, name: str, op: str, inputs: tuple[Ref, ...], attrs: dict, outputs: tuple[TensorType, ...]) -> None:
        self.nodes[name] = Node(name, op, inputs, (), attrs, outputs, "", True)
        self.effects.append(name)

    def _receive(self, node: Node) -> dict[Ref, Ref]:
        """Receives each output that is read; output -> where it is now."""
        found = {}
        for index, source, key in self.senders[node.name]:
            t = node.outputs[index]
            name = node.name if index == 0 else f"{node.name}/whale_output_{index}"
            attrs = {
                "T": DType(t.dtype), "ranks": (), "key": f"{key}@{source}to{self.number}/{self.coordinate}",
                "peer": self.places[source].ranks[self.coordinate], "shape": Shape(t.shape),
            }  # fmt: skip
            self._add(name, "WhaleRecv", (Ref(COMMUNICATOR),), self._marked(attrs, key), (t,))
            found[Ref(node.name, index)] = Ref(name)
        return found

    def _send(self, node: Node) -> None:
        targets, key = self.receivers[node.name]
        (source,) = node.inputs
        t = self.program.type_of(source)
        for target in targets:
            attrs = {
                "T": DType(t.dtype), "ranks": (), "key": f"{key}@{self.number}to{target}/{self.coordinate}",
                "peer": self.places[target].ranks[self.coordinate],
            }  # fmt: skip
            operands = (Ref(COMMUNICATOR), source)
            self._add(f"{node.name}/to_{target}", "WhaleSend", operands, self._marked(attrs, key), ())

    def _marked(self, attrs: dict, key: str) -> dict:
        return {**attrs, ROWS: True} if key in self.rows else attrs

    def _of_place(self, node: Node) -> Node:
        """A communication op among the place's ranks."""
        ranks = self.places[self.number].ranks
        attrs = {**node.attrs, "key": f"{node.attrs['key']}@{self.number}"}
        if "peer" in attrs:
            attrs["peer"] = ranks[attrs["peer"]]
        else:
            attrs["ranks"] = ranks
        return replace(node, attrs=attrs)
