"""Computes which parts of a tensor each rank sends when a tensor goes from one pipeline stage group to another.

The two groups may have meshes of different axes and sizes. If both use the same mesh, each rank receives the tensor
from the rank with the same coordinates. Otherwise each rank holds a block of the tensor, described by one ``Span`` per
dimension, and a receiver gets the intersections of its block with the senders' blocks.

A partial sum is reduce-scattered before it is sent. A tensor that the receivers need replicated or as a partial sum is
sent to each of them in shards and all-gathered there, so that each byte crosses between the groups only once. A tensor
below 4 KiB is sent whole to every receiver instead.

  find_sent_placement      the placement over one mesh axis in which the senders send a tensor
  find_received_placement  the placement over one mesh axis in which the receivers first hold it
  find_block               the block of the tensor that one rank holds
  list_parts               the parts that one receiving rank gets, with their senders
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from whale.ir.layout import FIRST, B, PerRank, Placement, Replicate, Shard, divide_evenly, local_shape, shard
from whale.ir.values import Dims, TensorType, require_static_shape

_LEAST_BYTES = 1 << 12  # smaller tensors are sent whole: one more message costs more than the bytes that it saves


@dataclass(frozen=True, slots=True)
class Span:
    """Describes which indices of one dimension a rank holds.

    The dimension consists of ``blocks`` runs of ``run`` indices each; of every run the rank holds ``count`` indices
    from ``first`` on. With ``blocks`` = 1 this is one contiguous slice. Example: ``Span(2, 4, 1, 2)`` holds the indices
    1, 2, 5 and 6 of a dimension of 8.
    """

    blocks: int
    run: int
    first: int
    count: int

    @property
    def is_whole(self) -> bool:
        """Returns True if the span covers the whole dimension."""
        return self.count == self.run

    @property
    def size(self) -> int:
        """Returns the number of indices in the span, over all runs."""
        return self.blocks * self.count


@dataclass(frozen=True, slots=True)
class Part:
    """Describes one message: the part of a tensor that one rank of the sending mesh sends to one rank of the receiving
    mesh.

    Attributes:
      sender: position of the sending rank in its mesh.
      receiver: position of the receiving rank in its own mesh.
      spans: the part as one span of the global tensor per dimension; None: everything that the sender holds.
      cut: how the sender slices its local tensor: (dimension, number of runs, first index in each local run, indices
        per run) for each dimension of which it sends less than it holds.
    """

    sender: int
    receiver: int
    spans: tuple[Span, ...] | None = None
    cut: tuple[tuple[int, int, int, int], ...] = ()

    def shape(self, shape: Dims | None) -> Dims | None:
        """Returns the shape of the message, given the shape of the sender's local tensor."""
        return shape if self.spans is None else tuple(s.size for s in self.spans)


def find_sent_placement(t: TensorType, made: Placement, size: int, rows: int | None) -> Placement:
    """Returns the placement over one axis of the senders' mesh in which a tensor is sent to another mesh.

    Shards and replicated tensors are sent as they were produced. A partial sum becomes a shard of the largest dimension
    (one reduce-scatter), or replicated if the tensor is small; a per-rank value becomes replicated.

    Args:
      t: the tensor's type as left by the outer mesh axes, which are handled first.
      made: the placement in which the producer leaves the tensor.
      size: number of ranks along the axis.
      rows: the dimension that micro-batches slice, which is never sharded here; None if the tensor is sent once per
        step.
    """
    if not t.is_static:
        return FIRST if made == FIRST else B
    if isinstance(made, (Shard, Replicate)) or made == FIRST:
        return made
    return B if isinstance(made, PerRank) else _split_largest_dim(t, size, rows)


def find_received_placement(t: TensorType, wanted: Placement, size: int, rows: int | None) -> Placement:
    """Returns the placement over one axis of the receivers' mesh in which a tensor arrives from another mesh.

    A shard arrives as that shard. A tensor that the readers want replicated or partial arrives as a shard of its
    largest dimension, to be gathered there. Arguments as in ``find_sent_placement``; ``wanted`` is the placement that
    readers need.
    """
    if not t.is_static:
        return FIRST if wanted == FIRST else B
    return wanted if isinstance(wanted, Shard) or wanted == FIRST else _split_largest_dim(t, size, rows)


def _split_largest_dim(t: TensorType, size: int, rows: int | None) -> Placement:
    """Returns a shard of the largest dimension other than ``rows``, or replicated if the tensor is below 4 KiB or too
    short.
    """
    shape = require_static_shape(t)
    dims = [d for d, n in enumerate(shape) if d != rows and n >= size]
    if size == 1 or t.bytes < _LEAST_BYTES or not dims:
        return B
    dim = max(dims, key=lambda d: shape[d])
    return shard(dim, divide_evenly(shape[dim], size))


def find_local_type(t: TensorType, placements: Sequence[Placement], at: Sequence[int]) -> TensorType:
    """Returns the local type of a tensor on the rank at coordinates ``at``, after each axis's placement has cut it in
    turn.
    """
    shape = t.shape
    for placement, coordinate in zip(placements, at):
        shape = local_shape(shape, placement, coordinate)
    return TensorType(t.dtype, shape)


def find_block(shape: Sequence[int], placements: Sequence[Placement], at: Sequence[int]) -> tuple[Span, ...] | None:
    """Returns the block of a tensor that the rank at coordinates ``at`` holds, as one span per dimension.

    The result is None if the rank holds nothing: its shard is empty, or only the first coordinate has the tensor.

    Args:
      shape: the tensor's global shape.
      placements: one per mesh axis, outermost first; each applies to what the axes before it have left.
      at: the rank's coordinate on each of these axes.

    Raises:
      ValueError: two axes cut one dimension into runs of different lengths, so that no span describes the block.
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
        raise ValueError(
            f"two mesh axes split dimension {p.dim} into pieces of different lengths, so that what a rank holds is no "
            f"slice of the tensor: {p} of {held}; expected pieces of one length"
        )
    return Span(held.blocks, held.run, held.first + first, count)


def can_cross(have: Sequence[Span], want: Sequence[Span]) -> bool:
    """Returns True if the intersection of the blocks ``have`` and ``want`` is again one block.

    That holds if, in every dimension, both blocks cut the same runs or one of them is not cut.
    """
    return all(
        (a.blocks, a.run) == (b.blocks, b.run) or (a.blocks == 1 and a.is_whole) or (b.blocks == 1 and b.is_whole)
        for a, b in zip(have, want)
    )


def list_parts(
    makers: Sequence[tuple[Span, ...] | None], readers: Sequence[tuple[Span, ...] | None], reader: int
) -> list[Part]:
    """Lists the parts that the rank at position ``reader`` of the receiving mesh gets, ordered by their first indices.

    If several ranks hold the same block, receivers are spread over these ranks, so that one does not serve all.

    Args:
      makers: the block of each position of the sending mesh; None where a rank holds nothing.
      readers: likewise for the receiving mesh.
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
    """Returns the intersection of two spans of one dimension; None if it is empty."""
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
    """Lists the coordinates of every position of a mesh whose axes have these sizes, the last axis varying fastest."""
    return list(product(*(range(n) for n in sizes)))


def split_dim_in_runs(shape: tuple[int, ...], dim: int, blocks: int) -> tuple[int, ...]:
    """Returns ``shape`` with dimension ``dim`` replaced by two: the number of runs, and the length of a run."""
    return (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
