"""Simulates tasks by discrete events; each task has a resource, a duration, and predecessors.

A resource runs one task at a time. A stream (a rank's compute, copy or network stream) runs its tasks in the order in
which they were added; a link shared by ranks serves tasks in the order in which they become ready. Ranks that do the
same at the same time need only one simulated rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from whale.errors import PlanError
from whale.ir.pipeline_schedule import Schedule


@dataclass(slots=True)
class Tasks:
    """Holds a growing list of tasks; `add` returns a task's number, by which later tasks refer to it.

    Attributes:
        resource: number of the stream or link that runs each task.
        seconds: duration of each task.
        after: numbers of the tasks that each waits for.
        held_bytes: change of memory by each task, at its start if positive, at its end if negative.
    """

    resource: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    held_bytes: list[float] = field(default_factory=list)

    def add(self, resource: int, seconds: float, after: tuple[int, ...] = (), held_bytes: float = 0.0) -> int:
        """Adds a task and returns its number (see the attributes for the arguments)."""
        self.resource.append(resource)
        self.seconds.append(seconds)
        self.after.append(after)
        self.held_bytes.append(held_bytes)
        return len(self.seconds) - 1


def pipeline_tasks(
    orders: Schedule,
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    held_bytes: Sequence[Sequence[float]],
) -> Tasks:
    """Creates one task for each pass of a pipeline schedule, on its stage's stream.

    Args:
        orders: each stage's (chunk, micro-batch, is backward), in order.
        forward_s, backward_s: seconds of one micro-batch, indexed [stage][chunk], sends that the stage waits for
            included.
        held_bytes: activations that a forward pass holds until the end of its backward pass, indexed [stage][chunk].
    """
    tasks = Tasks()
    stages, last = len(orders), len(orders) * len(forward_s[0]) - 1
    count = len(orders[0]) // (2 * len(forward_s[0]))
    # A task waits for tasks of other stages that are added later: their numbers come first.
    forward, backward_of = [0] * (count * (last + 1)), [0] * (count * (last + 1))
    number = 0
    for stage, order in enumerate(orders):
        for chunk, micro_batch, backward in order:
            (backward_of if backward else forward)[(chunk * stages + stage) * count + micro_batch] = number
            number += 1
    for stage, order in enumerate(orders):
        ahead, back, held = forward_s[stage], backward_s[stage], held_bytes[stage]
        # By whole columns, which is several times faster than pass by pass.
        tasks.resource += [stage] * len(order)
        tasks.seconds += [back[chunk] if backward else ahead[chunk] for chunk, _, backward in order]
        tasks.held_bytes += [-held[chunk] if backward else held[chunk] for chunk, _, backward in order]
        for chunk, micro_batch, backward in order:
            part = chunk * stages + stage
            at = part * count + micro_batch
            if not backward:
                tasks.after.append((forward[at - count],) if part else ())
            else:
                tasks.after.append((forward[at],) if part == last else (backward_of[at + count],))
    return tasks


def least_end_s(
    forward_s: Sequence[Sequence[float]], backward_s: Sequence[Sequence[float]], micro_batches: int
) -> float:
    """Returns a lower bound of the seconds at which the first stage's last pass ends under 1F1B.

    Computing the bound takes equally long for any number of micro-batches, so a search can discard strategies by it.

    The bound is the largest that any stage gives: the forward passes before it of the first micro-batch, then all
    passes of the stage itself, then one backward pass of each stage before it. A stage may also have to wait for its
    first backward pass: until a micro-batch has gone forward through all chunks and back through the later stages; then
    the passes that it cannot have run before that follow.

    Args:
        forward_s, backward_s: as in `whale_ops.pipeline.play_pipeline`.
    """
    stages, chunks = len(forward_s), len(forward_s[0])
    groups = max(1, micro_batches // stages)
    size, total = -(-micro_batches // groups), micro_batches * chunks
    through_s = sum(map(sum, forward_s))  # all forward passes of a micro-batch
    behind_s, before_s = sum(back[-1] for back in backward_s), 0.0
    begin_s = least_s = 0.0
    for stage, (ahead, back) in enumerate(zip(forward_s, backward_s)):
        behind_s -= back[-1]
        if chunks == 1:
            first = min(micro_batches, stages - stage)  # forward passes before the first backward one
        else:
            first = total if groups == 1 else min(total, 2 * (stages - 1 - stage) + (chunks - 1) * size + 1)
        if first <= size * chunks and first < total:
            whole, left = divmod(first, size)
            done_s = size * sum(ahead[:whole]) + (left * ahead[whole] if left else 0.0)
        else:
            done_s = min(first * max(ahead), micro_batches * sum(ahead))
        passes_s = micro_batches * (sum(ahead) + sum(back))
        waiting_s = through_s + behind_s + passes_s - done_s
        least_s = max(least_s, before_s + max(begin_s + passes_s, waiting_s))
        begin_s += ahead[0]
        before_s += back[0]
    return max(least_s, begin_s + before_s)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Holds the start and end of every task of a simulation.

    Attributes:
        start_s, end_s: start and end of each task, by its number.
        total_s: end of the last task.
        busy_s: resource -> sum of its tasks' seconds.
    """

    start_s: list[float]
    end_s: list[float]
    total_s: float
    busy_s: dict[int, float]


def simulate(tasks: Tasks, shared: frozenset[int] = frozenset()) -> Timeline:
    """Simulates tasks; each starts when its predecessors have ended and its resource is free.

    Args:
        shared: resources that run tasks in the order in which they become ready; all others are streams, which run them
            in the order in which they were added.

    Raises:
        PlanError: tasks wait for each other for ever.
    """
    start_s, end_s = _simulate_by_time(tasks, shared) if shared else _simulate_by_stream(tasks)
    busy_s: dict[int, float] = {}
    for on, seconds in zip(tasks.resource, tasks.seconds):
        busy_s[on] = busy_s.get(on, 0.0) + seconds
    return Timeline(start_s, end_s, max(end_s, default=0.0), busy_s)


def _simulate_by_stream(tasks: Tasks) -> tuple[list[float], list[float]]:
    """Returns (start, end) of every task if all resources are streams, whose order is known without a queue of
    events.
    """
    count, after, seconds = len(tasks.seconds), tasks.after, tasks.seconds
    start_s, end_s = [0.0] * count, [-1.0] * count
    streams: dict[int, list[int]] = {}
    for task, on in enumerate(tasks.resource):
        streams.setdefault(on, []).append(task)
    place = dict.fromkeys(streams, 0)
    free_s = dict.fromkeys(streams, 0.0)
    waiting: dict[int, list[int]] = {}  # task -> streams whose next task is after it
    runnable = list(streams)
    while runnable:
        on = runnable.pop()
        queue, now = streams[on], free_s[on]
        for i in range(place[on], len(queue)):
            task = queue[i]
            for other in after[task]:
                end = end_s[other]
                if end < 0:
                    waiting.setdefault(other, []).append(on)
                    break
                if end > now:
                    now = end
            else:
                start_s[task] = now
                now += seconds[task]
                end_s[task] = free_s[on] = now
                if task in waiting:
                    runnable += waiting.pop(task)
                continue
            place[on] = i
            break
        else:
            place[on] = len(queue)
    stuck = [queue[place[on]] for on, queue in streams.items() if place[on] < len(queue)]
    if stuck:
        raise _never(min(stuck), count)
    return start_s, end_s


def _simulate_by_time(tasks: Tasks, shared: frozenset[int]) -> tuple[list[float], list[float]]:
    """Returns (start, end) of every task if some resources serve tasks in the order in which they become ready."""
    count, seconds = len(tasks.seconds), tasks.seconds
    followers: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    last: dict[int, int] = {}
    for task, on in enumerate(tasks.resource):
        before = tasks.after[task]
        if on not in shared:
            before = (*before, last[on]) if on in last else before
            last[on] = task
        waiting[task] = len(before)
        for other in before:
            followers[other].append(task)
    ready_s, start_s, end_s = [0.0] * count, [0.0] * count, [-1.0] * count
    free_s: dict[int, float] = {}
    heap = [(0.0, task) for task in range(count) if not waiting[task]]
    while heap:
        ready, task = heapq.heappop(heap)
        on = tasks.resource[task]
        start_s[task] = max(ready, free_s.get(on, 0.0))
        end_s[task] = free_s[on] = end = start_s[task] + seconds[task]
        for other in followers[task]:
            ready_s[other] = max(ready_s[other], end)
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(heap, (ready_s[other], other))
    if any(waiting):
        raise _never(next(task for task in range(count) if waiting[task]), count)
    return start_s, end_s


def _never(task: int, count: int) -> PlanError:
    return PlanError(
        "simulated tasks wait for each other for ever",
        given=f"task {task} of {count} never starts",
        action="this is a fault of Whale: please report it with the command and the files that it reads",
    )


def memory_curve(tasks: Tasks, timeline: Timeline, ranks: Sequence[int]) -> list[tuple[float, float]]:
    """Returns (seconds, bytes held from then on) of one rank over time.

    Args:
        ranks: the resources that belong to the rank.
    """
    own = set(ranks)
    changes = []
    for task, held in enumerate(tasks.held_bytes):
        if held and tasks.resource[task] in own:
            changes.append((timeline.start_s[task] if held > 0 else timeline.end_s[task], held))
    curve, level = [(0.0, 0.0)], 0.0
    # At the same time, releases come first: the next task may take the buffer that a task gives back.
    for second, held in sorted(changes):
        level += held
        curve.append((second, level))
    return curve


def not_hidden_s(reduce_s: float, counts: Sequence[int], back: Sequence[float], group: int, lost: float = 0.0) -> float:
    """Returns the seconds that the gradient reduction adds after the last backward pass of a stage.

    That is the part that the last backward passes do not hide, plus the time by which collectives slow these passes
    down.

    Each layer's reduction begins once its gradient is complete. Chunks end one after the other, and after each the next
    one still has its passes for the last `group` micro-batches (Narayanan et al., "Efficient large-scale language model
    training", SC 2021, figure 4). The reductions of the last chunk overlap its last pass, except for that of its last
    layer.

    Args:
        reduce_s: seconds to reduce the gradients of all layers.
        counts: number of layers of each chunk.
        back: seconds of one backward pass of each chunk.
        group: number of micro-batches that a chunk processes in a row.
        lost: fraction of a device's units that a collective takes from kernels beside it.
    """
    each_s = reduce_s / max(1, sum(counts))
    free_s, ready_s = -math.inf, -group * sum(back)  # 0: the end of the last pass
    for number, seconds in zip(reversed(counts[1:]), reversed(back[1:])):
        ready_s += group * seconds
        free_s = max(free_s, ready_s) + each_s * number
    own_s = each_s * counts[0]
    exposed_s = max(min(each_s, own_s), own_s + max(free_s, -back[0]))
    return exposed_s + lost * (reduce_s - exposed_s)
