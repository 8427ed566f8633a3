"""Lowers the lookups and updates of embedding tables whose rows are sharded, to exchanges of rows by their ids.

The exchange itself is described in ``whale.sharding_rules.embedding``. All lookups that do not depend on each other
share their exchanges: one for the ids of all of them, one for the rows that are returned, one for the row updates.

Decision: 0074.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from whale.ir.emitter import Emitter
from whale.ir.layout import Placement, Shard, Strategy, local_shape
from whale.ir.marks import Marks
from whale.ir.ops import IDENTITIES, RESHAPES
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, TensorType, count_item_bytes, find_numpy_dtype, require_static_shape
from whale.sharding_rules.base import Route
from whale.sharding_rules.embedding import SUMS_BY_ID
from whale.sharding_rules.graph import make_op_view
from whale.sharding_rules.registry import find_rule

_GROUP = "group "  # prefix of names that stand for a fused all-reduce
_ROUTE_RESULTS = 4  # results of WhaleRouteIds for each table: asked, back, sent, came
Get = Callable[[Ref, Placement], Ref | None]
# Identifies ids that are sent: the tensor, its placement, the ranks' first rows, and the strides of the ids' columns.
_Ids = tuple[Ref, Placement, tuple[int, ...], tuple[int, ...]]


@dataclass
class _JointExchange:
    """Holds a fused exchange that is being built, with what each table contributes to it.

    Attributes:
      name: name of the exchange's node.
      op: its op type.
      key: name of the operation, equal on all ranks.
      tables: (operands, result types, bytes that this rank is expected to send) for each table.
      starts: for an exchange of ids, the ``Route.starts`` of each table, concatenated.
    """

    name: str
    op: str
    key: str
    tables: list[tuple[tuple[Ref, ...], tuple[TensorType, ...], int]] = field(default_factory=list)
    starts: tuple[int, ...] = ()


class RowExchanges:
    """Emits the exchanges of table rows of one graph on one rank. Lookups and updates with the same ids send these ids
    once.

    ``whale.partition.spmd`` calls ``emit`` for each lookup or update of the graph, and then ``finish``, which emits the
    fused exchanges.
    """

    def __init__(
        self, emitter: Emitter, program: Program, strategies: Mapping[str, Strategy], plan: Plan, graph: str
    ) -> None:
        self.emitter, self.program, self.strategies, self.graph = emitter, program, strategies, graph
        self.levels = _find_levels(program, strategies, plan, graph)
        self.together: dict[tuple[str, int, str], _JointExchange] = {}
        self.places: dict[_Ids, tuple[_JointExchange, int]] = {}  # where ids travel to their owners
        self.counts: dict[str, int] = {}  # name of an exchange of ids -> number of its tables
        for name in self.levels:
            self._reserve_place(program.by_name[name])

    def emit(self, node: Node, route: Route, local: Node, get: Get, moved: int) -> None:
        """Emits the nodes for one lookup, or one addition to rows, whose rows are exchanged by their ids.

        Args:
          node: the node in the program.
          route: how its ids are sent to the owners of their rows.
          local: the node on this rank, with ids that still number the rows of the whole table.
          get: returns a tensor of the program in a given placement on this rank.
          moved: bytes that all ranks together are expected to send.
        """
        e, ids = self.emitter, self.program.find_type(node.inputs[route.ids])
        values = node.outputs[0] if route.values is None else self.program.find_type(node.inputs[route.values])
        row = require_static_shape(values)[len(require_static_shape(ids)) - bool(route.strides) :]
        width, each = math.prod(row) * count_item_bytes(values.dtype), count_item_bytes(ids.dtype)
        mine = moved // e.size
        of_ids = mine * each // (width + each if route.values is None else max(1, width))
        key = self._make_key(node)
        together, place = self.places[key]
        count = self._send_ids(key, together, place, get, of_ids)
        asked, *rest = (Ref(together.name, n * self.counts[together.name] + place) for n in range(_ROUTE_RESULTS))
        some, flat = TensorType(values.dtype, (None, *row)), TensorType(values.dtype, (count, *row))
        if route.values is None:
            read = self._read(node, route, local, asked, some, ids.dtype)
            found = self._join("rows", "WhaleReturnRows", node, values.dtype, (read, *rest), (flat,), mine - of_ids)
            e.reshape(node.name, found, values.dtype, require_static_shape(local.outputs[0]))
            return
        added = e.reshape(
            f"{node.name}/{e.prefix}_flat", local.inputs[route.values], values.dtype, require_static_shape(flat)
        )
        sums = self._join("sums", "WhaleSendRows", node, values.dtype, (added, *rest), (some,), mine)
        if node.op == SUMS_BY_ID:
            emit_sums(e, node.name, asked, sums, TensorType(ids.dtype, (None,)), some)
        elif route.table is None:
            self._add_up(node, route, local, asked, sums, ids.dtype)
        else:
            e.nodes[node.name] = replace(local, inputs=(local.inputs[0], asked, sums))

    def _read(self, node: Node, route: Route, local: Node, asked: Ref, some: TensorType, ids: str) -> Ref:
        """Emits the read of the rows that other ranks asked for (``asked``) from this rank's shard of the table."""
        e, name = self.emitter, f"{node.name}/{self.emitter.prefix}"
        if node.op == "ResourceGather":
            read = replace(local, name=f"{name}_read", inputs=(local.inputs[0], asked), outputs=(some,))
            e.nodes[read.name] = read
            return Ref(read.name)
        row = tuple(n for n in some.shape or () if n is not None)
        rows = route.starts[e.rank + 1] - route.starts[e.rank]
        table, shape = local.inputs[route.table or 0], self.program.find_type(node.inputs[route.table or 0]).shape or ()
        many = None
        if route.unknown is not None:
            out = {"T": DType(some.dtype), "out_type": DType("int32")}
            sizes = e.add(f"{name}_sizes", "Shape", (table,), out, (TensorType("int32", (len(shape),)),))
            size = e.pick(f"{name}_size", sizes, "int32", route.unknown)
            asked, many = self._convert_numbers(name, asked, route, size, ids)
        if route.dim:
            held = local_shape(shape, self.strategies[node.name].inputs[route.table or 0], e.rank)
            table = self._transpose(f"{name}_outermost", table, TensorType(some.dtype, held), route.dim, 0)
        table = e.reshape_to(f"{name}_table", table, some.dtype, (rows if many is None else None, *row), many)
        kinds = {"Tparams": DType(some.dtype), "Tindices": DType(ids), "Taxis": DType("int32"), "batch_dims": 0}
        first = e.const(f"{name}_axis", np.array(0, np.int32))
        return e.add(f"{name}_read", "GatherV2", (table, asked, first), kinds, (some,))

    def _add_up(self, node: Node, route: Route, local: Node, asked: Ref, sums: Ref, ids: str) -> None:
        """Emits this rank's shard of a scatter's result: each row is the sum of the values received for it, or zeros.

        Args:
          asked: the row numbers of the received values.
          sums: the received values.
          ids: dtype of the row numbers.
        """
        e, found = self.emitter, local.outputs[0]
        name, row = f"{node.name}/{e.prefix}", (node.outputs[0].shape or ())[max(1, len(route.strides)) :]
        kinds = {"T": DType(found.dtype), "Tindices": DType(ids), "Tnumsegments": DType("int32")}
        size = None
        if route.unknown is None:
            rows = e.const(f"{name}_rows", np.array(route.starts[e.rank + 1] - route.starts[e.rank], np.int32))
        else:
            size = self._emit_size(f"{name}_size", node, local, route.unknown)
            asked, rows = self._convert_numbers(name, asked, route, size, ids)
        types = (TensorType(found.dtype, (None, *row)),)
        table = e.add(f"{name}_table", "UnsortedSegmentSum", (sums, asked, rows), kinds, types)
        shape = list(found.shape or ())
        shape.insert(0, shape.pop(route.dim))
        table = e.reshape_to(f"{name}_outermost" if route.dim else node.name, table, found.dtype, tuple(shape), size)
        if route.dim:
            self._transpose(node.name, table, TensorType(found.dtype, tuple(shape)), 0, route.dim)

    def _emit_size(self, name: str, node: Node, local: Node, at: int) -> Ref:
        """Emits size number ``at`` of a scatter's result, read at run time from its shape operand, as an int32
        scalar.
        """
        e, t = self.emitter, self.program.find_type(node.inputs[-1])
        one = e.pick(name, local.inputs[-1], t.dtype, at)
        if t.dtype == "int32":
            return one
        kinds = {"SrcT": DType(t.dtype), "DstT": DType("int32"), "Truncate": False}
        return e.add(f"{name}_int32", "Cast", (one,), kinds, (TensorType("int32", ()),))

    def _convert_numbers(self, name: str, numbers: Ref, route: Route, size: Ref, dtype: str) -> tuple[Ref, Ref]:
        """Converts row numbers for a table in which one dimension's size is known only at run time.

        The numbers were computed as if this dimension had a very large size, so that all ranks number rows alike.
        Afterwards they are those of the table with its real size.

        Args:
          numbers: the row numbers, counted from this rank's first row.
          size: the real size of the dimension, an int32 scalar.
          dtype: dtype of the row numbers.

        Returns:
          (the converted row numbers, the number of rows that this rank holds).
        """
        e, inner, kind = self.emitter, route.strides[route.unknown or 0], {"T": DType(dtype)}
        outer = min(n for n in route.strides if n > inner)
        some, one = TensorType(dtype, (None,)), TensorType(dtype, ())
        if dtype != "int32":
            kinds = {"SrcT": DType("int32"), "DstT": DType(dtype), "Truncate": False}
            size = e.add(f"{name}_size_as_ids", "Cast", (size,), kinds, (one,))
        by, within = (
            e.const(f"{name}_{n}", np.array(v, find_numpy_dtype(dtype))) for n, v in (("by", outer), ("in", inner))
        )
        each = e.add(f"{name}_each", "Mul", (size, within), kind, (one,))
        high = e.add(f"{name}_high", "FloorDiv", (numbers, by), kind, (some,))
        low = e.add(f"{name}_low", "FloorMod", (numbers, by), kind, (some,))
        first = e.add(f"{name}_first", "Mul", (high, each), kind, (some,))
        counted = e.add(f"{name}_counted", "AddV2", (first, low), kind, (some,))
        blocks = (route.starts[e.rank + 1] - route.starts[e.rank]) // outer
        many = e.const(f"{name}_blocks", np.array(blocks, find_numpy_dtype(dtype)))
        rows = e.add(f"{name}_rows", "Mul", (each, many), kind, (one,))
        if dtype != "int32":
            kinds = {"SrcT": DType(dtype), "DstT": DType("int32"), "Truncate": False}
            rows = e.add(f"{name}_rows_int32", "Cast", (rows,), kinds, (TensorType("int32", ()),))
        return counted, rows

    def _transpose(self, name: str, source: Ref, t: TensorType, dim: int, to: int) -> Ref:
        """Transposes ``source``, of type ``t``, so that its dimension ``dim`` becomes dimension ``to``."""
        order = list(range(len(t.shape or ())))
        order.insert(to, order.pop(dim))
        perm = self.emitter.const(f"{name}/perm", np.array(order, np.int32))
        kinds = {"T": DType(t.dtype), "Tperm": DType("int32")}
        shape = tuple((t.shape or ())[n] for n in order)
        return self.emitter.add(name, "Transpose", (source, perm), kinds, (TensorType(t.dtype, shape),))

    def finish(self) -> None:
        """Emits the fused exchanges, after all tables that share them were added by ``emit``."""
        e = self.emitter
        for (_, _, dtype), one in self.together.items():
            # The op takes the first operand of all tables, then the second of all tables, and so on; results likewise.
            inputs = [ref for operand in zip(*(operands for operands, _, _ in one.tables)) for ref in operand]
            outputs = [t for result in zip(*(results for _, results, _ in one.tables)) for t in result]
            attrs = {"N": len(one.tables), "key": one.key}
            if one.starts:
                attrs["starts"] = one.starts
            marks = Marks(expected_bytes=sum(sent for _, _, sent in one.tables))
            e.comm_op(one.name, one.op, inputs, TensorType(dtype, ()), attrs, outputs, marks)

    def _make_key(self, node: Node) -> _Ids:
        strategy, rule = self.strategies[node.name], find_rule(node.op)
        assert rule is not None, node
        route = rule.local_op(make_op_view(self.program, node, self.emitter.size), strategy, self.emitter.rank).route
        assert route is not None, node
        return (*self._find_origin(node.inputs[route.ids], strategy.inputs[route.ids]), route.starts, route.strides)

    def _reserve_place(self, node: Node) -> None:
        """Reserves a position in the fused exchange of ids for a node's ids, unless the same ids have one already."""
        key = self._make_key(node)
        if key not in self.places:
            one = self._find_exchange("ids", "WhaleRouteIds", node, self.program.find_type(key[0]).dtype)
            self.places[key] = one, self.counts.setdefault(one.name, 0)
            self.counts[one.name] += 1
            one.starts += key[2]

    def _send_ids(self, key: _Ids, together: _JointExchange, place: int, get: Get, expected: int) -> int:
        """Returns how many ids this rank sends; adds the ids to the fused exchange unless an earlier lookup has added
        them.

        Args:
          key: the ids and how they are sent.
          together: the fused exchange.
          place: position of the ids in the exchange.
          get: returns a tensor of the program in a given placement on this rank.
          expected: bytes that this rank is expected to send.
        """
        ref, placement, _, strides = key
        e, t = self.emitter, self.program.find_type(ref)
        assert isinstance(placement, Shard), placement
        count = t.elements // max(1, len(strides)) // max(1, placement.extent) * placement.local_size(e.rank)
        if place == len(together.tables):
            local = get(ref, placement)
            assert local is not None, ref
            flat = self._emit_numbers(f"{together.name}/of_{place}", local, t.dtype, count, strides)
            sizes = TensorType("int64", (e.size,))
            results = (TensorType(t.dtype, (None,)), TensorType("int32", (count,)), sizes, sizes)
            together.tables.append(((flat,), results, expected))
        return count

    def _emit_numbers(self, name: str, ids: Ref, dtype: str, count: int, strides: tuple[int, ...]) -> Ref:
        """Emits the row numbers of ids as one vector.

        An id with several columns addresses several dimensions; its row number is the sum of columns times ``strides``.
        """
        e, kind = self.emitter, {"T": DType(dtype)}
        if not strides:
            return e.reshape(name, ids, dtype, (count,))
        columns = TensorType(dtype, (count, len(strides)))
        flat = e.reshape(f"{name}_columns", ids, dtype, require_static_shape(columns))
        by = e.const(f"{name}_strides", np.array(strides, find_numpy_dtype(dtype)))
        flat = e.add(f"{name}_in_rows", "Mul", (flat, by), kind, (columns,))
        last = e.const(f"{name}_last", np.array([1], np.int32))
        kinds = {**kind, "Tidx": DType("int32"), "keep_dims": False}
        return e.add(name, "Sum", (flat, last), kinds, (TensorType(dtype, (count,)),))

    def _find_exchange(self, word: str, op: str, node: Node, dtype: str) -> _JointExchange:
        level = self.levels[node.name]
        name = f"{self.emitter.prefix}/{word}_{level}_{dtype}"
        return self.together.setdefault((op, level, dtype), _JointExchange(name, op, f"{self.graph}/{name}"))

    def _join(
        self,
        word: str,
        op: str,
        node: Node,
        dtype: str,
        operands: tuple[Ref, ...],
        results: tuple[TensorType, ...],
        sent: int,
    ) -> Ref:
        """Adds one table's operands to a fused exchange, and returns the tensor that will hold the table's result."""
        one = self._find_exchange(word, op, node, dtype)
        one.tables.append((operands, results, sent))
        return Ref(one.name, len(one.tables) - 1)

    def _find_origin(self, ref: Ref, placement: Placement) -> tuple[Ref, Placement]:
        """Follows reshapes and identities back to the tensor with the same elements as ``ref`` on each rank, in the
        same order.

        Lookups of the same ids in different shapes thus send these ids only once.
        """
        while isinstance(placement, Shard) and placement.dim == 0 and placement.blocks == 1:
            made = self.program.by_name[ref.node]
            if made.op not in IDENTITIES | RESHAPES or not made.inputs:
                break
            strategy = self.strategies[made.name]
            before = strategy.inputs[0]
            if strategy.outputs[0] != placement or not isinstance(before, Shard):
                break
            if before.dim or before.blocks != 1 or not self.program.find_type(made.inputs[0]).is_static:
                break
            ref, placement = made.inputs[0], before
        return ref, placement


def emit_sums(e: Emitter, name: str, ids: Ref, rows: Ref, of_ids: TensorType, of_rows: TensorType) -> Ref:
    """Emits ``WhaleSumsById`` on a rank: a Unique of its ids, and for each unique id the sum of the rows of that id.

    Optimizers use the sums, so that they update each row of a table once.

    Args:
      name: name of the Unique node, whose first output is the unique ids.
      ids: the rank's own ids, which may repeat.
      rows: a tensor with one row for each of these ids.
      of_ids: type of ``ids``.
      of_rows: type of ``rows``.

    Returns:
      the sums, one row per unique id, in the order of the unique ids.
    """
    each = TensorType("int32", of_ids.shape)
    kinds = {"T": DType(of_ids.dtype), "out_idx": DType("int32")}
    once = e.add(name, "Unique", (ids,), kinds, (TensorType(of_ids.dtype, (None,)), each))
    number = {"T": DType(of_ids.dtype), "out_type": DType("int32")}
    count = e.add(f"{name}/{e.prefix}_count", "Size", (once,), number, (TensorType("int32", ()),))
    kinds = {"T": DType(of_rows.dtype), "Tindices": DType("int32"), "Tnumsegments": DType("int32")}
    total = TensorType(of_rows.dtype, (None, *(of_rows.shape or ())[1:]))
    return e.add(find_sums(e, name), "UnsortedSegmentSum", (rows, Ref(name, 1), count), kinds, (total,))


def find_sums(e: Emitter, name: str) -> str:
    """Returns the name of the node whose output is the sums that ``emit_sums`` has emitted under ``name``."""
    return f"{name}/{e.prefix}_sums"


def _find_levels(program: Program, strategies: Mapping[str, Strategy], plan: Plan, graph: str) -> dict[str, int]:
    """Returns the level of each node that exchanges rows: how many such nodes are before it on the longest path.

    Nodes of one level do not depend on each other, so their exchanges can be fused. A fused all-reduce waits for all
    its operands, so it counts as one node of such a path.
    """
    routed = [n for n in program.nodes if _is_routed(program, n, strategies[n.name], plan.size)]
    if not routed:
        return {}
    names, found = {n.name for n in routed}, dict[str, int]()

    def list_predecessors(name: str) -> list[str]:
        """Returns the names of the nodes and fused all-reduces that ``name``, itself a node or a fused all-reduce,
        waits for.
        """
        if name.startswith(_GROUP):
            return [m.ref.node for m in plan.groups[int(name[len(_GROUP) :])]]
        node = program.by_name[name]
        waits = list(node.controls)
        for ref, placement in zip(node.inputs, strategies[name].inputs):
            r = plan.reshard_of.get((graph, ref, placement))
            while r is not None and r.group < 0:
                r = plan.reshard_of.get((graph, ref, r.source))
            waits.append(ref.node if r is None else f"{_GROUP}{r.group}")
        return waits

    for start in routed:
        stack = [start.name]
        while stack:
            waits = list_predecessors(stack[-1])
            missing = [w for w in waits if w not in found]
            if missing:
                stack += missing
                continue
            name = stack.pop()
            found[name] = max((found[w] + (w in names) for w in waits), default=0)
    return {n.name: found[n.name] for n in routed}


def _is_routed(program: Program, node: Node, strategy: Strategy, parts: int) -> bool:
    rule = find_rule(node.op)
    return (
        rule is not None
        and rule.routes is not None
        and rule.is_exchanging_rows(make_op_view(program, node, parts), strategy)
    )


def remove_owner_mark(node: Node) -> Node:
    """Returns the node without its ``owned_rows`` mark, which concerns only the mesh axis that is being lowered."""
    return node.with_marks(owned_rows=False) if node.marks.owned_rows else node
