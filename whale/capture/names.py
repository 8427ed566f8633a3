"""Names of nodes that are equal in all processes.

TensorFlow names what a function captures without a name, and the bodies of loops and branches, by a counter of the
process, which every eager tensor counts on. Ranks compare programs by name, and rank 0's plan speaks of nodes by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from whale.ir.program import Program, rename_nodes

_NUMBER = re.compile(r"[_.]?\d+")


class Names:
    """Names that are in use; new ones are found in constant time, however many were called alike before.

    Args:
      used: those that are in use at first.
    """

    def __init__(self, used: Iterable[str] = ()):
        self._used = set(used)
        self._numbers: dict[str, int] = {}

    def make_unused(self, name: str) -> str:
        """``name``, with the least number that makes it another one if it is in use; it is in use from now on."""
        unique, n = name, self._numbers.get(name, 1)
        while unique in self._used:
            unique, n = f"{name}_{n}", n + 1
        self._numbers[name] = n
        self._used.add(unique)
        return unique


def name_captures(names: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """New names for the captured tensors that have none of their own: ``scope/995`` becomes ``scope/captured``.

    Args:
      names: of the captured tensors' placeholders, in order of capture.
      taken: names of all nodes of the graph.
    """
    found: dict[str, str] = {}
    used = Names(taken)
    for name in names:
        scope, _, last = name.rpartition("/")
        if last.isdigit():
            found[name] = used.make_unused(f"{scope}/captured" if scope else "captured")
    return found


def rename_arguments(body: Program) -> Program:
    """``body`` with arguments that are called as TensorFlow calls them, without numbers."""
    used = Names({n.name for n in body.nodes} - set(body.inputs))
    return rename_nodes(body, {n: used.make_unused(_NUMBER.sub("", n).strip("_/") or "argument") for n in body.inputs})
