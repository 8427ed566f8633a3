"""Defines pipeline schedules: pure functions from (stages, chunks, micro-batches) to the order of phases on each
device.

Chunk ``c`` of device ``s`` holds the model's part ``c * stages + s``. A phase is the forward pass (F) of one chunk for
one micro-batch, or its backward pass (B). ZB-H1 splits the backward pass: B computes the gradients of the chunk's
inputs, for which the previous device waits, and W those of its weights, for which no device waits.

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
    """The kinds of phases: forward, backward, and the weights' part of backward."""

    F = 0
    B = 1
    W = 2


class Phase(NamedTuple):
    """One pass of a chunk for a micro-batch."""

    chunk: int
    micro_batch: int
    kind: PhaseKind

    def __str__(self) -> str:
        return f"{self.kind.name}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


Row = list[Phase]
Schedule = list[Row]


def schedule_gpipe(stages: int, micro_batches: int) -> Schedule:
    """Schedules all forwards, then all backwards in reverse (Huang et al., "GPipe", 2019)."""
    forwards = [Phase(0, m, PhaseKind.F) for m in range(micro_batches)]
    return [forwards + [Phase(0, m, PhaseKind.B) for m in reversed(range(micro_batches))] for _ in range(stages)]


def schedule_1f1b(stages: int, micro_batches: int) -> Schedule:
    """Schedules forwards until the pipeline is full, then one forward and one backward in turn (Narayanan et al., SC
    2021).
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
    """Schedules 1F1B in which every stage holds several chunks of layers (Narayanan et al., SC 2021, section 2.2).

    In the paper micro-batches are a multiple of the stages, in groups of as many. Here other numbers go in groups that
    are as even as can be, with at least as many micro-batches as there are stages; a group takes no longer for it.
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
    """Schedules 1F1B whose weight gradients fill the bubbles, in the memory of 1F1B (Qi et al., "Zero bubble pipeline
    parallelism", ICLR 2024, section 3.1).

    Device ``i`` begins its weight gradients ``i`` backward passes late: they are what it has to do when the last
    micro-batches have gone. As many micro-batches live on each device as on the first one under 1F1B.
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
    """Returns the schedule of a name: gpipe, 1f1b (interleaved when there are several chunks) or zb-h1.

    Raises:
      PlanError: there is none of that name, or it does not support so many chunks.
    """
    if name not in NAMES:
        raise PlanError("there is no such schedule", given=name, expected=", ".join(NAMES))
    if min(stages, chunks, micro_batches) < 1:
        given = f"{stages} stages, {chunks} chunks, {micro_batches} micro-batches"
        raise PlanError("a schedule needs one of each at least", given=given, expected="numbers from 1 on")
    if name != "1f1b" and chunks > 1:
        called = {"gpipe": "GPipe", "zb-h1": "ZB-H1"}[name]
        raise PlanError(f"{called} has one chunk per stage", given=f"{chunks} chunks", action="use 1f1b")
    if name == "gpipe":
        return schedule_gpipe(stages, micro_batches)
    return (
        schedule_zb_h1(stages, micro_batches)
        if name == "zb-h1"
        else schedule_interleaved(stages, chunks, micro_batches)
    )


def iterate_dependencies(rows: Schedule) -> Iterator[tuple[tuple[int, Phase], tuple[int, Phase]]]:
    """Yields (earlier, later) for all (device, phase) that need another one's result."""
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
    """Simulates a schedule and returns when each (device, phase) ends, with equal passes on all devices and free sends.

    Args:
      backward_s: of B; with ``weights_s`` in it where the schedule has no W.
      weights_s: of W.
      credits: (sending device, receiving device) -> results that may wait there: who finds no room waits with its own.

    Raises:
      PlanError: the phases wait for each other.
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
        raise PlanError("the phases of a schedule wait for each other", given=stuck, expected="an order that ends")
    return end


def compute_bubble_s(
    name: str, stages: int, chunks: int, forward_s: float, backward_s: float, weights_s: float = 0.0
) -> float:
    """Returns the seconds that a device idles in a step with free sends (the papers named at the schedules).

    Args:
      backward_s: the whole backward pass of all of a device's chunks; ``forward_s`` their forward pass.
      weights_s: the part of it that is W.
    """
    if name == "zb-h1":
        return (stages - 1) * (forward_s + backward_s - 2 * weights_s)
    return (stages - 1) * (forward_s + backward_s) / chunks


def compute_bubble_fraction(stages: int, chunks: int, micro_batches: int) -> float:
    """Returns idle over busy time of GPipe and 1F1B with free sends: (p - 1) / (v m) (Narayanan et al., SC 2021)."""
    return (stages - 1) / (chunks * micro_batches)


def count_live_micro_batches(row: Sequence[Phase]) -> int:
    """Returns the most (chunk, micro-batch) pairs whose forward pass has run and whose last backward pass has not."""
    last = PhaseKind.W if any(phase.kind is PhaseKind.W for phase in row) else PhaseKind.B
    steps = {PhaseKind.F: 1, last: -1}
    return max(accumulate(steps.get(phase.kind, 0) for phase in row), default=0)


def count_credits(rows: Schedule) -> dict[tuple[int, int], int]:
    """Returns (sending device, receiving device) -> results that must be able to wait there, so that no sender waits
    for room in a run with equal passes. With these the schedule ends, however long its passes are.
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
        # A result that is taken at the moment at which it comes waits for that moment.
        found[edge] = max(accumulate(step for _, step in sorted(moves, key=lambda move: (move[0], -move[1]))))
    return found


def format_schedule(rows: Schedule) -> str:
    """Formats one row per device: ``0  F0 F1 B0 W0``; chunks above 0 are written ``F0.1``."""
    width = len(str(len(rows) - 1))
    return "".join(f"{stage:>{width}}  {' '.join(map(str, row))}\n" for stage, row in enumerate(rows))


_PHASE = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


def parse_schedule(text: str) -> Schedule:
    """Inverse of ``format_schedule``.

    Raises:
      ValueError: a phase cannot be read.
    """
    rows: Schedule = []
    for line in text.splitlines():
        row: Row = []
        for word in line.split()[1:]:
            match = _PHASE.fullmatch(word)
            if match is None:
                raise ValueError(f"not a phase: {word!r}; expected F, B or W with a micro-batch: F0, B3.1")
            row.append(Phase(int(match[3] or 0), int(match[2]), PhaseKind[match[1]]))
        rows.append(row)
    return rows
