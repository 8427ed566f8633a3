"""What the ranks' programs say to each other, read from the nodes."""

from __future__ import annotations

from collections.abc import Sequence

from whale.ir.ops import EXCHANGES, MEETINGS
from whale.ir.program import Node, Program


def communication(program: Program) -> list[tuple[str, Node]]:
    """(graph, node) of each op that communicates."""
    graphs = [("", program), *program.functions.items()]
    return [(name, n) for name, graph in graphs for n in graph.nodes if n.op in EXCHANGES | MEETINGS]


def assert_ranks_agree(programs: Sequence[Program]) -> None:
    """Every collective is on every rank, once, with the same attributes; every send has its receive."""
    tables = []
    sent, received = set(), set()
    for rank, program in enumerate(programs):
        table = {}
        for graph, node in communication(program):
            key, attrs = node.attrs["key"], dict(node.attrs)
            if node.op == "WhaleSend":
                sent.add((graph, key, rank, attrs["peer"], attrs["T"]))
            elif node.op == "WhaleRecv":
                received.add((graph, key, attrs["peer"], rank, attrs["T"]))
            else:
                assert (graph, key) not in table, f"rank {rank} has {key} twice"
                table[graph, key] = (node.op, attrs)
        tables.append(table)
    for rank, table in enumerate(tables[1:], 1):
        assert table == tables[0], f"rank {rank} differs from rank 0"
    assert sent == received
