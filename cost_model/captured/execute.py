"""Discrete events over the ranks' programs: executor threads, the cores that they share, exchanges, memory.

Each rank has executor threads as TensorFlow has them (core/common_runtime/executor.cc): a thread goes on with the short
kernels that its last one has made ready, keeps one longer kernel for itself, and puts the others on its stack; a thread
with nothing to do takes what lies longest on another's. Kernels and exchanges of a host share its cores evenly. An
exchange begins when the last of its ranks has come to it, while the threads go on.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from whale.errors import PlanError

from .graph import Graph
from .liveness import peak_bytes
from .traffic import Exchange

SHORT_S = 2.5e-6  # kOpIsExpensiveThresholdCycles: 8,000


@dataclass(frozen=True, slots=True)
class Ran:
    """What a step took on one rank.

    Attributes:
        end_s: when its last node ended.
        peak_bytes: the most memory that it held, with what is there before the step.
        resident_bytes: what is there between steps: variables, inputs, buffers of communication.
        compute_s: its kernels, alone on a core.
        exchange_s: the same of its exchanges.
    """

    end_s: float
    peak_bytes: int
    resident_bytes: int
    compute_s: float
    exchange_s: float


@dataclass(slots=True)
class Host:
    """Cores that ranks share. `clock_s`: the work that every active task has had since the beginning."""

    cores: float
    clock_s: float = 0.0
    at_s: float = 0.0
    active: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    def advance(self, now_s: float) -> None:
        self.clock_s += (now_s - self.at_s) * self.rate
        self.at_s = now_s

    @property
    def rate(self) -> float:
        return min(1.0, self.cores / len(self.active)) if self.active else 1.0

    @property
    def next_s(self) -> float:
        return self.at_s + max(0.0, self.active[0][0] - self.clock_s) / self.rate if self.active else float("inf")


@dataclass(slots=True)
class _Rank:
    number: int
    graph: Graph
    host: int
    seconds: Sequence[float]
    scratch: Sequence[int]
    waiting: list[int]
    stacks: list[deque[int]]
    idle: list[bool]
    inline: list[deque[int]]
    left: int
    end_s: float = 0.0
    order: list[int] = field(default_factory=list)


def run(
    graphs: Sequence[Graph],
    seconds: Sequence[Sequence[float]],
    scratch_bytes: Sequence[Sequence[int]],
    exchange_s: Callable[[Exchange], float],
    hosts: Sequence[int],
    cores: Sequence[float],
    threads: int = 2,
    concurrent_exchanges: bool = True,
) -> list[Ran]:
    """Plays one step of all ranks.

    Args:
        graphs: of the ranks.
        seconds: of each node alone on a core (or device); nodes of 0 take no time.
        scratch_bytes: memory of each node while it runs.
        exchange_s: seconds of work that an exchange is for each of its ranks.
        hosts: of each rank, the number of its host; a GPU is a host of its own with one core.
        cores: of each host.
        threads: executor threads of a rank.
        concurrent_exchanges: whether exchanges take the ranks' cores; else they run beside them.

    Raises:
        PlanError: the ranks wait for each other.
    """
    return _Run(graphs, seconds, scratch_bytes, exchange_s, hosts, cores, threads, concurrent_exchanges).play()


class _Run:
    def __init__(
        self,
        graphs: Sequence[Graph],
        seconds: Sequence[Sequence[float]],
        scratch: Sequence[Sequence[int]],
        exchange_s: Callable[[Exchange], float],
        hosts: Sequence[int],
        cores: Sequence[float],
        threads: int,
        shared: bool,
    ) -> None:
        self.exchange_s, self.shared = exchange_s, shared
        self.hosts = [Host(c) for c in cores]
        self.beside: list[tuple[float, int, Callable[[], None]]] = []
        self.now_s, self.count = 0.0, 0
        self.come: dict[tuple[str, tuple[int, ...]], list[tuple[_Rank, int]]] = {}
        self.ranks = [
            _Rank(i, g, hosts[i], seconds[i], scratch[i], list(g.after), [deque() for _ in range(threads)],
                  [True] * threads, [deque() for _ in range(threads)], len(g.after))
            for i, g in enumerate(graphs)
        ]  # fmt: skip

    def play(self) -> list[Ran]:
        for rank in self.ranks:
            for i, count in enumerate(rank.graph.after):
                if count == 0:
                    rank.stacks[i % len(rank.stacks)].append(i)  # dealt out from outside: oldest first
            for thread in range(len(rank.idle)):
                self._next(rank, thread)
        while True:
            host = min(self.hosts, key=lambda h: h.next_s)
            soon = host.next_s
            if self.beside and self.beside[0][0] < soon:
                soon, _, done = heapq.heappop(self.beside)
                self._advance(soon)
            elif host.active:
                self._advance(soon)
                _, _, done = heapq.heappop(host.active)
            else:
                break
            done()
        for rank in self.ranks:
            if rank.left:
                stuck = sorted(k for k, come in self.come.items() if come)
                raise PlanError("the ranks wait for each other", given=str(stuck[:3] or f"rank {rank.number}"))
        return [
            Ran(
                rank.end_s,
                *peak_bytes(rank.graph, rank.order, rank.scratch),
                sum(rank.seconds),
                sum(map(self.exchange_s, rank.graph.exchanges.values())),
            )
            for rank in self.ranks
        ]

    def _advance(self, now_s: float) -> None:
        for host in self.hosts:
            host.advance(now_s)
        self.now_s = now_s

    def _start(self, rank: _Rank, seconds: float, done: Callable[[], None]) -> None:
        host = self.hosts[rank.host]
        self.count += 1
        heapq.heappush(host.active, (host.clock_s + seconds, self.count, done))

    def _next(self, rank: _Rank, thread: int) -> None:
        """What a thread does now: it runs what takes no time at once, then starts one kernel or waits."""
        inline, stack = rank.inline[thread], rank.stacks[thread]
        while True:
            if inline:
                node = inline.popleft()
            elif stack:
                node = stack.popleft()
            else:
                other = next((s for s in rank.stacks if s), None)
                if other is None:
                    rank.idle[thread] = True
                    return
                node = other.pop()
            rank.idle[thread] = False
            rank.order.append(node)
            if node in rank.graph.exchanges:
                self._meet(rank, node)
                continue
            if rank.seconds[node] > 0:
                self._start(rank, rank.seconds[node], partial(self._ended, rank, thread, node))
                return
            self._follow(rank, thread, node)

    def _ended(self, rank: _Rank, thread: int, node: int) -> None:
        self._follow(rank, thread, node)
        self._next(rank, thread)

    def _follow(self, rank: _Rank, thread: int, node: int) -> None:
        """A node has ended: its followers that wait for nobody else are dealt out."""
        rank.order.append(~node)
        rank.left -= 1
        rank.end_s = self.now_s
        kept = -1
        inline, stack = rank.inline[thread], rank.stacks[thread]
        pushed = False
        for other in rank.graph.followers[node]:
            rank.waiting[other] -= 1
            if rank.waiting[other]:
                continue
            if rank.seconds[other] < SHORT_S and other not in rank.graph.exchanges:
                inline.append(other)
            else:
                if kept >= 0:
                    stack.appendleft(kept)
                    pushed = True
                kept = other
        if kept >= 0:
            if inline:
                stack.appendleft(kept)
                pushed = True
            else:
                inline.append(kept)
        if pushed:
            self._wake(rank, thread)

    def _wake(self, rank: _Rank, but: int) -> None:
        for thread, idle in enumerate(rank.idle):
            if idle and thread != but:
                rank.idle[thread] = False
                self._next(rank, thread)

    def _meet(self, rank: _Rank, node: int) -> None:
        """An exchange starts on one rank; the last one to come starts it for all."""
        what = rank.graph.exchanges[node]
        key = (what.key, what.ranks)
        come = self.come.setdefault(key, [])
        come.append((rank, node))
        if len(come) < len(what.ranks):
            return
        del self.come[key]
        seconds, left = self.exchange_s(what), len(come)

        def done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                for member, i in come:
                    self._exchanged(member, i)

        for member, _ in come:
            if self.shared:
                self._start(member, seconds, done)
            else:
                self.count += 1
                heapq.heappush(self.beside, (self.now_s + seconds, self.count, done))

    def _exchanged(self, rank: _Rank, node: int) -> None:
        """The engine's thread hands what follows an exchange to the executor's."""
        thread = next((i for i, idle in enumerate(rank.idle) if idle), -1)
        if thread >= 0:
            rank.idle[thread] = False
            self._follow(rank, thread, node)
            self._next(rank, thread)
            return
        rank.inline.append(deque())
        rank.stacks.append(deque())
        self._follow(rank, len(rank.stacks) - 1, node)
        moved = [*rank.inline.pop(), *rank.stacks.pop()]
        rank.stacks[0].extend(moved)
