"""Simulates the ranks' programs by discrete events: executor threads, engines, the cores that they share, exchanges.

Each rank has executor threads as in TensorFlow (core/common_runtime/executor.cc): a thread continues with the short
kernels that its last one has made ready, keeps one longer kernel for itself, and pushes the others on its stack; an
idle thread takes the oldest kernel from another's stack. Exchanges are run by one more thread, the engine of whale_ops:
it notifies the other ranks of its arrival, and the last one to arrive lets all engines move their parts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cost_model.graph.cpu_sharing import Clock, Host, Job, Thread
from cost_model.graph.executor_graph import Steps
from cost_model.graph.traffic import Exchange
from whale.errors import PlanError

SLICE_S = 4e-3  # a tick of Linux's clock at 250 Hz
SHORT_S = 2.5e-6  # kOpIsExpensiveThresholdCycles: 8,000


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a simulated step on one rank.

    Attributes:
        end_s: when its last node ended.
        order: a node where it started, its complement (~node) where it had ended; order_s: when.
        compute_s: its kernels, alone on a core.
        exchange_s: the same of its exchanges.
    """

    end_s: float
    order: list[int]
    compute_s: float
    exchange_s: float
    order_s: list[float]


@dataclass(frozen=True, slots=True)
class Sharing:
    """The hosts and cores that ranks share, and how.

    Attributes:
        hosts: of each rank, the number of its host; a GPU is a host of its own with one core.
        cores: of each host.
        threads: executor threads of a rank.
        slice_s: time slice of a computing thread when others wait.
        wake_s: delay until an engine gets a core when all are busy.
        exchanges_compute: whether engines occupy the ranks' cores; else exchanges overlap them.
    """

    hosts: Sequence[int]
    cores: Sequence[float]
    threads: int = 2
    slice_s: float = SLICE_S
    wake_s: float = 0.0
    exchanges_compute: bool = True


@dataclass(slots=True)
class _Rank:
    number: int
    graph: Steps
    host: Host
    seconds: Sequence[float]
    waiting: list[int]
    stacks: list[deque[int]]
    inline: list[deque[int]]
    left: int
    threads: list[Thread] = field(default_factory=list)
    engine: Thread = field(default_factory=lambda: Thread(lambda: None))
    jobs: deque[Job] = field(default_factory=deque)
    met: Counter[str] = field(default_factory=Counter)
    end_s: float = 0.0
    order: list[int] = field(default_factory=list)
    order_s: list[float] = field(default_factory=list)


def run(
    graphs: Sequence[Steps],
    seconds: Sequence[Sequence[float]],
    exchange_s: Callable[[Exchange], float],
    sharing: Sharing,
    members: Sequence[int] | None = None,
) -> list[Played]:
    """Simulates one step of all ranks, or of some that represent the others.

    Args:
        graphs: of the ranks.
        members: numbers of the ranks that the graphs are of; None: all, in their order. No rank waits for a rank that
            is not simulated.
        seconds: of each node alone on a core (or device); nodes of 0 take no time.
        exchange_s: seconds of work of an exchange for each of its ranks.

    Raises:
        PlanError: the ranks wait for each other.
    """
    return _Run(graphs, seconds, exchange_s, sharing, range(len(graphs)) if members is None else members).play()


class _Run:
    def __init__(
        self,
        graphs: Sequence[Steps],
        seconds: Sequence[Sequence[float]],
        exchange_s: Callable[[Exchange], float],
        sharing: Sharing,
        members: Sequence[int],
    ) -> None:
        self.exchange_s, self.sharing, self.members = exchange_s, sharing, frozenset(members)
        self.clock = Clock()
        hosts = [Host(self.clock, cores, sharing.slice_s) for cores in sharing.cores]
        self.come: dict[tuple[str, tuple[int, ...]], list[tuple[_Rank, int]]] = {}
        count = sharing.threads
        self.ranks = [
            _Rank(number, g, hosts[sharing.hosts[number]], seconds[i], list(g.after), [deque() for _ in range(count)],
                  [deque() for _ in range(count)], len(g.after))
            for i, (number, g) in enumerate(zip(members, graphs))
        ]  # fmt: skip
        for rank in self.ranks:
            rank.threads = [Thread(partial(self._next, rank, number)) for number in range(count)]
            rank.engine = Thread(partial(_pop, rank.jobs), urgent=True)

    def play(self) -> list[Played]:
        for rank in self.ranks:
            for i, count in enumerate(rank.graph.after):
                if count == 0:
                    rank.stacks[i % len(rank.stacks)].append(i)  # dealt out from outside: oldest first
        for number in range(self.sharing.threads):
            for rank in self.ranks:
                rank.host.wake(rank.threads[number])
        self.clock.play()
        for rank in self.ranks:
            if rank.left:
                stuck = sorted(k for k, come in self.come.items() if come)
                raise PlanError("the ranks wait for each other", given=str(stuck[:3] or f"rank {rank.number}"))
        return [
            Played(
                rank.end_s,
                rank.order,
                sum(rank.seconds),
                sum(map(self.exchange_s, rank.graph.exchanges.values())),
                rank.order_s,
            )
            for rank in self.ranks
        ]

    def _next(self, rank: _Rank, thread: int) -> Job | None:
        """Executes nodes that take no time, and returns the thread's next kernel; None: there is none."""
        inline, stack = rank.inline[thread], rank.stacks[thread]
        while True:
            if inline:
                node = inline.popleft()
            elif stack:
                node = stack.popleft()
            else:
                other = next((s for s in rank.stacks if s), None)
                if other is None:
                    return None
                node = other.pop()
            rank.order.append(node)
            rank.order_s.append(self.clock.now_s)
            if node in rank.graph.exchanges:
                self._meet(rank, node)
            elif rank.seconds[node] > 0:
                return rank.seconds[node], partial(self._follow, rank, thread, node)
            else:
                self._follow(rank, thread, node)

    def _end_node(self, rank: _Rank, node: int) -> list[int]:
        """Ends a node and returns its successors that are ready now."""
        rank.order.append(~node)
        rank.order_s.append(self.clock.now_s)
        rank.left -= 1
        rank.end_s = self.clock.now_s
        ready = []
        for other in rank.graph.followers[node]:
            rank.waiting[other] -= 1
            if not rank.waiting[other]:
                ready.append(other)
        return ready

    def _follow(self, rank: _Rank, thread: int, node: int) -> None:
        """Assigns the ready successors of a node to threads, on the thread that ran it."""
        inline, stack = rank.inline[thread], rank.stacks[thread]
        kept, pushed = -1, 0
        for other in self._end_node(rank, node):
            if rank.seconds[other] < SHORT_S and other not in rank.graph.exchanges:
                inline.append(other)
            else:
                if kept >= 0:
                    stack.appendleft(kept)
                    pushed += 1
                kept = other
        if kept >= 0:
            if inline:
                stack.appendleft(kept)
                pushed += 1
            else:
                inline.append(kept)
        self._wake(rank, pushed)

    def _wake(self, rank: _Rank, count: int) -> None:
        """Wakes up to `count` sleeping threads."""
        if not count:
            return
        for thread in [t for t in rank.threads if t.asleep][:count]:
            rank.host.wake(thread)

    def _meet(self, rank: _Rank, node: int) -> None:
        """Starts an exchange on one rank; the last rank to arrive starts it for all."""
        what = rank.graph.exchanges[node]
        number = rank.met[what.key]  # micro-batches use one key after the other
        rank.met[what.key] += 1
        key = (f"{what.key}/{number}", what.ranks)

        def announce() -> None:
            come = self.come.setdefault(key, [])
            come.append((rank, node))
            if len(come) == sum(one in self.members for one in what.ranks):
                del self.come[key]
                seconds = self.exchange_s(what)
                for member, i in come:
                    self._submit(member, seconds, partial(self._end_exchange, member, i))

        if self.sharing.exchanges_compute:
            self._submit(rank, 0.0, announce)
        else:
            announce()

    def _submit(self, rank: _Rank, seconds: float, done: Callable[[], None]) -> None:
        """Submits work to a rank's engine, which processes it in order."""
        if not self.sharing.exchanges_compute:
            self.clock.schedule(seconds, done)
            return
        rank.jobs.append((seconds, done))
        if rank.engine.asleep:
            delay_s = self.sharing.wake_s if rank.host.full else 0.0
            self.clock.schedule(delay_s, partial(rank.host.wake, rank.engine))

    def _end_exchange(self, rank: _Rank, node: int) -> None:
        """Ends an exchange: the engine passes its successors to the executor's threads, one by one."""
        ready = self._end_node(rank, node)
        rank.stacks[0].extend(ready)
        self._wake(rank, len(ready))


def _pop(jobs: deque[Job]) -> Job | None:
    return jobs.popleft() if jobs else None
