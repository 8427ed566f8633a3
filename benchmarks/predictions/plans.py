"""The plans that are compared: configuration and scope of each, and how many ranks run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whale.config import Mesh


@dataclass(frozen=True)
class Kind:
    """A way of spreading a program.

    Attributes:
        title: for the table.
        ranks: how many.
        shares: rows of each rank, as parts of a batch of 16; empty: even.
        split: whether the model is called under ``wh.split``.
        config: further keys of the configuration.
    """

    title: str
    ranks: int
    shares: tuple[int, ...] = ()
    split: bool = False
    config: tuple[tuple[str, Any], ...] = ()

    def configuration(self, batch: int) -> dict[str, Any]:
        """What ``wh.init`` takes."""
        shares = {"batch.shares": [batch * part // 16 for part in self.shares]} if self.shares else {}
        return {**shares, **dict(self.config)}

    def scope(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """What the model is called under."""
        import whale as wh

        return wh.split if self.split else contextlib.nullcontext


KINDS = {
    "one": Kind("one device", 1),
    "even": Kind("replica", 2),
    "uneven": Kind("replica 11:5", 2, shares=(11, 5)),
    "split": Kind("split", 2, split=True),
    "state": Kind("replica, zero 1", 2, config=(("memory.zero", 1),)),
    "groups": Kind("replica 2 x split 2", 4, split=True, config=(("mesh", Mesh(tensor=2)),)),
}
