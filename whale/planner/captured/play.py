"""When each rank's operations run, where ranks wait for each other: a pipeline's step.

A rank computes one operation after the other, in the order of its program; exchanges run beside, from when their
operands are there.
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.errors import PlanError
from whale.ir.program import Node, Program
from whale.planner.captured.ways import EXCHANGES, Rates, exchange_seconds, node_seconds


def step_seconds(programs: Sequence[Program], rates: Sequence[Rates]) -> float:
    """Seconds until the last of the ranks has ended its program.

    Raises:
        PlanError: the ranks wait for each other.
    """
    ranks = [
        _Rank(number, program, speed, len(programs)) for number, (program, speed) in enumerate(zip(programs, rates))
    ]
    arrived: dict[tuple[str, str], dict[int, float]] = {}
    left = True
    while left:
        moved = False
        left = False
        for rank in ranks:
            moved |= rank.go_on(arrived)
            left |= bool(rank.left)
        if left and not moved:
            raise PlanError("the ranks of a pipeline wait for each other", given=ranks[0].program.name)
    return max(rank.end_s for rank in ranks)


class _Rank:
    """One rank on its way through its program."""

    def __init__(self, number: int, program: Program, rates: Rates, size: int) -> None:
        self.number, self.program, self.rates, self.size = number, program, rates, size
        self.left = list(program.nodes)
        self.clock_s = self.end_s = 0.0
        self.ready: dict[str, float] = {}
        self.functions = {
            name: sum(node_seconds(body, n, rates, size) for n in body.nodes)
            for name, body in program.functions.items()
        }

    def go_on(self, arrived: dict[tuple[str, str], dict[int, float]]) -> bool:
        """Runs what does not wait for exchanges whose others are not known yet; whether anything ran."""
        waiting = []
        for node in self.left:
            before = [r.node for r in node.inputs] + list(node.controls)
            if all(name in self.ready for name in before) and self._ran(node, before, arrived):
                continue
            waiting.append(node)
        moved = len(waiting) < len(self.left)
        self.left = waiting
        return moved

    def _ran(self, node: Node, before: list[str], arrived: dict[tuple[str, str], dict[int, float]]) -> bool:
        start_s = max((self.ready[name] for name in before), default=0.0)
        if node.op in EXCHANGES:
            through_s = self._exchanged(node, start_s, arrived)
            if through_s is None:
                return False
            end_s = through_s
        else:
            name = getattr(node.attrs.get("f"), "name", "")
            seconds = self.functions.get(name)
            if seconds is None:
                seconds = node_seconds(self.program, node, self.rates, self.size)
            end_s = max(start_s, self.clock_s) + seconds if seconds else start_s
            self.clock_s = max(self.clock_s, end_s)
        self.ready[node.name] = end_s
        self.end_s = max(self.end_s, end_s)
        return True

    def _exchanged(self, node: Node, start_s: float, arrived: dict[tuple[str, str], dict[int, float]]) -> float | None:
        """When an exchange is through on this rank; None: not known before others get there."""
        key = str(node.attrs.get("key", node.name))
        if node.op == "WhaleSend":
            arrived.setdefault(("send", key), {})[self.number] = start_s
            return start_s
        types = [self.program.type_of(r) for r in node.inputs]
        seconds = exchange_seconds(node, types, self.rates, self.size)
        if node.op == "WhaleRecv":
            sent = arrived.get(("send", key), {}).get(int(node.attrs["peer"]))
            return None if sent is None else max(sent, start_s) + seconds
        members = tuple(int(r) for r in node.attrs.get("ranks", ())) or tuple(range(self.size))
        there = arrived.setdefault(("group", key), {})
        there[self.number] = start_s
        return max(there.values()) + seconds if len(there) == len(members) else None
