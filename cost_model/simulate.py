"""Discrete events: tasks on resources, after other tasks, for so long.

A resource (a rank's compute, copy or network stream, a link that ranks share) does one task at a time. Tasks of a
stream that must keep program order depend on the one before; a shared link takes whoever is ready first. Ranks that do
the same at the same time need one simulated rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from whale.errors import PlanError


@dataclass(slots=True)
class Tasks:
    """A growing list of tasks; `add` gives the number by which later ones refer to a task."""

    resource: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    held_bytes: list[float] = field(default_factory=list)

    def add(self, resource: int, seconds: float, after: tuple[int, ...] = (), held_bytes: float = 0.0) -> int:
        """One more task. `held_bytes`: memory its rank holds more (at its start) or less (at its end, negative)."""
        self.resource.append(resource)
        self.seconds.append(seconds)
        self.after.append(after)
        self.held_bytes.append(held_bytes)
        return len(self.seconds) - 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every task ran.

    Attributes:
        start_s, end_s: of each task.
        total_s: end of the last task.
        busy_s: by resource, the sum of its tasks' seconds.
    """

    start_s: list[float]
    end_s: list[float]
    total_s: float
    busy_s: dict[int, float]


def simulate(tasks: Tasks) -> Timeline:
    """Plays the tasks: each starts when those before it have ended and its resource is free; PlanError on a cycle."""
    count = len(tasks.seconds)
    waiting = [len(before) for before in tasks.after]
    followers: list[list[int]] = [[] for _ in range(count)]
    for task, before in enumerate(tasks.after):
        for other in before:
            followers[other].append(task)
    ready_s = [0.0] * count
    start_s, end_s = [0.0] * count, [0.0] * count
    free_s: dict[int, float] = {}
    busy_s: dict[int, float] = {}
    heap = [(0.0, task) for task in range(count) if not waiting[task]]
    heapq.heapify(heap)
    done = 0
    resource, seconds = tasks.resource, tasks.seconds
    while heap:
        ready, task = heapq.heappop(heap)
        on = resource[task]
        free = free_s.get(on, 0.0)
        start = ready if ready > free else free
        end = start + seconds[task]
        start_s[task], end_s[task], free_s[on] = start, end, end
        busy_s[on] = busy_s.get(on, 0.0) + seconds[task]
        done += 1
        for other in followers[task]:
            if end > ready_s[other]:
                ready_s[other] = end
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(heap, (ready_s[other], other))
    if done < count:
        stuck = next(task for task in range(count) if waiting[task])
        raise PlanError("tasks wait for each other", given=f"task {stuck} of {count} never starts")
    return Timeline(start_s, end_s, max(end_s, default=0.0), busy_s)


def memory_curve(tasks: Tasks, timeline: Timeline, ranks: Sequence[int]) -> list[tuple[float, float]]:
    """(second, bytes held from then on) of one rank, whose resources are `ranks`."""
    own = set(ranks)
    changes = []
    for task, held in enumerate(tasks.held_bytes):
        if held and tasks.resource[task] in own:
            changes.append((timeline.start_s[task] if held > 0 else timeline.end_s[task], held))
    curve, level = [(0.0, 0.0)], 0.0
    # At one instant releases come first: the buffer that a task gives back is what the next one takes.
    for second, held in sorted(changes):
        level += held
        curve.append((second, level))
    return curve
