"""Checks that every rank does the same thing at the same place of its script.

Where ranks of one script hold different values, ``describe_likely_cause`` guesses why, from the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import tensorflow as tf

from whale.distributed.ranks import WRITE_TIMEOUT_S, Ranks
from whale.errors import CommError

_DIFFERENT_CALLS = "the ranks call different things"

# How messages of ranks begin that wait for each other in different exchanges: of the core, and of what compares inputs.
_OTHER_PLACES = (_DIFFERENT_CALLS, "the ranks are at different places of the program", "the ranks are about to run")
_HASHES = (
    "Python's string hashes differ between these ranks, and with them the order of sets: start all ranks with "
    "PYTHONHASHSEED=0 in their environment, or by `whale run`"
)
_ORDER = (
    "the values are the same in another order: a shuffle with another seed, os.listdir or glob without sorted(), or a "
    "set of objects"
)
_VALUES = (
    "random numbers or uuids drawn before wh.init() or with a seed of each rank's own (os.getpid(), time), "
    "the time, a host's name or files, or an environment variable"
)
_NAMES = "layers, variables or columns made in the order of os.listdir, glob or a set of objects, or named by time"


def read_together(ranks: Ranks, name: str, what: str, one: str, many: str) -> None:
    """Checks that all ranks are about to read the variable ``name``; collective.

    Args:
      what: such a variable, in words.
      one, many: why a rank cannot read it alone, of one such variable and of several.

    Raises:
      CommError: the run is over, or the ranks do not all read that variable.
    """
    if ranks.ended:
        raise CommError(
            f"{what} cannot be read any more",
            variable=name,
            given="a reading after wh.shutdown()",
            expected="a reading by all ranks before it",
            action="read or save variables before wh.shutdown()",
        )
    # This exchange compares the names: every other rank has to make it at the same place of its script.
    purpose = f"the reading of the variable {name!r}, {one} (every rank has to read it)"
    said = ranks.comms[0].allgather_bytes("whale/read", name.encode(), ranks.config["debug.check_timeout_s"], purpose)
    other = next((rank for rank, n in enumerate(said) if n != said[0]), None)
    if other is not None:
        raise CommError(
            f"the ranks read different variables, {many}",
            given=f"rank 0 reads {said[0].decode()}, rank {other} reads {said[other].decode()}",
            expected="the same variables in the same order on every rank",
            action="read variables on every rank, whatever the rank does with the value",
        )


def read_surviving(ranks: Ranks, variable: Any, now: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Reads a variable with all ranks by ``now``, or reads it again when some of them are gone meanwhile.

    Args:
      now: reads it as it lies now; afterwards it may be an ordinary variable, which is read as such.
    """
    if not ranks.is_elastic:
        return now()
    reads = iter((now,))
    return tf.constant(ranks.retry_after_loss(lambda: next(reads, variable.read_value)().numpy()))


def tells_of_other_places(error: CommError) -> bool:
    """Tells whether an error is that of ranks which are alive, and do different things."""
    return error.message.startswith(_OTHER_PLACES)


def call_together(
    ranks: Ranks, function: str, what: str, why: str = "", own: Any = None, verb: str = "call"
) -> list[Any]:
    """Checks that all ranks are about to call ``function``; collective between processes.

    A rank may be late: the others wait up to ``WRITE_TIMEOUT_S``.

    Args:
      what: the call, in words: the function, its object, its place in the script.
      why: what no rank can do alone, in words.
      own: what the other ranks are to know of this one's call; of JSON's types.
      verb: what every rank has to do with it, in words.

    Returns:
      ``own`` of every rank.

    Raises:
      CommError: a rank calls another one, does something else, or its script has ended.
    """
    if not ranks.has_other_processes:
        return [own]
    purpose = f"{what}, which every rank has to {verb}" + (f": {why}" if why else "")
    data = msgspec.json.encode((function, what, own))
    everyone = ranks.comms[0].allgather_bytes("whale/call", data, WRITE_TIMEOUT_S, purpose)
    said = [msgspec.json.decode(one, type=tuple[str, str, Any]) for one in everyone]
    other = next((rank for rank, (name, _, _) in enumerate(said) if name != said[0][0]), None)
    if other is not None:
        raise CommError(
            _DIFFERENT_CALLS,
            given=f"rank 0: {said[0][1]}; rank {other}: {said[other][1]}",
            expected="the same calls in the same order on every rank",
            action="call it on every rank; wh.rank() == 0 is for what is printed or written with its result",
        )
    return [theirs for _, _, theirs in said]


def describe_likely_cause(ranks: Ranks, reordered: bool = False, names: bool = False) -> str:
    """Returns what to look for where ranks differ, in words.

    Args:
      reordered: whether they hold the same values in another order.
      names: whether operations, layers or variables differ, and not what they hold.
    """
    usual = _ORDER if reordered else _NAMES if names else _VALUES
    return f"{_HASHES}; else {usual}" if ranks.other_hashes else usual
