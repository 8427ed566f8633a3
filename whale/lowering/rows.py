"""Rows of a table that are exchanged by their ids (``whale.rules.rows``), as nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from whale.ir.exchanged_bytes import EXPECTED
from whale.ir.layout import Placement, Split, Strategy
from whale.ir.ops import IDENTITIES, RESHAPES
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, TensorType, item_bytes, static_shape
from whale.lowering.emit import Emitter
from whale.rules.base import Route


@dataclass(frozen=True, slots=True)
class Routed:
    """A route that is there: the node, and the ids that it was made for."""

    node: str
    ids: int

    def output(self, number: int) -> Ref:
        """asked, back, sent, came."""
        return Ref(self.node, number)


@dataclass
class RowExchanges:
    """Emits one graph's exchanges of rows; ids that were sent to their owners are not sent again."""

    emitter: Emitter
    program: Program
    strategies: Mapping[str, Strategy]
    graph: str
    routes: dict[tuple[Ref, tuple[int, ...]], Routed] = field(default_factory=dict)

    def emit(
        self, node: Node, route: Route, local: Node, ids: Placement, get: Callable[[Ref, Placement], Ref | None], moved: int
    ) -> None:
        """The node that reads or adds to rows, whose operands and result are local already.

        Args:
          node: of the program; local: on this rank, with whole ids.
          ids: how these lie; get: gives a tensor as it lies so on this rank.
          moved: bytes that all ranks together are expected to send.
        """
        e = self.emitter
        kind = self.program.type_of(node.inputs[1])
        values = self.program.type_of(node.inputs[route.values]) if route.values is not None else node.outputs[0]
        row = static_shape(values)[len(kind.shape or ()) :]
        width = math.prod(row) * item_bytes(values.dtype)
        mine = moved // e.size
        of_ids = mine * item_bytes(kind.dtype) // (width + item_bytes(kind.dtype)) if route.values is None else 0
        routed = self._routed(node, route, ids, get, of_ids or mine * item_bytes(kind.dtype) // max(1, width))
        asked, back, sent, came = map(routed.output, range(4))
        attrs = {"N": 1, "key": f"{self.graph}/{node.name}>rows", EXPECTED: mine - of_ids}
        name, some = f"{node.name}/{e.prefix}", TensorType(values.dtype, (None, *row))
        if route.values is None:
            read = replace(local, name=f"{name}_read", inputs=(local.inputs[0], asked), outputs=(some,))
            e.nodes[read.name] = read
            flat, out = TensorType(values.dtype, (routed.ids, *row)), static_shape(local.outputs[0])
            one = len(out) == len(row) + 1
            found = f"{node.name}" if one else f"{name}_flat"
            ref = e.comm_op(found, "WhaleReturnRows", (Ref(read.name), back, sent, came), values, attrs, (flat,))
            if not one:
                e.reshape(node.name, ref, values.dtype, out)
            return
        added = e.reshape(f"{name}_flat", local.inputs[route.values], values.dtype, (routed.ids, *row))
        sums = e.comm_op(f"{name}_sums", "WhaleSendRows", (added, back, sent, came), values, attrs, (some,))
        e.nodes[node.name] = replace(local, inputs=(local.inputs[0], asked, sums))

    def _routed(
        self, node: Node, route: Route, ids: Placement, get: Callable[[Ref, Placement], Ref | None], expected: int
    ) -> Routed:
        ref, placement = self._origin(node.inputs[1], ids)
        known = self.routes.get((ref, route.starts))
        if known is not None:
            return known
        e, t = self.emitter, self.program.type_of(ref)
        name = f"{node.name}/{e.prefix}_route"
        assert isinstance(placement, Split), placement
        count = t.elements // max(1, placement.extent) * placement.local(e.rank)
        local = get(ref, placement)
        assert local is not None, ref
        flat = local if len(t.shape or ()) == 1 else e.reshape(f"{name}/flat", local, t.dtype, (count,))
        sizes = TensorType("int64", (e.size,))
        outputs = (TensorType(t.dtype, (None,)), TensorType("int32", (count,)), sizes, sizes)
        attrs = {"N": 1, "key": f"{self.graph}/{node.name}>ids", "starts": route.starts, EXPECTED: expected}
        e.comm_op(name, "WhaleRouteIds", (flat,), t, attrs, outputs)
        found = self.routes[ref, route.starts] = Routed(name, count)
        return found

    def _origin(self, ref: Ref, placement: Placement) -> tuple[Ref, Placement]:
        """The tensor of which ``ref`` is a view with the same elements on each rank, in the same order."""
        while isinstance(placement, Split) and placement.dim == 0 and placement.blocks == 1:
            made = self.program.by_name[ref.node]
            if made.op not in IDENTITIES | RESHAPES or not made.inputs:
                break
            strategy = self.strategies[made.name]
            before = strategy.inputs[0]
            if strategy.outputs[0] != placement or not isinstance(before, Split):
                break
            if before.dim or before.blocks != 1 or not self.program.type_of(made.inputs[0]).is_static:
                break
            ref, placement = made.inputs[0], before
        return ref, placement
