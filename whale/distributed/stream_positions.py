"""Lets ranks agree on where random streams are, of which a plan may have had only some ranks draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import whale_ops
from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import TURN_TIMEOUT_S

# Why a run that goes on does not go over to another plan.
DRAWN_APART = "auto_parallel: the present way stays, since some ranks have drawn random numbers where others have not"


def gather_streams(comm: Any, prefixes: Sequence[str]) -> dict[str, int] | None:
    """Returns where each stream is on the rank that has drawn most of it, by its name here; collective.

    None: some ranks have drawn more than others from one without a counter, which cannot be set.

    Args:
      comm: a communicator of the ranks, or the one of a rank alone.
      prefixes: what the names of streams begin with, by trace: the same traces on all ranks, under names of their own.
    """
    numbers = {prefix: number for number, prefix in enumerate(prefixes)}

    def relate(streams: dict[str, int]) -> dict[tuple[int, str], int]:
        split = ((name.partition("/"), position) for name, position in streams.items())
        return {(numbers[prefix], rest): position for (prefix, _, rest), position in split if prefix in numbers}

    positions, draws = map(relate, whale_ops.read_streams())
    mine = pack(([(*key, at) for key, at in positions.items()], [(*key, count) for key, count in draws.items()]))
    said = [unpack(one) for one in comm.allgather_bytes("whale/streams", mine, TURN_TIMEOUT_S)]
    if any(sorted(others) != sorted(said[0][1]) for _, others in said):
        return None
    latest: dict[tuple[int, str], int] = {}
    for streams, _ in said:
        for number, rest, position in streams:
            latest[number, rest] = max(position, latest.get((number, rest), 0))
    return {f"{prefixes[number]}/{rest}": position for (number, rest), position in latest.items()}
