"""Computes how a tensor is sent from one stage group to another, between meshes of any axes.

If both have the same mesh, a rank receives the tensor from the rank of its coordinates. Else every rank has a block of
the tensor, given by spans of its dimensions, and receives the intersections of other blocks with its own. A partial sum
is reduce-scattered before it is sent. A tensor that the receiving ranks want whole, or as a partial sum, is sent to
each in parts and gathered there, so that each byte crosses once; a small one is sent to each of them whole.

  find_sent_placement      a tensor's placement when it is sent
  find_received_placement  its placement when it has arrived
  find_block               the block of one rank
  list_parts               the parts that each receiving rank gets, with their senders
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from whale.ir.layout import FIRST, B, PerRank, Placement, Replicate, Shard, divide_evenly, local_shape, shard
from whale.ir.values import Dims, TensorType, require_static_shape

_LEAST_BYTES = 1 << 12  # below, another message costs more than the bytes that it saves


@dataclass(frozen=True, slots=True)
class Span:
    """The indices of one dimension that a rank holds: ``count`` from ``first`` on, in each of ``blocks`` runs of
    ``run``.
    """

    blocks: int
    run: int
    first: int
    count: int

    @property
    def is_whole(self) -> bool:
        """Tells whether the span covers all of the dimension."""
        return self.count == self.run

    @property
    def size(self) -> int:
        """Returns the number of indices in the span."""
        return self.blocks * self.count


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that the rank at position ``sender`` of its mesh sends to the one at ``receiver`` of another
    mesh.

    Attributes:
      spans: of the whole tensor, by dimension; None: all that the sender holds.
      cut: dimension -> (runs, position in each of the sender's runs, how many), where it does not send all it holds.
    """

    sender: int
    receiver: int
    spans: tuple[Span, ...] | None = None
    cut: tuple[tuple[int, int, int, int], ...] = ()

    def shape(self, shape: Dims | None) -> Dims | None:
        """Returns the part's shape, given the sender's own."""
        return shape if self.spans is None else tuple(s.size for s in self.spans)


def find_sent_placement(t: TensorType, made: Placement, size: int, rows: int | None) -> Placement:
    """Returns a tensor's placement over one axis of the senders' mesh when it is sent to another mesh.

    Args:
      t: its type on the ranks of one coordinate of the axes before.
      made: its placement when produced; size: of the axis.
      rows: the dimension that micro-batches cut; None: it is sent once.
    """
    if not t.is_static:
        return FIRST if made == FIRST else B
    if isinstance(made, (Shard, Replicate)) or made == FIRST:
        return made
    return B if isinstance(made, PerRank) else _split_largest_dim(t, size, rows)


def find_received_placement(t: TensorType, wanted: Placement, size: int, rows: int | None) -> Placement:
    """Returns a tensor's placement over one axis of the receivers' mesh when it has arrived (see
    ``find_sent_placement``).
    """
    if not t.is_static:
        return FIRST if wanted == FIRST else B
    return wanted if isinstance(wanted, Shard) or wanted == FIRST else _split_largest_dim(t, size, rows)


def _split_largest_dim(t: TensorType, size: int, rows: int | None) -> Placement:
    """Splits a tensor along its largest dimension if it is large enough; replicates it otherwise."""
    shape = require_static_shape(t)
    dims = [d for d, n in enumerate(shape) if d != rows and n >= size]
    if size == 1 or t.bytes < _LEAST_BYTES or not dims:
        return B
    dim = max(dims, key=lambda d: shape[d])
    return shard(dim, divide_evenly(shape[dim], size))


def find_local_type(t: TensorType, placements: Sequence[Placement], at: Sequence[int]) -> TensorType:
    """Returns a tensor's type on the ranks with these first coordinates."""
    shape = t.shape
    for placement, coordinate in zip(placements, at):
        shape = local_shape(shape, placement, coordinate)
    return TensorType(t.dtype, shape)


def find_block(shape: Sequence[int], placements: Sequence[Placement], at: Sequence[int]) -> tuple[Span, ...] | None:
    """Returns the block of a tensor that the rank at these coordinates holds; None where it holds nothing.

    Args:
      placements: over each axis of its mesh, of what the axes before have left.

    Raises:
      ValueError: axes cut one dimension into unlike runs.
    """
    found = [Span(1, n, 0, n) for n in shape]
    for p, coordinate in zip(placements, at):
        if p == FIRST and coordinate:
            return None
        if isinstance(p, Shard):
            found[p.dim] = _restrict_span(found[p.dim], p, coordinate)
    return None if any(s.count == 0 and s.run for s in found) else tuple(found)


def _restrict_span(held: Span, p: Shard, coordinate: int) -> Span:
    first, count = p.offset(coordinate), p.sizes[coordinate]
    if held.blocks == 1 and held.is_whole:
        return Span(p.blocks, p.run, first, count)
    if held.blocks != p.blocks or held.count != p.run:
        raise ValueError(f"{p} of {held}")
    return Span(held.blocks, held.run, held.first + first, count)


def can_cross(have: Sequence[Span], want: Sequence[Span]) -> bool:
    """Tells whether the intersection of two blocks is a block, because they cut all dimensions into equal runs."""
    return all(
        (a.blocks, a.run) == (b.blocks, b.run) or (a.blocks == 1 and a.is_whole) or (b.blocks == 1 and b.is_whole)
        for a, b in zip(have, want)
    )


def list_parts(
    makers: Sequence[tuple[Span, ...] | None], readers: Sequence[tuple[Span, ...] | None], reader: int
) -> list[Part]:
    """Lists the parts that the rank at position ``reader`` receives, in the order of its blocks.

    Args:
      makers, readers: the blocks of each position of the two meshes.
    """
    want = readers[reader]
    if want is None:
        return []
    holders: dict[tuple[Span, ...], list[int]] = {}
    for position, have in enumerate(makers):
        if have is not None:
            holders.setdefault(have, []).append(position)
    found = []
    for have, positions in holders.items():
        common = tuple(_intersect_spans(a, b) for a, b in zip(have, want))
        if all(c is not None for c in common):
            maker = positions[reader % len(positions)]
            found.append(Part(maker, reader, common, _find_bounds(have, common)))  # type: ignore[arg-type]
    return sorted(found, key=lambda part: [s.first for s in part.spans or ()])


def _intersect_spans(a: Span, b: Span) -> Span | None:
    """Intersects two spans of one dimension; None when they have nothing in common."""
    if a.blocks == 1 and a.is_whole:
        return b
    if b.blocks == 1 and b.is_whole:
        return a
    low, high = max(a.first, b.first), min(a.first + a.count, b.first + b.count)
    return Span(a.blocks, a.run, low, high - low) if low < high else None


def _find_bounds(have: Sequence[Span], common: Sequence[Span | None]) -> tuple[tuple[int, int, int, int], ...]:
    found = []
    for dim, (h, c) in enumerate(zip(have, common)):
        assert c is not None
        if c.size != h.size:
            found.append((dim, c.blocks, c.first - (h.first if h.blocks == c.blocks else 0), c.count))
    return tuple(found)


def list_coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Lists the coordinates of all positions of a mesh, in order."""
    return list(product(*(range(n) for n in sizes)))


def split_dim_in_runs(shape: tuple[int, ...], dim: int, blocks: int) -> tuple[int, ...]:
    """Returns ``shape`` with dimension ``dim`` reshaped to (runs, run)."""
    return (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
