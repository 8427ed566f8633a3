"""Pipeline schedules: a pure function from (stages, chunks, micro-batches) to the order of phases on each stage.

A phase is (chunk, micro-batch, backward?). Chunk c of stage s holds the model's part c * stages + s.
"""

from __future__ import annotations

from itertools import accumulate

from whale.errors import PlanError

Phase = tuple[int, int, bool]


def gpipe(stages: int, micro_batches: int) -> list[list[Phase]]:
    """All forwards, then all backwards in reverse (Huang et al., "GPipe", 2019)."""
    forwards = [(0, m, False) for m in range(micro_batches)]
    return [forwards + [(0, m, True) for m in reversed(range(micro_batches))]] * stages


def one_f_one_b(stages: int, micro_batches: int) -> list[list[Phase]]:
    """Forwards until the pipeline is full, then one forward and one backward in turn (Narayanan et al., SC 2021)."""
    orders: list[list[Phase]] = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, micro_batches)
        order: list[Phase] = [(0, m, False) for m in range(warm)]
        for m in range(micro_batches - warm):
            order += [(0, m + warm, False), (0, m, True)]
        order += [(0, m, True) for m in range(micro_batches - warm, micro_batches)]
        orders.append(order)
    return orders


def interleaved(stages: int, chunks: int, micro_batches: int) -> list[list[Phase]]:
    """1F1B in which every stage holds several chunks of layers (Narayanan et al., SC 2021, section 2.2)."""
    if chunks == 1:
        return one_f_one_b(stages, micro_batches)
    if micro_batches % stages:
        raise PlanError(
            "the interleaved schedule needs micro-batches in multiples of the stages",
            given=f"{micro_batches} micro-batches, {stages} stages",
            action="change the micro-batch size, or use one chunk per stage",
        )
    total = micro_batches * chunks
    # The order in which every stage meets its passes: groups of `stages` micro-batches, chunk by chunk.
    forwards: list[Phase] = []
    backwards: list[Phase] = []
    for first in range(0, micro_batches, stages):
        for chunk in range(chunks):
            forwards += [(chunk, m, False) for m in range(first, first + stages)]
            backwards += [(chunks - 1 - chunk, m, True) for m in range(first, first + stages)]
    orders: list[list[Phase]] = []
    for stage in range(stages):
        warm = total if micro_batches == stages else min(total, 2 * (stages - 1 - stage) + (chunks - 1) * stages)
        order = forwards[:warm]
        for pair in zip(forwards[warm:], backwards):
            order += pair
        order += backwards[total - warm :]
        orders.append(order)
    return orders


def schedule(name: str, stages: int, chunks: int, micro_batches: int) -> list[list[Phase]]:
    """The schedule of a name: gpipe or 1f1b (interleaved when there are several chunks)."""
    if name == "gpipe":
        if chunks > 1:
            raise PlanError("GPipe has one chunk per stage", given=f"{chunks} chunks", action="use 1f1b")
        return gpipe(stages, micro_batches)
    if name != "1f1b":
        raise PlanError("there is no such schedule", given=name, expected="gpipe or 1f1b")
    return interleaved(stages, chunks, micro_batches)


def bubble_fraction(stages: int, chunks: int, micro_batches: int) -> float:
    """Idle time over busy time with equal phases and no communication: (p - 1) / (v m) (same paper)."""
    return (stages - 1) / (chunks * micro_batches)


def live_micro_batches(order: list[Phase]) -> int:
    """Largest number of (chunk, micro-batch) whose forward has run and whose backward has not: the activations held."""
    return max(accumulate(-1 if backward else 1 for _, _, backward in order), default=0)
