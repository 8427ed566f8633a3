"""Names of nodes that are equal in all processes.

TensorFlow names what a function captures without a name, and the bodies of loops and branches, by a counter of the
process, which every eager tensor counts on. Ranks compare programs by name, and rank 0's plan speaks of nodes by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from whale.ir.program import Program, renamed

_NUMBER = re.compile(r"[_.]?\d+")


def of_captures(names: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """New names for the captured tensors that have none of their own: ``scope/995`` becomes ``scope/captured``.

    Args:
      names: of the captured tensors' placeholders, in order of capture.
      taken: names of all nodes of the graph.
    """
    found: dict[str, str] = {}
    used = set(taken)
    for name in names:
        scope, _, last = name.rpartition("/")
        if last.isdigit():
            found[name] = unused(f"{scope}/captured" if scope else "captured", used)
    return found


def with_lasting_arguments(body: Program) -> Program:
    """``body`` with arguments that are called as TensorFlow calls them, without numbers."""
    used = {n.name for n in body.nodes} - set(body.inputs)
    return renamed(body, {n: unused(_NUMBER.sub("", n).strip("_/") or "argument", used) for n in body.inputs})


def unused(name: str, used: set[str]) -> str:
    """``name``, with a number if it is in ``used``, which it joins."""
    unique, n = name, 1
    while unique in used:
        unique, n = f"{name}_{n}", n + 1
    used.add(unique)
    return unique
