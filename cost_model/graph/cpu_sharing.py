"""Simulates the threads of a host that share its cores in time slices, as Linux's scheduler does.

A thread that wakes up takes a free core. Without a free core it queues behind the other waiting threads. A running
thread continues until it has nothing to do or its slice is over, which for computing threads is a tick of the clock. An
urgent thread (one that has asked for short slices, as the engine of whale_ops does) preempts a computing one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

Job = tuple[float, Callable[[], None]]  # seconds on a core, and what is done at their end


class Clock:
    """Runs scheduled events in order of simulated time; simultaneous events keep the order in which they were
    scheduled.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def schedule(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedules ``call`` to run `seconds` from now in simulated time."""
        self._count += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._count, call))

    def ahead(self, seconds: float) -> bool:
        """Advances the clock by `seconds` if no event is due before then; returns whether it did.

        This saves scheduling an event that would be the next one anyway. After False, the caller has to schedule the
        event.
        """
        then_s = self.now_s + seconds
        if self._events and self._events[0][0] <= then_s:
            return False
        self.now_s = then_s
        return True

    def play(self) -> None:
        """Runs events in order until none is left."""
        while self._events:
            self.now_s, _, call = heapq.heappop(self._events)
            call()


@dataclass(eq=False, slots=True)
class Thread:
    """Represents a simulated thread that competes for a core.

    Attributes:
        next_job: returns the next (seconds on a core, function to call at their end); None: the thread sleeps until
            woken.
        urgent: whether it preempts computing threads when it wakes up.
        asleep: whether it has no job.
        left_s: seconds that the present job still needs.
        done: what to call at the end of the present job; None: there is none.
        since_s: time up to which `left_s` is accounted for.
        slice_end_s: time at which its slice on the core ends.
        turn: incremented whenever it starts or stops on a core, which cancels events scheduled for earlier turns.
    """

    next_job: Callable[[], Job | None]
    urgent: bool = False
    asleep: bool = True
    left_s: float = 0.0
    done: Callable[[], None] | None = None
    since_s: float = 0.0
    slice_end_s: float = 0.0
    turn: int = 0  # what was planned for another turn on a core is void


@dataclass(slots=True)
class Host:
    """Simulates the cores of a host, and the threads that run on them or wait for one.

    Attributes:
        cores: number of cores that the job may use; a fraction (quota) makes all of them slower.
        slice_s: seconds for which a thread keeps its core if others wait.
        running, waiting: threads on a core, and in the queue for one.
        speed: speed of each core, 1 without a fractional quota.
    """

    clock: Clock
    cores: float
    slice_s: float
    running: list[Thread] = field(default_factory=list)
    waiting: deque[Thread] = field(default_factory=deque)
    speed: float = 1.0
    _most: int = 0

    def __post_init__(self) -> None:
        self._most = math.ceil(self.cores)
        # The speed of a thread on a core, as a part of a whole core's: a quota is shared by its cores.
        self.speed = self.cores / self._most

    @property
    def full(self) -> bool:
        """Returns True if every core runs a thread."""
        return len(self.running) >= self._most

    def wake(self, thread: Thread) -> None:
        """Wakes a thread that has a job: starts it on a free core or queues it; an urgent one preempts a computing
        thread.
        """
        if not thread.asleep:
            return
        thread.asleep = False
        if self.full and thread.urgent:
            others = [t for t in self.running if t.done is not None and not t.urgent]
            if others:
                self._stop(min(others, key=lambda t: t.slice_end_s), first=True)
        if self.full:
            self.waiting.append(thread)
        else:
            self._start(thread)

    def _start(self, thread: Thread) -> None:
        self.running.append(thread)
        thread.slice_end_s = self.clock.now_s + self.slice_s
        self._go_on(thread)

    def _go_on(self, thread: Thread) -> None:
        until_s = self._until(thread)
        if until_s is not None:
            self.clock.schedule(until_s, partial(self._turn_over, thread, thread.turn))

    def _until(self, thread: Thread) -> float | None:
        """Returns the seconds until the running thread's job or slice ends; None if it has no job: then it leaves the
        core.
        """
        now_s = self.clock.now_s
        if thread.done is None:
            job = thread.next_job()
            if job is None:
                thread.asleep = True
                self._leave(thread)
                return None
            thread.left_s, thread.done = job
        thread.since_s = now_s
        thread.turn += 1
        return min(thread.left_s / self.speed, max(0.0, thread.slice_end_s - now_s))

    def _turn_over(self, thread: Thread, turn: int) -> None:
        if turn != thread.turn:
            return
        clock = self.clock
        while True:
            now_s = clock.now_s
            if now_s >= thread.slice_end_s:
                if self.waiting:
                    self._stop(thread)
                else:
                    thread.slice_end_s = now_s + self.slice_s
            self._account(thread)
            if thread.left_s <= 0 and thread.done is not None:
                done, thread.done = thread.done, None
                done()
            if thread not in self.running or (until_s := self._until(thread)) is None:
                return
            # Mostly nothing else happens meanwhile.
            if not clock.ahead(until_s):
                clock.schedule(until_s, partial(self._turn_over, thread, thread.turn))
                return

    def _account(self, thread: Thread) -> None:
        thread.left_s -= (self.clock.now_s - thread.since_s) * self.speed
        if thread.left_s < 1e-12:
            thread.left_s = 0.0
        thread.since_s = self.clock.now_s

    def _stop(self, thread: Thread, first: bool = False) -> None:
        self._account(thread)
        thread.turn += 1
        (self.waiting.appendleft if first else self.waiting.append)(thread)
        self._leave(thread, first)

    def _leave(self, thread: Thread, keep: bool = False) -> None:
        self.running.remove(thread)
        if not keep and self.waiting and not self.full:
            self._start(self.waiting.popleft())
