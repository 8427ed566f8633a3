"""How a tensor lies over a mesh: per mesh axis ``S(d)``, ``B``, ``P(op)``, or ``O`` (first rank only).

Rules and passes work on one mesh axis at a time, with a ``Placement``; a ``Layout`` is a tuple of them, one per axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Union

import numpy as np

REDUCTIONS = ("sum", "max", "min", "prod")


@dataclass(frozen=True, slots=True)
class Split:
    """The tensor is cut along dimension ``dim``; coordinate ``i`` of the axis holds ``sizes[i]`` indices (0 is legal)."""

    dim: int
    sizes: tuple[int, ...]

    def offset(self, coordinate: int) -> int:
        return sum(self.sizes[:coordinate])

    def __str__(self) -> str:
        return f"S({self.dim})[{','.join(map(str, self.sizes))}]"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every coordinate holds the whole tensor."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every coordinate holds a tensor of the whole shape; the value is their elementwise ``op``."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True, slots=True)
class Owner:
    """Only the first coordinate holds the tensor: what must run once (unseeded random ops, queues, sinks) lives there."""

    def __str__(self) -> str:
        return "O"


Placement = Union[Split, Broadcast, Partial, Owner]
Layout = tuple[Placement, ...]

B = Broadcast()
O = Owner()  # noqa: E741  (the word of the notation)
P_SUM = Partial("sum")
P_MAX = Partial("max")
P_MIN = Partial("min")


@dataclass(frozen=True, slots=True)
class Strategy:
    """One legal way to run an op over a mesh axis: a placement per operand and per output, and why it is legal.

    ``once``: the node exists on the first coordinate only (its outputs, if any, are ``O``).
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    why: str
    once: bool = False

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"


@lru_cache(maxsize=65536)
def split(dim: int, sizes: tuple[int, ...]) -> Split:
    """The one object for this split (equal placements are identical, which makes comparing them cheap)."""
    return Split(dim, sizes)


def even_sizes(size: int, parts: int) -> tuple[int, ...]:
    """``size`` cut into ``parts`` as evenly as integers allow, larger parts first: 7 over 2 is (4, 3)."""
    base, extra = divmod(size, parts)
    return tuple(base + (i < extra) for i in range(parts))


def identity_value(op: str, dtype: str) -> object:
    """The element that changes nothing under ``op``: what a coordinate with nothing to add contributes.

    Raises:
      ValueError: ``op`` is not one of sum, max, min, prod.
    """
    if op == "sum":
        return False if dtype == "bool" else 0
    if op == "prod":
        return 1
    if op not in ("max", "min"):
        raise ValueError(f"no identity for reduction {op!r}; known: {', '.join(REDUCTIONS)}")
    if dtype == "bool":
        return op == "min"
    if dtype.startswith(("int", "uint")):
        info = np.iinfo(dtype)
        return info.min if op == "max" else info.max
    return -np.inf if op == "max" else np.inf


def local_shape(shape: tuple[int | None, ...] | None, placement: Placement, coordinate: int):
    """Shape that ``coordinate`` holds of a tensor of global ``shape``."""
    if shape is None or not isinstance(placement, Split):
        return shape
    return shape[: placement.dim] + (placement.sizes[coordinate],) + shape[placement.dim + 1 :]


def parse_placement(text: str) -> Placement:
    """Inverse of ``str(placement)``.

    Raises:
      ValueError: ``text`` is none of ``S(d)[n,...]``, ``B``, ``P(op)``, ``O``.
    """
    if text == "B":
        return B
    if text == "O":
        return O
    if text.startswith("P(") and text[2:-1] in REDUCTIONS:
        return Partial(text[2:-1])
    if text.startswith("S("):
        dim, _, sizes = text[2:].partition(")")
        return split(int(dim), tuple(int(s) for s in sizes.strip("[]").split(",") if s))
    raise ValueError(f"not a placement: {text!r}; expected S(dim)[sizes], B, P(op) or O")


def moved_bytes(source: Placement, target: Placement, tensor_bytes: int, size: int, shape=None) -> int:
    """Logical bytes that a change of layout moves in total over one axis of ``size`` ranks (DESIGN.md, reshard table).

    Args:
      tensor_bytes: bytes of the whole tensor, T.
      shape: global shape; needed only for S(i) -> S(i) with other sizes.
    """
    p = size
    if source == target or isinstance(source, Broadcast) or p == 1:
        return 0
    if isinstance(source, Owner):
        if isinstance(target, Owner):
            return 0
        kept = 0.0
        if isinstance(target, Split):
            total = sum(target.sizes) or 1
            kept = target.sizes[0] / total
            return int(round(tensor_bytes * (1 - kept)))
        return 0 if isinstance(target, Partial) else (p - 1) * tensor_bytes
    if isinstance(source, Split):
        if isinstance(target, Split):
            if source.dim != target.dim:
                return tensor_bytes * (p - 1) // p
            total = sum(source.sizes) or 1
            stays = sum(_overlap(source, target, i) for i in range(p))
            return tensor_bytes * (total - stays) // total
        if isinstance(target, Broadcast):
            return (p - 1) * tensor_bytes
        if isinstance(target, Owner):
            total = sum(source.sizes) or 1
            return tensor_bytes * (total - source.sizes[0]) // total
        return 0
    if isinstance(target, Partial):
        return 0 if source == target else 2 * (p - 1) * tensor_bytes
    if isinstance(target, Split) or isinstance(target, Owner):
        return (p - 1) * tensor_bytes
    return 2 * (p - 1) * tensor_bytes


def _overlap(a: Split, b: Split, i: int) -> int:
    low = max(a.offset(i), b.offset(i))
    high = min(a.offset(i) + a.sizes[i], b.offset(i) + b.sizes[i])
    return max(0, high - low)
