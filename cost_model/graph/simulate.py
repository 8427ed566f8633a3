"""Simulates the ranks' programs by discrete events: executor threads, communication threads, shared cores, exchanges.

Each rank has executor threads as in TensorFlow (core/common_runtime/executor.cc): a thread continues with the short
kernels that its last kernel has made ready, keeps one longer kernel for itself, and pushes the others on its stack; an
idle thread steals the oldest kernel from another's stack. Exchanges are run by one more thread, the engine of
whale_ops: it announces the rank's arrival to the other ranks, and once the last rank has arrived, all engines move
their parts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cost_model.graph.cpu_sharing import Clock, Host, Job, Thread
from cost_model.graph.executor_graph import Steps
from cost_model.graph.traffic import Exchange
from whale.errors import REPORT_FAULT, PlanError

SLICE_S = 4e-3  # a tick of Linux's clock at 250 Hz
SHORT_S = 2.5e-6  # kOpIsExpensiveThresholdCycles: 8,000


@dataclass(frozen=True, slots=True)
class Played:
    """Holds the result of a simulated step on one rank.

    Attributes:
        end_s: seconds until its last node ended.
        order: events in order: a node's number when it started, its complement (~node) when it ended.
        compute_s: sum of its kernels' seconds, each alone on a core.
        exchange_s: sum of its exchanges' seconds, without waiting for other ranks.
        order_s: seconds at which each event of `order` happened.
    """

    end_s: float
    order: list[int]
    compute_s: float
    exchange_s: float
    order_s: list[float]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Describes how ranks share hosts and cores.

    Attributes:
        hosts: for each rank, the number of its host; a GPU counts as a host of its own with one core.
        cores: number of cores of each host.
        threads: number of executor threads of each rank.
        slice_s: seconds for which a computing thread keeps its core if others wait.
        wake_s: seconds until a communication thread gets a core if all are busy.
        exchanges_compute: whether exchanges occupy the ranks' cores; if not, they overlap computation.
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
    """Simulates one step of all ranks, or of some ranks that represent the others.

    Args:
        graphs: numbered nodes of each simulated rank.
        seconds: for each of them, the seconds of each node alone on a core (or device); nodes of 0 take no time.
        exchange_s: returns the seconds that an exchange takes on each of its ranks once all have arrived.
        sharing: how ranks share hosts and cores.
        members: rank of each of `graphs`; None: 0, 1, 2, ... Exchanges do not wait for ranks that are not simulated.

    Raises:
        PlanError: the ranks wait for each other for ever.
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
                    rank.stacks[i % len(rank.stacks)].append(i)  # the step's first nodes, dealt out to threads in turn
        for number in range(self.sharing.threads):
            for rank in self.ranks:
                rank.host.wake(rank.threads[number])
        self.clock.play()
        for rank in self.ranks:
            if rank.left:
                stuck = sorted(k for k, come in self.come.items() if come)
                raise PlanError(
                    "the simulated ranks of the plan wait for each other for ever",
                    given=f"exchanges (key, ranks) that only some ranks reach: {stuck[:3]}"
                    if stuck
                    else f"rank {rank.number} does not reach the end of its step",
                    expected="each exchange is reached by all of its ranks, in an order that lets every rank go on",
                    action=REPORT_FAULT,
                )
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
        """Runs nodes that take no time; returns the thread's next kernel, or None if none is ready."""
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
        """Ends a node; returns its successors whose predecessors have all ended."""
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
        """Ends a node and distributes its ready successors: short ones and one long one to the same thread, others
        to its stack.
        """
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
        """Announces a rank's arrival at an exchange; the arrival of the last rank starts the exchange on all of
        them.
        """
        what = rank.graph.exchanges[node]
        number = rank.met[what.key]  # every micro-batch uses the same key, one after the other
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
        """Queues work for a rank's communication thread, which runs it in order, or schedules it if exchanges need
        no core.
        """
        if not self.sharing.exchanges_compute:
            self.clock.schedule(seconds, done)
            return
        rank.jobs.append((seconds, done))
        if rank.engine.asleep:
            delay_s = self.sharing.wake_s if rank.host.full else 0.0
            self.clock.schedule(delay_s, partial(rank.host.wake, rank.engine))

    def _end_exchange(self, rank: _Rank, node: int) -> None:
        """Ends an exchange on one rank: its ready successors go to the executor's threads, one by one."""
        ready = self._end_node(rank, node)
        rank.stacks[0].extend(ready)
        self._wake(rank, len(ready))


def _pop(jobs: deque[Job]) -> Job | None:
    return jobs.popleft() if jobs else None
