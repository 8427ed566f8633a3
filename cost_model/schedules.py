"""Pipeline schedules: a pure function from (stages, chunks, micro-batches) to the order of phases on each stage.

A phase is (chunk, micro-batch, backward?). Chunk c of stage s holds the model's part c * stages + s.
"""

from __future__ import annotations

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

    def phase(index: int, backward: bool) -> Phase:
        group, place = divmod(index, stages * chunks)
        chunk, offset = divmod(place, stages)
        return (chunks - 1 - chunk if backward else chunk, group * stages + offset, backward)

    orders: list[list[Phase]] = []
    for stage in range(stages):
        warm = total if micro_batches == stages else min(total, 2 * (stages - 1 - stage) + (chunks - 1) * stages)
        order = [phase(i, False) for i in range(warm)]
        for i in range(total - warm):
            order += [phase(i + warm, False), phase(i, True)]
        order += [phase(i, True) for i in range(total - warm, total)]
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
    live = most = 0
    for _, _, backward in order:
        live += -1 if backward else 1
        most = max(most, live)
    return most
