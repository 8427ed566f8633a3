"""Defines meshes, grids of ranks with named axes, and the tiles of variables that are sharded over several axes.

Axis, Mesh      the grid
iterate_levels  the plans of all axes
Tiles           the parts of a variable; find_tiles: those of a plan's variables

Decision: 0081.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from whale.ir.crossing import find_block
from whale.ir.layout import Shard, divide_evenly, shard
from whale.ir.plan import Plan

# Axes that have a meaning of their own; the last one is that of a described model's experts.
STAGE, DATA, TENSOR, CONTEXT, EXPERT = "stage", "data", "tensor", "context", "expert"


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

    def find_coordinates(self, rank: int) -> tuple[int, ...]:
        """Returns a rank's coordinates, one number per axis."""
        return find_coordinates(self.ranks.index(rank), [a.size for a in self.axes])

    def list_ranks_along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Lists the ranks that differ from ``rank`` in the coordinates of these axes only, itself included."""
        first, offsets = self.ranks.index(rank), [0]
        position, step = first, len(self.ranks)
        for axis in self.axes:
            step //= axis.size
            if axis.name in axes:
                first -= position // step % axis.size * step
                offsets = [offset + i * step for offset in offsets for i in range(axis.size)]
        return tuple(self.ranks[first + offset] for offset in offsets)

    def order_with_last(self, *axes: str) -> tuple[int, ...]:
        """Orders all ranks so that those that differ in these axes only are next to each other, in the axes' order."""

        def key(rank: int) -> tuple[list[int], list[int]]:
            at = dict(zip((a.name for a in self.axes), self.find_coordinates(rank)))
            return [at[name] for name in at if name not in axes], [at[name] for name in axes]

        return tuple(sorted(self.ranks, key=key))


def find_coordinates(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the coordinates of a position in a grid, the last one running fastest."""
    found: list[int] = []
    for size in reversed(sizes):
        position, coordinate = divmod(position, size)
        found.append(coordinate)
    return tuple(reversed(found))


def format_axes(axes: Sequence[Axis]) -> str:
    """Formats axes as the configuration spells them: ``data=2,tensor=4``."""
    return ",".join(map(str, axes))


def iterate_levels(plan: Plan) -> Iterator[Plan]:
    """Yields the plans of all axes, outermost first."""
    found: Plan | None = plan
    while found is not None:
        yield found
        found = found.inner


def make_mesh(plan: Plan, ranks: Sequence[int]) -> Mesh:
    """Returns the mesh that a plan's axes make of ranks."""
    return Mesh(tuple(Axis(p.axis or f"axis_{i}", p.size) for i, p in enumerate(iterate_levels(plan))), tuple(ranks))


def count_moved_along(plan: Plan) -> list[int]:
    """Returns the logical bytes that one step moves along each axis, summed over its groups, outermost first."""
    own = plan.own_bytes
    if plan.inner is None:
        return [own]
    inside = count_moved_along(plan.inner)  # in the first group of this axis
    return [own, *(round(plan.inner_bytes * n / (sum(inside) or 1)) for n in inside)]


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a variable, with an index and an extent for each dimension.

    Attributes:
      begin: in the whole value; size: its shape.
      place: the tile that holds it; start: its first indices there.
    """

    begin: tuple[int, ...]
    size: tuple[int, ...]
    place: int
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The parts of a variable that is sharded over some axes; without axes, a single part that all ranks hold.

    Tiles are numbered by their coordinates along the axes, those of the last one running fastest.

    Attributes:
      axes: names of mesh axes, outermost first; cuts: over each of them, of the part left by the cuts before at their
        first coordinates (see ``list_cuts``).
    """

    axes: tuple[str, ...] = ()
    cuts: tuple[Shard, ...] = ()

    def __str__(self) -> str:
        if len(self.cuts) > 1:
            return ", ".join(f"{cut} over {axis}" for axis, cut in zip(self.axes, self.cuts))
        return str(self.cuts[0]) if self.cuts else "B"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the number of parts along each axis."""
        return tuple(len(cut.sizes) for cut in self.cuts)

    @property
    def count(self) -> int:
        """Returns the number of tiles."""
        return prod(self.sizes)

    def find_cut(self, axis: str) -> Shard | None:
        """Returns the cut over one axis; None when that does not divide the variable."""
        return dict(zip(self.axes, self.cuts)).get(axis)

    def list_cuts(self, at: Sequence[int]) -> tuple[Shard, ...]:
        """Returns the cuts at a tile's coordinates, where a dimension may be smaller than at the first ones."""
        found: list[Shard] = []
        left: dict[int, int] = {}
        for cut, coordinate in zip(self.cuts, at):
            found.append(adapt_cut(cut, left.get(cut.dim, cut.extent)))
            left[cut.dim] = found[-1].local_size(coordinate)
        return tuple(found)

    def find_local_shape(self, shape: Sequence[int], place: int) -> tuple[int, ...]:
        """Returns the shape of a tile."""
        found = list(shape)
        at = find_coordinates(place, self.sizes)
        for cut, coordinate in zip(self.list_cuts(at), at):
            found[cut.dim] = cut.local_size(coordinate)
        return tuple(found)

    def iterate_regions(self, shape: Sequence[int], place: int) -> Iterator[Region]:
        """Yields the rectangles that a tile consists of; those without elements are left out."""
        at = find_coordinates(place, self.sizes)
        spans = find_block(shape, self.list_cuts(at), at)
        if spans is None or any(s.count == 0 for s in spans):
            return
        for runs in product(*(range(s.blocks) for s in spans)):
            begin = tuple(b * s.run + s.first for b, s in zip(runs, spans))
            start = tuple(b * s.count for b, s in zip(runs, spans))
            yield Region(begin, tuple(s.count for s in spans), place, start)


def make_one_axis_tiles(cut: Shard) -> Tiles:
    """Returns the tiles of a variable that a single axis divides, whose name does not matter."""
    return Tiles(("",), (cut,))


def find_tiles(plan: Plan) -> dict[str, Tiles]:
    """Returns the tiles of the variables that the axes of a plan divide, by handle node; in a pipeline, over the axes
    of each stage group.
    """
    found: dict[str, Tiles] = {}
    for other in reversed(plan.others):
        found.update(find_tiles(other))
    own: dict[str, Tiles] = {}
    for i, level in enumerate(iterate_levels(plan)):
        for name, placement in level.variables.items():
            if isinstance(placement, Shard):
                before = own.get(name, Tiles())
                own[name] = Tiles((*before.axes, level.axis or f"axis_{i}"), (*before.cuts, placement))
    return found | own


def adapt_cut(cut: Shard, extent: int) -> Shard:
    """Adapts ``cut``, made for the first coordinates of earlier axes, to a dimension of ``extent`` indices."""
    return cut if cut.extent == extent else shard(cut.dim, divide_evenly(extent, len(cut.sizes)))
