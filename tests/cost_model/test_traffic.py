"""What an exchange moves: the ranks' parts are what the plan says, whatever carries them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cost_model.graph.executor_graph import Graph, graph_of
from tests.programs import mlp, planned
from whale.ir.layout import Partial, count_collective_bytes, count_rank_bytes
from whale.ir.ops import COLLECTIVES, EXCHANGES
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref
from whale.ir.values import TensorType
from whale.partition.spmd import partition_for_rank
from whale.passes.resharding.wire_dtype import reshard_bytes
from whale.tools.profile.profile import remove_exchanges


def carried(program: Program, plan: Plan, backend: str = "whale", wire_dtype: str = "") -> Plan:
    """``plan`` whose sums another backend carries, or as another dtype."""

    def of(r):  # type: ignore[no-untyped-def]
        if not isinstance(r.source, Partial):
            return r
        r = replace(r, backend=backend, wire_dtype=wire_dtype)
        return replace(r, bytes=reshard_bytes(r, program.find_type(r.ref), plan.size))

    return replace(plan, reshards=tuple(map(of, plan.reshards)))


def graphs_of(program: Program, plan: Plan) -> list[Graph]:
    ranks = [partition_for_rank(program, plan, rank, "comm", None) for rank in range(plan.size)]
    return [graph_of(rank, i, plan.size) for i, rank in enumerate(ranks)]


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (0, 7, 1)], ids=str)
@pytest.mark.parametrize("carrier", [("whale", ""), ("horovod", ""), ("whale", "bfloat16")], ids=str)
def test_the_ranks_parts_are_the_plans_bytes(sizes: tuple[int, ...], carrier: tuple[str, str]) -> None:
    program = mlp(dtype="float32")
    plan = carried(program, planned(program, *sizes), *carrier)
    graphs = graphs_of(program, plan)
    moved = [sum(e.logical_bytes for e in g.exchanges.values()) for g in graphs]
    assert sum(moved) == plan.logical_bytes > 0
    assert max(moved) - min(moved) <= len(graphs[0].exchanges), "a sum is shared out evenly, to a byte"


def test_a_sum_that_is_rounded_keeps_a_buffer_of_what_is_sent() -> None:
    program = mlp(dtype="float32")
    plan = planned(program, 4, 4, group_bytes=0)
    whole = graphs_of(program, plan)[0].exchanges.values()
    rounded = graphs_of(program, carried(program, plan, wire_dtype="bfloat16"))[0].exchanges.values()
    assert [e.staging_bytes for e in whole] == [0] * len(whole)
    assert [e.staging_bytes for e in rounded] == [e.tensor_bytes // 2 for e in whole]


def test_sums_take_their_operands_memory() -> None:
    program = mlp(dtype="float32")
    g = graphs_of(program, planned(program, 4, 4))[0]
    (sums,) = (i for i, e in g.exchanges.items() if len(g.results[i]) > 1)
    tensors = [r for r, ref in zip(g.operands[sums], g.nodes[sums].inputs) if ref.node != "whale/communicator"]
    assert [g.taken[r] for r in g.results[sums]] == [(r,) for r in tensors]


@pytest.mark.parametrize("backend", ["whale", "horovod"])
def test_a_rank_alone_exchanges_nothing(backend: str) -> None:
    program = mlp(dtype="float32")
    plan = carried(program, planned(program, 4, 4), backend)
    rank = partition_for_rank(program, plan, 0, "comm", "a step")
    assert EXCHANGES & {n.op for n in rank.nodes} and not EXCHANGES & {n.op for n in remove_exchanges(rank).nodes}


def _gathered(place: int) -> tuple[Node, list[TensorType]]:
    mine = TensorType("float32", ((5, 0, 2)[place], 3))
    return Node("x", "WhaleAllGather", (), outputs=(TensorType("float32", (7, 3)),)), [mine]


def _scattered(place: int) -> tuple[Node, list[TensorType]]:
    mine = TensorType("float32", ((5, 0, 2)[place], 3))
    return Node("x", "WhaleReduceScatter", (), outputs=(mine,)), [TensorType("float32", (7, 3))]


def _reduced(place: int) -> tuple[Node, list[TensorType]]:
    t = TensorType("int8", (7, 3))  # 84 bytes by 3 ranks, 28 each; of two tensors 168
    return Node("x", "WhaleAllReduce", (Ref("c"),), outputs=(t, t)), [TensorType("resource", ()), t, t]


def _sent_by_one(place: int) -> tuple[Node, list[TensorType]]:
    t = TensorType("float32", (7, 3))
    return Node("x", "WhaleBroadcast", (), (), {"root": 1}, (t,)), [t] if place == 1 else []


MADE: dict[str, Callable[[int], tuple[Node, list[TensorType]]]] = {
    "WhaleAllGather": _gathered,
    "WhaleReduceScatter": _scattered,
    "WhaleAllReduce": _reduced,
    "WhaleBroadcast": _sent_by_one,
}


@pytest.mark.parametrize("op", MADE)
def test_parts_add_up(op: str) -> None:
    parts = [count_rank_bytes(*MADE[op](place), place, 3) for place in range(3)]
    whole = 42 if op == "WhaleAllReduce" else 84
    assert op in COLLECTIVES and sum(parts) == count_collective_bytes(op, whole, 3)


def test_what_stays_is_not_sent() -> None:
    exchanged = Node("x", "WhaleAllToAll", (), (), {"split_sizes": (5, 0, 2)}, ())
    assert [count_rank_bytes(exchanged, [TensorType("int8", (7, 4))], i, 3) for i in range(3)] == [8, 28, 20]
    nothing = Node("x", "WhaleAllToAll", (), (), {"split_sizes": (0, 0)}, ())
    assert count_rank_bytes(nothing, [TensorType("int8", (0, 4))], 0, 2) == 0


def test_messages_count_where_they_are_sent() -> None:
    t = TensorType("float32", (7, 3))
    assert count_rank_bytes(Node("x", "WhaleSend"), [TensorType("resource", ()), t], 0, 2) == 84
    assert count_rank_bytes(Node("x", "WhaleRecv", outputs=(t,)), [TensorType("resource", ())], 0, 2) == 0
