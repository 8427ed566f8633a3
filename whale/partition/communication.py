"""What a rank's program has of communication besides single collectives: names, checks, and what nobody here reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from whale.ir.emitter import Emitter
from whale.ir.layout import Broadcast, FirstRank, Partial, PerRank, Placement, Split, label
from whale.ir.ops import EXCHANGES
from whale.ir.plan import Reshard
from whale.ir.program import Node, Ref

_TIME_STREAM = 1566083941  # odd, so that it has an inverse (L'Ecuyer, "Tables of linear congruential generators", 1999)


def reshard_name(prefix: str, ref: Ref, target: Placement) -> str:
    """Name of the node that has ``ref`` as ``target``."""
    text = f"{ref.node}_{ref.index}_to_{label(target)}"
    return f"{prefix}/" + "".join(c if c.isalnum() or c in "._/-" else "_" for c in text)


def unread_communication(
    nodes: Mapping[str, Node],
    read: Sequence[str],
    effects: Sequence[str] = (),
    talks: Callable[[Node], bool] = lambda node: False,
) -> list[str]:
    """Communication that nothing of ``read`` or ``effects`` depends on: what it brings, or gives, other ranks read.

    Args:
      talks: whether a node is a loop or branch with communication inside. Such nodes belong to the result unless they
        are effects: TensorFlow runs what a branch does beside its results only if somebody waits for the whole branch.
    """
    live: set[str] = set()

    def mark(stack: list[str]) -> None:
        while stack:
            name = stack.pop()
            if name not in live:
                live.add(name)
                node = nodes[name]
                stack.extend([before for before, _ in node.inputs if before not in live])
                stack.extend(node.controls)

    mark([*read, *effects])
    added = []
    for name in reversed([n for n, node in nodes.items() if node.op in EXCHANGES or talks(node)]):
        if name not in live:
            added.append(name)
            mark([name])
        elif name not in effects and talks(nodes[name]):
            added.append(name)
    return added


def is_joint(r: Reshard) -> bool:
    """Whether all ranks have to take part in the change, those too that do not need its result."""
    have, want = type(r.source), type(r.target)
    if PerRank in (have, want):
        return False
    return have is not Broadcast and want is not FirstRank and not (have is Split and want is Partial)


def emit_check(e: Emitter, fingerprint: str, what: str) -> str:
    """The node by which ranks find out that they run different things."""
    attrs = {"key": "whale/check", "fingerprint": fingerprint, "what": what, "ranks": ()}
    return e.add("whale/check", "WhaleCheck", (e.communicator(),), attrs, (), stateful=True).node


def seed_of_rank(value: np.ndarray, in_time: bool) -> np.ndarray:
    """What is added to a seed for a rank's stream; those of micro-batches are others."""
    with np.errstate(over="ignore"):
        return value * np.array(_TIME_STREAM, value.dtype) if in_time else value
