"""Guesses from the values why ranks of one script hold different ones."""

from __future__ import annotations

from whale.distributed.ranks import Ranks

HASHES = (
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


def describe_likely_cause(ranks: Ranks, reordered: bool = False, names: bool = False) -> str:
    """Returns what to look for where ranks differ, in words.

    Args:
      reordered: whether they hold the same values in another order.
      names: whether operations, layers or variables differ, and not what they hold.
    """
    usual = _ORDER if reordered else _NAMES if names else _VALUES
    return f"{HASHES}; else {usual}" if ranks.other_hashes else usual
