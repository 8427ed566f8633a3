"""Checks that all ranks make the same collective call at the same place of their script, and says what differs.

If ranks hold different values, ``describe_likely_cause`` suggests what in the script may have caused it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import tensorflow as tf

from whale.distributed.ranks import WRITE_TIMEOUT_S, Ranks
from whale.errors import CommError

_DIFFERENT_CALLS = "the ranks call different things"

# How messages about ranks begin that wait for each other in different exchanges: those of this module, of the C++ core,
# and of the comparison of inputs.
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
    """Checks that all ranks are about to read the same variable, before a read that needs all of them; collective.

    The texts become parts of error messages.

    Args:
      ranks: the ranks of the run.
      name: name of the variable.
      what: what kind of variable it is, e.g. "a variable that is sharded over the ranks".
      one: why a rank cannot read it alone, e.g. "which is sharded over the ranks".
      many: the same in the plural, e.g. "which are sharded over them".

    Raises:
      CommError: the run is over, or the ranks are about to read different variables.
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
    """Reads a variable by a collective read, and reads it again if ranks are lost meanwhile and the run goes on.

    Args:
      ranks: the ranks of the run.
      variable: the variable.
      now: the first attempt: reads the variable collectively in its present layout. After a loss of ranks the variable
        may be whole on every rank, so later attempts call ``variable.read_value``.
    """
    if not ranks.is_elastic:
        return now()
    reads = iter((now,))
    return tf.constant(ranks.retry_after_loss(lambda: next(reads, variable.read_value)().numpy()))


def tells_of_other_places(error: CommError) -> bool:
    """Returns True if an error says that ranks, all alive, are at different places of their script."""
    return error.message.startswith(_OTHER_PLACES)


def call_together(
    ranks: Ranks, function: str, what: str, why: str = "", own: Any = None, verb: str = "call"
) -> list[Any]:
    """Checks that all ranks are about to call the same function, and exchanges a value between them; collective.

    A rank may be late: the others wait for it up to ``WRITE_TIMEOUT_S``.

    Args:
      ranks: the ranks of the run; with one process nothing is checked.
      function: name of the function, which is compared between the ranks.
      what: description of the call for messages: the function, its object, its place in the script.
      why: why a rank cannot make the call alone, for messages; "" if that is clear.
      own: a value of this rank, of JSON's types, that the other ranks receive.
      verb: what every rank has to do with the function, for messages.

    Returns:
      ``own`` of every rank, by rank; ``[own]`` with one process.

    Raises:
      CommError: another rank calls another function, is at another place of the script, or has ended.
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
            action="call it on every rank, outside of `if wh.rank() == 0:`; only print or write its result on rank 0",
        )
    return [theirs for _, _, theirs in said]


def describe_likely_cause(ranks: Ranks, reordered: bool = False, names: bool = False) -> str:
    """Returns a text for error messages that suggests why ranks hold different values or names.

    Args:
      ranks: the ranks of the run.
      reordered: whether the ranks hold the same values in different orders.
      names: whether names of operations, layers or variables differ, and not their values.
    """
    usual = _ORDER if reordered else _NAMES if names else _VALUES
    return f"{_HASHES}; else {usual}" if ranks.other_hashes else usual
