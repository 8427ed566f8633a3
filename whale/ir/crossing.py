"""How a tensor goes from one stage group to another: as it is between as many ranks, and else by way of parts.

A partial sum is scattered before it is sent. What the receiving ranks want whole, or as a partial sum, is sent to each
in part and gathered there, so that each byte crosses once; what is small is sent to each of them as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from whale.errors import PlanError
from whale.ir.layout import FIRST, B, Partial, PerRank, Placement, Split, even_sizes, split
from whale.ir.values import Dims, TensorType, static_shape

_LEAST_BYTES = 1 << 12  # below, another message costs more than the bytes that it saves


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor between two stage groups.

    Attributes:
      sent: how it lies over the sending ranks.
      received: how over the receiving ones.
      direct: coordinate c receives what coordinate c sends.
    """

    sent: Placement
    received: Placement
    direct: bool = False

    def bytes(self, t: TensorType, size: int) -> int:
        """Bytes that are sent in total, to ``size`` ranks; 0 where nobody knows before the run."""
        if not t.is_static:
            return 0
        return t.bytes if isinstance(self.received, Split) or self.received == FIRST else t.bytes * size


@dataclass(frozen=True, slots=True)
class Part:
    """What one coordinate sends to one of another stage group.

    Attributes:
      extents: (dimension, size) where it is smaller than the sender's or the receiver's tensor.
      cut: whether it is ``count`` positions from ``first`` of dimension ``dim`` of what the sender has, in each of its
        ``blocks`` runs; else it is all of that.
    """

    sender: int
    receiver: int
    extents: tuple[tuple[int, int], ...] = ()
    cut: bool = False
    dim: int = 0
    blocks: int = 1
    first: int = 0
    count: int = 0

    def shape(self, shape: Dims | None) -> Dims | None:
        """Its shape, given the sender's or the receiver's."""
        if shape is None:
            return None
        sizes = dict(self.extents)
        return tuple(sizes.get(d, n) for d, n in enumerate(shape))


def parts(crossing: Crossing, makers: int, readers: int) -> list[Part]:
    """All that is sent, by receiver and then by sender."""
    if crossing.direct:
        return [Part(c, c) for c in range(1 if crossing.sent == FIRST else makers)]
    have, want = crossing.sent, crossing.received
    found = []
    for reader in range(1 if want == FIRST else readers):
        if isinstance(want, Split) and not want.sizes[reader]:
            continue
        if isinstance(have, Split):
            found += [p for maker in sorted(have.holders) if (p := _part(have, want, maker, reader)) is not None]
        else:
            found.append(_cut_of_whole(want, 0 if have == FIRST else reader % makers, reader))
    return found


def _part(have: Split, want: Placement, maker: int, reader: int) -> Part | None:
    mine = (have.dim, have.local(maker))
    if not isinstance(want, Split):
        return Part(maker, reader, (mine,))
    if want.dim != have.dim:
        of_whole = _cut_of_whole(want, maker, reader)
        return replace(of_whole, extents=(mine, *of_whole.extents))
    low = max(have.offset(maker), want.offset(reader))
    high = min(have.offset(maker) + have.sizes[maker], want.offset(reader) + want.sizes[reader])
    if low >= high:
        return None
    extents = ((have.dim, have.blocks * (high - low)),)
    cut = high - low < have.sizes[maker]
    return Part(maker, reader, extents, cut, have.dim, have.blocks, low - have.offset(maker), high - low)


def _cut_of_whole(want: Placement, maker: int, reader: int) -> Part:
    if not isinstance(want, Split):
        return Part(maker, reader)
    first, count = want.offset(reader), want.sizes[reader]
    extents = ((want.dim, want.blocks * count),)
    return Part(maker, reader, extents, count < want.run, want.dim, want.blocks, first, count)


def in_runs_of(shape: tuple[int, ...], dim: int, blocks: int) -> tuple[int, ...]:
    """``shape`` with dimension ``dim`` seen as (runs, run)."""
    return (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])


def crossing(
    t: TensorType, made: Placement, makers: int, wanted: Placement, readers: int, rows: int | None = None
) -> Crossing:
    """How a tensor goes from ``makers`` ranks to ``readers`` ranks.

    Args:
      made, wanted: its placement where it is made, and where it is read.
      rows: the dimension that micro-batches cut; None: it is sent once.

    Raises:
      PlanError: it is a value of each rank's own.
    """
    if makers == readers:
        return Crossing(made, made, direct=True)
    if isinstance(made, PerRank) or isinstance(wanted, PerRank):
        raise PlanError(
            "statistics of each rank's own rows cannot go to a stage with another number of ranks",
            given=f"{t}, from {makers} to {readers} ranks",
            expected="statistics of the whole batch, or as many ranks for each stage",
            action="set sync_batch_norm=true",
        )
    if not t.is_static:
        return Crossing(FIRST if made == FIRST else B, FIRST if wanted == FIRST else B)
    sent: Placement = made
    if not isinstance(made, Split) and made not in (B, FIRST):
        sent = _in_parts(t, makers, rows) if isinstance(made, Partial) else B
    received: Placement = wanted
    if not isinstance(wanted, Split) and wanted != FIRST:
        received = _in_parts(t, readers, rows)
    if isinstance(sent, Split) and isinstance(received, Split) and sent.dim == received.dim:
        if (sent.blocks, sent.run) != (received.blocks, received.run):
            sent = B
    return Crossing(sent, received)


def _in_parts(t: TensorType, size: int, rows: int | None) -> Placement:
    """Cut along its largest dimension, if that is worth it."""
    shape = static_shape(t)
    dims = [d for d, n in enumerate(shape) if d != rows and n >= size]
    if size == 1 or t.bytes < _LEAST_BYTES or not dims:
        return B
    dim = max(dims, key=lambda d: shape[d])
    return split(dim, even_sizes(shape[dim], size))
