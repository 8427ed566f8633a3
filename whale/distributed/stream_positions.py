"""Lets ranks agree on the positions of random streams, when a plan has had only some ranks draw from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import whale_ops
from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import TURN_TIMEOUT_S

# Logged when `gather_streams` returns None, so that a run cannot change to another plan.
DRAWN_APART = "auto_parallel: the present plan stays, since some ranks have drawn random numbers where others have not"


def gather_streams(comm: Any, prefixes: Sequence[str]) -> dict[str, int] | None:
    """Returns the position of each random stream on the rank that has drawn most from it; collective.

    The new plan then continues each stream from that position on every rank.

    Args:
      comm: a communicator of the ranks, or the stand-in of a single rank.
      prefixes: prefixes of the streams' names, one per traced function; the functions are the same on all ranks, in the
        same order, but their names may differ.

    Returns:
      name of the stream in this process -> position; None if ranks have drawn different numbers from a stream without a
      counter, whose position cannot be set.
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
