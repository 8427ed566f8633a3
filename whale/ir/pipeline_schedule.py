"""Defines pipeline schedules: pure functions from (stages, chunks, micro-batches) to the order of phases on each
device.

Chunk ``c`` of device ``s`` holds part ``c * stages + s`` of the model's layers. A phase is the forward pass (F) or the
backward pass (B) of one chunk for one micro-batch. ZB-H1 splits the backward pass in two: B computes the gradients of
the chunk's inputs, for which the previous device waits, and W those of its weights, for which no device waits.

    1f1b, 3 stages, 4 micro-batches
    0  F0 F1 F2 B0 F3 B1 B2 B3
    1  F0 F1 B0 F2 B1 F3 B2 B3
    2  F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from whale.errors import PlanError

NAMES = ("gpipe", "1f1b", "zb-h1")


class PhaseKind(IntEnum):
    """Enumerates the kinds of phases: forward, backward, and the weight gradients of a split backward pass (W)."""

    F = 0
    B = 1
    W = 2


class Phase(NamedTuple):
    """Represents the forward, backward or weight-gradient pass of one chunk for one micro-batch.

    As text ``F3.1``: forward pass of micro-batch 3 through chunk 1; chunk 0 is left out.
    """

    chunk: int
    micro_batch: int
    kind: PhaseKind

    def __str__(self) -> str:
        return f"{self.kind.name}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


Row = list[Phase]
Schedule = list[Row]


def schedule_gpipe(stages: int, micro_batches: int) -> Schedule:
    """Returns the GPipe schedule: all forward passes, then all backward passes in reverse order.

    Source: Huang et al., "GPipe", 2019.
    """
    forwards = [Phase(0, m, PhaseKind.F) for m in range(micro_batches)]
    return [forwards + [Phase(0, m, PhaseKind.B) for m in reversed(range(micro_batches))] for _ in range(stages)]


def schedule_1f1b(stages: int, micro_batches: int) -> Schedule:
    """Returns the 1F1B schedule: forward passes until the pipeline is full, then one forward and one backward in turn.

    Source: Narayanan et al., SC 2021.
    """
    rows: Schedule = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, micro_batches)
        row = [Phase(0, m, PhaseKind.F) for m in range(warm)]
        for m in range(micro_batches - warm):
            row += [Phase(0, m + warm, PhaseKind.F), Phase(0, m, PhaseKind.B)]
        rows.append(row + [Phase(0, m, PhaseKind.B) for m in range(micro_batches - warm, micro_batches)])
    return rows


def schedule_interleaved(stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Returns the interleaved 1F1B schedule, in which each device holds several chunks of layers.

    In the source, the number of micro-batches is a multiple of the stages, and micro-batches go in groups of as many as
    there are stages. Here any number is allowed: groups are as even as possible and have at least as many micro-batches
    as there are stages.

    Source: Narayanan et al., SC 2021, section 2.2.
    """
    if chunks == 1:
        return schedule_1f1b(stages, micro_batches)
    total = micro_batches * chunks
    count = max(1, micro_batches // stages)
    groups = [(micro_batches + count - 1 - i) // count for i in range(count)]
    # The order in which every stage meets its passes: group by group, chunk by chunk.
    forwards: Row = []
    backwards: Row = []
    for first, size in zip(accumulate(groups, initial=0), groups):
        for chunk in range(chunks):
            forwards += [Phase(chunk, m, PhaseKind.F) for m in range(first, first + size)]
            backwards += [Phase(chunks - 1 - chunk, m, PhaseKind.B) for m in range(first, first + size)]
    rows: Schedule = []
    for stage in range(stages):
        warm = total if len(groups) == 1 else min(total, 2 * (stages - 1 - stage) + (chunks - 1) * groups[0])
        row = forwards[:warm]
        for pair in zip(forwards[warm:], backwards):
            row += pair
        rows.append(row + backwards[total - warm :])
    return rows


def schedule_zb_h1(stages: int, micro_batches: int) -> Schedule:
    """Returns the ZB-H1 schedule: 1F1B with the weight gradients in its bubbles, at the peak memory of 1F1B.

    Device ``i`` runs its weight gradients ``i`` backward passes late, so that it still has work when the last
    micro-batches have passed. Every device holds as many micro-batches as the first device of 1F1B does.

    Source: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 3.1.
    """
    rows: Schedule = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, micro_batches)
        row = [Phase(0, m, PhaseKind.F) for m in range(warm)]
        for m in range(micro_batches):
            if m + warm < micro_batches:
                row.append(Phase(0, m + warm, PhaseKind.F))
            row.append(Phase(0, m, PhaseKind.B))
            if m >= stage:
                row.append(Phase(0, m - stage, PhaseKind.W))
        rows.append(row + [Phase(0, m, PhaseKind.W) for m in range(max(0, micro_batches - stage), micro_batches)])
    return rows


def make_schedule(name: str, stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Returns the schedule called ``name``: gpipe, 1f1b (interleaved if there are several chunks) or zb-h1.

    Returns:
      one row of phases per device, in the order in which the device runs them.

    Raises:
      PlanError: no schedule has that name, a number is below 1, or the schedule does not support several chunks.
    """
    if name not in NAMES:
        raise PlanError(
            "there is no such pipeline schedule",
            given=name,
            expected=f"one of {', '.join(NAMES)}",
            action="correct pipeline.schedule, or the schedule in the job file",
        )
    if min(stages, chunks, micro_batches) < 1:
        given = f"{stages} stages, {chunks} chunks, {micro_batches} micro-batches"
        raise PlanError(
            "a pipeline schedule needs at least one stage, one chunk per stage and one micro-batch",
            given=given,
            expected="numbers from 1 on",
            action="correct the number that is below 1",
        )
    if name != "1f1b" and chunks > 1:
        called = {"gpipe": "GPipe", "zb-h1": "ZB-H1"}[name]
        raise PlanError(
            f"{called} has one chunk per stage",
            given=f"{chunks} chunks of layers per stage, with the schedule {name}",
            expected="one chunk per stage, or the schedule 1f1b, which interleaves chunks",
            action="set the schedule to 1f1b (pipeline.schedule, or schedule in the job file), or use one chunk",
        )
    if name == "gpipe":
        return schedule_gpipe(stages, micro_batches)
    return (
        schedule_zb_h1(stages, micro_batches)
        if name == "zb-h1"
        else schedule_interleaved(stages, chunks, micro_batches)
    )


def iterate_dependencies(rows: Schedule) -> Iterator[tuple[tuple[int, Phase], tuple[int, Phase]]]:
    """Yields every dependency between phases as a pair (earlier, later) of (device, phase)."""
    stages = len(rows)
    last = stages * (1 + max((phase.chunk for row in rows for phase in row), default=0)) - 1
    for stage, row in enumerate(rows):
        for phase in row:
            part = phase.chunk * stages + stage
            if phase.kind is PhaseKind.W:
                yield (stage, phase._replace(kind=PhaseKind.B)), (stage, phase)
            elif phase.kind is PhaseKind.F and part > 0:
                yield _locate_part(part - 1, stages, phase), (stage, phase)
            elif phase.kind is PhaseKind.B:
                yield (stage, phase._replace(kind=PhaseKind.F)), (stage, phase)
                if part < last:
                    yield _locate_part(part + 1, stages, phase), (stage, phase)


def _locate_part(part: int, stages: int, phase: Phase) -> tuple[int, Phase]:
    return part % stages, phase._replace(chunk=part // stages)


def play(
    rows: Schedule,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    weights_s: float = 1.0,
    credits: Mapping[tuple[int, int], int] | None = None,
) -> dict[tuple[int, Phase], float]:
    """Simulates a schedule and returns the time at which each (device, phase) ends.

    All devices are equally fast, and sends take no time.

    Args:
      forward_s: seconds of an F phase.
      backward_s: seconds of a B phase; of the whole backward pass if the schedule has no W phases.
      weights_s: seconds of a W phase.
      credits: (sending device, receiving device) -> number of results that may wait there unread; a sender that finds
        no room waits. None: there is always room.

    Raises:
      PlanError: the phases wait for each other in a cycle.
    """
    needs: dict[tuple[int, Phase], list[tuple[int, Phase]]] = {}
    readers: dict[tuple[int, Phase], tuple[int, Phase]] = {}
    for earlier, later in iterate_dependencies(rows):
        needs.setdefault(later, []).append(earlier)
        if earlier[0] != later[0]:
            readers[earlier] = later
    taken: dict[tuple[int, int], list[tuple[int, Phase]]] = {}  # results on an edge, in the order of their readers
    for stage, row in enumerate(rows):
        for phase in row:
            for earlier in needs.get((stage, phase), ()):
                if earlier[0] != stage:
                    taken.setdefault((earlier[0], stage), []).append((stage, phase))
    sent: dict[tuple[int, int], int] = {}
    length_s = {PhaseKind.F: forward_s, PhaseKind.B: backward_s, PhaseKind.W: weights_s}
    start: dict[tuple[int, Phase], float] = {}
    end: dict[tuple[int, Phase], float] = {}
    place, free_s = [0] * len(rows), [0.0] * len(rows)
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while place[stage] < len(row):
                this = (stage, row[place[stage]])
                before = needs.get(this, [])
                if any(b not in end for b in before):
                    break
                if this not in start:
                    start[this] = max([free_s[stage], *(end[b] for b in before)])
                    moved = True
                reader, room_s = readers.get(this), 0.0
                edge = (stage, reader[0]) if reader is not None else None
                if credits is not None and edge is not None and sent.get(edge, 0) >= credits[edge]:
                    first = taken[edge][sent[edge] - credits[edge]] if sent.get(edge) else None
                    if first is None or first not in start:
                        break  # no room until that phase has begun
                    room_s = start[first]
                end[this] = free_s[stage] = max(start[this] + length_s[this[1].kind], room_s)
                if edge is not None:
                    sent[edge] = sent.get(edge, 0) + 1
                place[stage] += 1
                moved = True
    if any(at < len(row) for at, row in zip(place, rows)):
        stuck = ", ".join(
            f"device {i} before {row[at]}" for i, (at, row) in enumerate(zip(place, rows)) if at < len(row)
        )
        raise PlanError(
            "the phases of a pipeline schedule wait for each other in a cycle",
            given=stuck,
            expected="an order in which each phase follows those whose results it needs",
            action="correct the order of the phases, or use a schedule that `make_schedule` makes",
        )
    return end


def compute_bubble_s(
    name: str, stages: int, chunks: int, forward_s: float, backward_s: float, weights_s: float = 0.0
) -> float:
    """Returns the seconds that a device idles in one step (the pipeline bubble), if sends take no time.

    The formulas are those of the papers cited at the schedules: (p - 1) (F + B) / v for GPipe and 1F1B with p stages
    and v chunks, (p - 1) (F + B - 2 W) for ZB-H1.

    Args:
      forward_s: F, the forward pass of all chunks of a device for one micro-batch, in seconds.
      backward_s: B, likewise the whole backward pass.
      weights_s: W, the part of ``backward_s`` that computes weight gradients.
    """
    if name == "zb-h1":
        return (stages - 1) * (forward_s + backward_s - 2 * weights_s)
    return (stages - 1) * (forward_s + backward_s) / chunks


def compute_bubble_fraction(stages: int, chunks: int, micro_batches: int) -> float:
    """Returns idle time divided by busy time of GPipe and 1F1B, if sends take no time: (p - 1) / (v m).

    Here p are the stages, v the chunks of a stage and m the micro-batches. Source: Narayanan et al., SC 2021.
    """
    return (stages - 1) / (chunks * micro_batches)


def count_live_micro_batches(row: Sequence[Phase]) -> int:
    """Returns the largest number of forward passes of one device whose activations are alive at once.

    Activations live from the F phase of a (chunk, micro-batch) to its B phase, or to its W phase if the schedule has
    any.

    Args:
      row: the phases of one device, in order.
    """
    last = PhaseKind.W if any(phase.kind is PhaseKind.W for phase in row) else PhaseKind.B
    steps = {PhaseKind.F: 1, last: -1}
    return max(accumulate(steps.get(phase.kind, 0) for phase in row), default=0)


def count_credits(rows: Schedule) -> dict[tuple[int, int], int]:
    """Returns how many results must be able to wait on each edge between devices so that no sender waits for room.

    The keys are (sending device, receiving device). The numbers are measured in a run in which all passes take equally
    long; with them no schedule deadlocks, however long the passes really take.
    """
    end = play(rows)
    length = {PhaseKind.F: 1.0, PhaseKind.B: 2.0, PhaseKind.W: 1.0}
    events: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for earlier, later in iterate_dependencies(rows):
        if earlier[0] != later[0]:
            moves = events.setdefault((earlier[0], later[0]), [])
            moves += [(end[earlier], 1), (end[later] - length[later[1].kind], -1)]
    found = {}
    for edge, moves in events.items():
        # A result that is taken at the instant at which it arrives still needs room: arrivals count first.
        found[edge] = max(accumulate(step for _, step in sorted(moves, key=lambda move: (move[0], -move[1]))))
    return found


def format_schedule(rows: Schedule) -> str:
    """Formats a schedule as text, one line per device: ``0  F0 F1 B0 W0``; ``F0.1`` is a phase of chunk 1."""
    width = len(str(len(rows) - 1))
    return "".join(f"{stage:>{width}}  {' '.join(map(str, row))}\n" for stage, row in enumerate(rows))


_PHASE = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


def parse_schedule(text: str) -> Schedule:
    """Parses the text of ``format_schedule``.

    Raises:
      ValueError: a word is not a phase.
    """
    rows: Schedule = []
    for line in text.splitlines():
        row: Row = []
        for word in line.split()[1:]:
            match = _PHASE.fullmatch(word)
            if match is None:
                raise ValueError(
                    f"{word!r} is not a phase of a pipeline schedule; expected F, B or W and the number of the "
                    "micro-batch (F0), with a chunk of layers F0.1"
                )
            row.append(Phase(int(match[3] or 0), int(match[2]), PhaseKind[match[1]]))
        rows.append(row)
    return rows
