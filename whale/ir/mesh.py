"""Defines device meshes (grids of ranks with named axes), and tiles: the parts of a variable sharded over several axes.

Axis, Mesh      one axis, and the grid of ranks
iterate_levels  yields the plan of each mesh axis, outermost first
Tiles           the parts of one variable
find_tiles      the tiles of all variables of a plan

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

# Names of axes to which Whale gives a meaning; EXPERT occurs only in models described by hyper-parameters.
STAGE, DATA, TENSOR, CONTEXT, EXPERT = "stage", "data", "tensor", "context", "expert"


@dataclass(frozen=True, slots=True)
class Axis:
    """Represents one axis of a mesh: its name, such as "data", and its number of coordinates."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Represents a grid of ranks with named axes.

    Attributes:
      axes: the axes, outermost first; plans are made in this order.
      ranks: the rank at each position of the grid, the last axis varying fastest.
    """

    axes: tuple[Axis, ...]
    ranks: tuple[int, ...]

    def find_coordinates(self, rank: int) -> tuple[int, ...]:
        """Returns the coordinates of ``rank`` in the mesh, one number per axis."""
        return find_coordinates(self.ranks.index(rank), [a.size for a in self.axes])

    def list_ranks_along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Lists the ranks that communicate with ``rank`` along these axes: those with the same coordinates on all other
        axes, and ``rank`` itself.
        """
        first, offsets = self.ranks.index(rank), [0]
        position, step = first, len(self.ranks)
        for axis in self.axes:
            step //= axis.size
            if axis.name in axes:
                first -= position // step % axis.size * step
                offsets = [offset + i * step for offset in offsets for i in range(axis.size)]
        return tuple(self.ranks[first + offset] for offset in offsets)

    def order_with_last(self, *axes: str) -> tuple[int, ...]:
        """Lists all ranks, ordered so that each group along these axes is contiguous, as if these axes were the
        innermost ones.
        """

        def key(rank: int) -> tuple[list[int], list[int]]:
            at = dict(zip((a.name for a in self.axes), self.find_coordinates(rank)))
            return [at[name] for name in at if name not in axes], [at[name] for name in axes]

        return tuple(sorted(self.ranks, key=key))


def find_coordinates(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the coordinates of a position in a grid with axes of these sizes, the last axis varying fastest."""
    found: list[int] = []
    for size in reversed(sizes):
        position, coordinate = divmod(position, size)
        found.append(coordinate)
    return tuple(reversed(found))


def format_axes(axes: Sequence[Axis]) -> str:
    """Formats mesh axes as configuration files write them: ``data=2,tensor=4``."""
    return ",".join(map(str, axes))


def iterate_levels(plan: Plan) -> Iterator[Plan]:
    """Yields the plan of each mesh axis, outermost first: ``plan``, ``plan.inner``, and so on."""
    found: Plan | None = plan
    while found is not None:
        yield found
        found = found.inner


def make_mesh(plan: Plan, ranks: Sequence[int]) -> Mesh:
    """Returns the mesh that arranges ``ranks`` along the axes of a plan; an unnamed axis i is called ``axis_i``."""
    return Mesh(tuple(Axis(p.axis or f"axis_{i}", p.size) for i, p in enumerate(iterate_levels(plan))), tuple(ranks))


def count_moved_along(plan: Plan) -> list[int]:
    """Returns the logical bytes that one step moves along each mesh axis, over all groups of that axis, outermost
    first.
    """
    own = plan.own_bytes
    if plan.inner is None:
        return [own]
    inside = count_moved_along(plan.inner)  # in the first group of this axis
    return [own, *(round(plan.inner_bytes * n / (sum(inside) or 1)) for n in inside)]


@dataclass(frozen=True, slots=True)
class Region:
    """Represents a rectangular region of a variable, as a checkpoint reads or writes it.

    Attributes:
      begin: first index in the whole variable, per dimension.
      size: number of indices, per dimension.
      place: number of the tile that holds the region.
      start: first index in that tile's local tensor, per dimension.
    """

    begin: tuple[int, ...]
    size: tuple[int, ...]
    place: int
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Describes how a variable is sharded over several mesh axes; without axes, every rank holds the whole variable.

    Tiles are numbered by their coordinates along these axes, the last axis varying fastest.

    Attributes:
      axes: names of the mesh axes that shard the variable, outermost first.
      cuts: for each of these axes, the shard of what the axes before it have left to coordinate 0. Other coordinates
        may have less left; ``list_cuts`` returns their shards.
    """

    axes: tuple[str, ...] = ()
    cuts: tuple[Shard, ...] = ()

    def __str__(self) -> str:
        if len(self.cuts) > 1:
            return ", ".join(f"{cut} over {axis}" for axis, cut in zip(self.axes, self.cuts))
        return str(self.cuts[0]) if self.cuts else "B"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the number of shards along each axis."""
        return tuple(len(cut.sizes) for cut in self.cuts)

    @property
    def count(self) -> int:
        """Returns the number of tiles."""
        return prod(self.sizes)

    def find_cut(self, axis: str) -> Shard | None:
        """Returns the shard over the mesh axis called ``axis``; None if that axis does not shard the variable."""
        return dict(zip(self.axes, self.cuts)).get(axis)

    def list_cuts(self, at: Sequence[int]) -> tuple[Shard, ...]:
        """Returns, for the tile at coordinates ``at``, the shard over each axis.

        It differs from ``cuts`` if an earlier axis shards the same dimension unevenly: then this tile may have fewer
        indices left to divide than the first tile.
        """
        found: list[Shard] = []
        left: dict[int, int] = {}
        for cut, coordinate in zip(self.cuts, at):
            found.append(adapt_cut(cut, left.get(cut.dim, cut.extent)))
            left[cut.dim] = found[-1].local_size(coordinate)
        return tuple(found)

    def find_local_shape(self, shape: Sequence[int], place: int) -> tuple[int, ...]:
        """Returns the shape of tile number ``place`` of a variable of shape ``shape``."""
        found = list(shape)
        at = find_coordinates(place, self.sizes)
        for cut, coordinate in zip(self.list_cuts(at), at):
            found[cut.dim] = cut.local_size(coordinate)
        return tuple(found)

    def iterate_regions(self, shape: Sequence[int], place: int) -> Iterator[Region]:
        """Yields the rectangular regions of the variable that tile number ``place`` holds, except empty ones.

        A tile has more than one region if a dimension is sharded in runs.
        """
        at = find_coordinates(place, self.sizes)
        spans = find_block(shape, self.list_cuts(at), at)
        if spans is None or any(s.count == 0 for s in spans):
            return
        for runs in product(*(range(s.blocks) for s in spans)):
            begin = tuple(b * s.run + s.first for b, s in zip(runs, spans))
            start = tuple(b * s.count for b, s in zip(runs, spans))
            yield Region(begin, tuple(s.count for s in spans), place, start)


def make_one_axis_tiles(cut: Shard) -> Tiles:
    """Returns the tiles of a variable sharded over one mesh axis, for callers that do not need the axis's name."""
    return Tiles(("",), (cut,))


def find_tiles(plan: Plan) -> dict[str, Tiles]:
    """Returns the tiles of each variable that a plan shards, keyed by the name of the variable's handle node.

    In a pipeline, a variable's tiles are those over the mesh of its own stage group.
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
    """Returns ``cut`` for a dimension of ``extent`` indices: unchanged if it has that size, otherwise an even division.

    A plan is made for coordinate 0 of each axis. If an axis divides a dimension unevenly, other coordinates have fewer
    indices of it, which the next axis then divides evenly.
    """
    return cut if cut.extent == extent else shard(cut.dim, divide_evenly(extent, len(cut.sizes)))
