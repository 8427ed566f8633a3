"""Ranks in a grid of named axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whale.ir.plan import Plan

# Attribute of communication ops until they name ranks: the axis along which they communicate.
AXIS = "_axis"


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a mesh: its name, and how many coordinates it has."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in order of their coordinates, those of the last axis next to each other.

    Attributes:
      axes: from the outermost to the innermost one, which is also the order in which they are planned.
      ranks: as many as the axes have coordinates together.
    """

    axes: tuple[Axis, ...]
    ranks: tuple[int, ...]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a rank is, one number per axis."""
        return coordinates_of(self.ranks.index(rank), [a.size for a in self.axes])

    def along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` in the coordinates of some axes only, itself included, in order."""
        first, offsets = self.ranks.index(rank), [0]
        position, step = first, len(self.ranks)
        for axis in self.axes:
            step //= axis.size
            if axis.name in axes:
                first -= position // step % axis.size * step
                offsets = [offset + i * step for offset in offsets for i in range(axis.size)]
        return tuple(self.ranks[first + offset] for offset in offsets)

    def with_last(self, axis: str) -> tuple[int, ...]:
        """All ranks, those that differ in the coordinate of one axis only next to each other."""
        groups = dict.fromkeys(self.along(rank, axis) for rank in self.ranks)
        return tuple(rank for group in groups for rank in group)


def coordinates_of(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Coordinates of a position in a grid, the last one running fastest."""
    found: list[int] = []
    for size in reversed(sizes):
        position, coordinate = divmod(position, size)
        found.append(coordinate)
    return tuple(reversed(found))


def format_axes(axes: Sequence[Axis]) -> str:
    """``data=2,tensor=4``, as the configuration has it."""
    return ",".join(map(str, axes))


def chain(plan: Plan) -> Iterator[Plan]:
    """The plans of all axes, outermost first."""
    found: Plan | None = plan
    while found is not None:
        yield found
        found = found.inner


def mesh_of(plan: Plan, ranks: Sequence[int]) -> Mesh:
    """The mesh that a plan's axes make of ranks."""
    return Mesh(tuple(Axis(p.axis or f"axis_{i}", p.size) for i, p in enumerate(chain(plan))), tuple(ranks))


def moved_along(plan: Plan) -> list[int]:
    """Logical bytes that one step moves along each axis, in all its groups together, outermost first."""
    own = plan.own_bytes
    if plan.inner is None:
        return [own]
    inside = moved_along(plan.inner)  # in the first group of this axis
    return [own, *(round(plan.inner_bytes * n / (sum(inside) or 1)) for n in inside)]
