"""Defines placements: how a tensor lies over one mesh axis.

    S(d)[a,b]   sharded along dimension d: coordinate 0 holds a indices, coordinate 1 holds b
    B           replicated
    P(op)       partial: the value is the sum, max, min or product of what the coordinates hold
    O           only the first coordinate holds the tensor
    own[a,b]    per rank: each coordinate holds its own value, computed from its own a or b rows

Rules and passes work on one mesh axis at a time, with one ``Placement``; a ``Layout`` has one placement per axis.

The module also counts the logical bytes of reshards and collectives: the bytes that have to move between ranks
whichever algorithm moves them. Plans, predictions and whale_ops' counters (``logical_bytes``) all use these counts.

Decisions: 0015, 0016.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from hashlib import blake2b
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import overload

import numpy as np

from whale.ir.ops import ALL_REDUCES, ROW_EXCHANGES
from whale.ir.program import Node
from whale.ir.values import Dims, TensorType, count_item_bytes

REDUCTIONS = ("sum", "max", "min", "prod")
_PLACEMENT = re.compile(
    rf"B|O|P\((?P<op>{'|'.join(REDUCTIONS)})\)|own\[(?P<rows>\d+(,\d+)*)\]"
    r"|S\((?P<dim>\d+)\)\[(?P<sizes>(\d+(,\d+)*)?)\](\*(?P<blocks>[1-9]\d*))?(\+(?P<before>\d+)\+(?P<after>\d+))?"
)
_MOST_NAMED = 16  # with more parts, names and keys have a digest instead of the sizes


@dataclass(frozen=True)
class Shard:
    """Represents a sharded tensor: coordinate ``i`` of the mesh axis holds ``sizes[i]`` indices of dimension ``dim``.

    A size may be 0. With ``blocks`` > 1 the dimension consists of that many runs of ``sum(sizes)`` indices, and each
    coordinate holds its part of every run: so a batch dimension lies in two concatenated batches, or inside a flattened
    (time, batch) dimension.

    With ``halo`` = (before, after) a coordinate also holds that many of its neighbours' indices, as far as they exist:
    a convolution over a sharded dimension needs them. Only operands have a halo, and a coordinate without own indices
    has none.

    Properties over all coordinates are cached, since a program has few different shards and asks for them often.
    """

    dim: int
    sizes: tuple[int, ...]
    blocks: int = 1
    halo: tuple[int, int] = (0, 0)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dim, self.sizes, self.blocks, self.halo))

    @cached_property
    def run(self) -> int:
        """Returns the number of indices of one run: the whole dimension if ``blocks`` is 1."""
        return sum(self.sizes)

    @cached_property
    def smallest(self) -> int:
        """Returns the smallest number of indices that a coordinate holds of a run."""
        return min(self.sizes, default=0)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Returns, for each coordinate, the index within a run at which its part begins."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @cached_property
    def holders(self) -> frozenset[int]:
        """Returns the coordinates that hold at least one index."""
        return frozenset(i for i, size in enumerate(self.sizes) if size)

    @cached_property
    def largest(self) -> int:
        """Returns the largest number of indices that a coordinate holds of a run."""
        return max(self.sizes, default=0)

    @cached_property
    def label(self) -> str:
        """Returns the text of the shard for node names and keys; above 16 coordinates, with a digest in place of the
        sizes.
        """
        if len(self.sizes) <= _MOST_NAMED:
            return str(self)
        sizes = blake2b(repr(self.sizes).encode(), digest_size=8).hexdigest()
        return f"S({self.dim})[{len(self.sizes)} parts {sizes}]*{self.blocks}+{self.halo[0]}+{self.halo[1]}"

    @cached_property
    def without_halo(self) -> Shard:
        """Returns the same shard without its halo."""
        return self if self.halo == (0, 0) else shard(self.dim, self.sizes, self.blocks)

    @property
    def extent(self) -> int:
        """Returns the global size of the sharded dimension."""
        return self.blocks * self.run

    def local_size(self, coordinate: int) -> int:
        """Returns the size of the sharded dimension on ``coordinate``, its halo included."""
        first, end = self.find_span(coordinate)
        return self.blocks * (end - first)

    def offset(self, coordinate: int) -> int:
        """Returns the index within a run at which the part of ``coordinate`` begins, without halo."""
        return self.starts[coordinate]

    def find_span(self, coordinate: int) -> tuple[int, int]:
        """Returns the indices of a run that ``coordinate`` holds, with its halo, as (first, one past the last)."""
        first, size = self.starts[coordinate], self.sizes[coordinate]
        if not size:
            return first, first
        return max(0, first - self.halo[0]), min(self.run, first + size + self.halo[1])

    def list_indices(self, coordinate: int) -> np.ndarray:
        """Returns the global indices of the dimension that ``coordinate`` holds, in the order of its local tensor."""
        run = np.arange(*self.find_span(coordinate))
        return (np.arange(self.blocks)[:, None] * self.run + run).reshape(-1)

    def __str__(self) -> str:
        text = f"S({self.dim})[{','.join(map(str, self.sizes))}]"
        text = text if self.blocks == 1 else f"{text}*{self.blocks}"
        return text if self.halo == (0, 0) else f"{text}+{self.halo[0]}+{self.halo[1]}"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Represents a replicated tensor, written ``B``: every coordinate holds the whole tensor."""

    def __str__(self) -> str:
        return "B"


B = Replicate()


@dataclass(frozen=True, slots=True)
class Partial:
    """Represents a partial tensor, written ``P(op)``: the value is the elementwise ``op`` over all coordinates.

    Each coordinate holds a tensor of the whole shape; ``op`` is sum, max, min or prod.
    """

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


P_SUM = Partial("sum")
P_MAX = Partial("max")
P_MIN = Partial("min")


@dataclass(frozen=True, slots=True)
class RankZero:
    """Represents a tensor that only the first coordinate holds, written ``O``.

    Results of ops that must run once, such as random ops without seeds, have this placement.
    """

    def __str__(self) -> str:
        return "O"


FIRST = RankZero()

# Explains the letters of placements in error messages.
LEGEND = (
    "S(d)[a,b] split along dimension d, with a and b indices on the ranks; B replicated; P(op) partial, to be reduced; "
    "O on the first rank only; own[a,b] each rank's own value, of a and b rows"
)


@dataclass(frozen=True, slots=True)
class PerRank:
    """Represents a value that each coordinate computes from its own rows, written ``own``: local batch statistics.

    Every coordinate holds a tensor of the whole shape. Where one value is needed, the average weighted by ``rows``
    stands for them: coordinate ``i`` contributes ``rows[i] / sum(rows)`` times its value to a sum.
    """

    rows: tuple[int, ...]

    def __str__(self) -> str:
        return f"own[{','.join(map(str, self.rows))}]"

    def share(self, coordinate: int) -> float:
        """Returns the weight of ``coordinate`` in the weighted average: its fraction of the rows."""
        return self.rows[coordinate] / sum(self.rows)


Placement = Shard | Replicate | Partial | RankZero | PerRank
Layout = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """Describes one legal way to run an op over a mesh axis.

    Attributes:
      inputs: the placement that each operand must have.
      outputs: the placement that each output then has.
      why: why the strategy is legal, in words, for ``whale explain``.
      once: the node exists on the first coordinate only; its outputs, if any, are ``O``.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    why: str
    once: bool = False

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"


@lru_cache(maxsize=65536)
def shard(dim: int, sizes: tuple[int, ...], blocks: int = 1, halo: tuple[int, int] = (0, 0)) -> Shard:
    """Returns the ``Shard`` of these values, always the same object for equal values, so that comparisons are cheap."""
    return Shard(dim, sizes, blocks, halo)


def divide_evenly(size: int, parts: int) -> tuple[int, ...]:
    """Divides ``size`` into ``parts`` as evenly as integers allow, larger parts first: 7 over 2 is (4, 3)."""
    base, extra = divmod(size, parts)
    return tuple(base + (i < extra) for i in range(parts))


@lru_cache(maxsize=1024)
def divide_proportionally(size: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Divides ``size`` into integers in proportion to ``weights``, of which at least one must be positive.

    Uses the Sainte-Laguë method: units go one by one to the most under-served weight, so no part shrinks when ``size``
    grows. If ``size`` is the sum of ``weights``, the result equals ``weights``. A weight of 0 gets 0.
    """
    sizes = [0] * len(weights)
    needs: list[tuple[Fraction, int]] = [(Fraction(-w), i) for i, w in enumerate(weights) if w]
    heapify(needs)
    for _ in range(size):
        i = needs[0][1]
        sizes[i] += 1
        heapreplace(needs, (Fraction(-weights[i], 2 * sizes[i] + 1), i))
    return tuple(sizes)


def find_multiple(sizes: tuple[int, ...], rows: tuple[int, ...]) -> int:
    """Returns the integer k for which ``sizes`` equals k times ``rows``, element by element; 0 if there is none.

    Lowering uses it to recognise a dimension that is sharded as the batch is, with k indices per row.
    """
    times = sum(sizes) // (sum(rows) or 1)
    return times if tuple(times * n for n in rows) == sizes else 0


def find_identity(op: str, dtype: str) -> object:
    """Returns the identity element of the reduction ``op`` for ``dtype``: 0 for sum, minus infinity for a float max.

    A coordinate that has nothing to contribute to a partial tensor holds this value.

    Raises:
      ValueError: ``op`` is not one of sum, max, min, prod.
    """
    if op == "sum":
        return False if dtype == "bool" else 0
    if op == "prod":
        return 1
    if op not in ("max", "min"):
        raise ValueError(
            f"the reduction {op!r} has no identity element; those that have one are {', '.join(REDUCTIONS)}"
        )
    if dtype == "bool":
        return op == "min"
    if dtype.startswith(("int", "uint")):
        info = np.iinfo(dtype)
        return info.min if op == "max" else info.max
    return -np.inf if op == "max" else np.inf


@overload
def local_shape(shape: tuple[int, ...], placement: Placement, coordinate: int) -> tuple[int, ...]: ...


@overload
def local_shape(shape: Dims | None, placement: Placement, coordinate: int) -> Dims | None: ...


def local_shape(shape: Dims | None, placement: Placement, coordinate: int) -> Dims | None:
    """Returns the shape of a tensor on ``coordinate``, given its global shape and its placement over one axis.

    Args:
      shape: the global shape; None if the rank is unknown, in which case None comes back.
    """
    if shape is None or not isinstance(placement, Shard):
        return shape
    return shape[: placement.dim] + (placement.local_size(coordinate),) + shape[placement.dim + 1 :]


def parse_placement(text: str) -> Placement:
    """Parses the text of a placement; the inverse of ``str(placement)``.

    Raises:
      ValueError: ``text`` is none of ``S(d)[n,...]``, ``S(d)[n,...]*blocks``, ``S(d)[n,...]+before+after``, ``B``,
        ``P(op)``, ``O``, ``own[n,...]``.
    """
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        expected = "S(dim)[sizes], S(dim)[sizes]*blocks, S(dim)[sizes]+before+after, B, P(op), O, own[rows]"
        raise ValueError(f"{text!r} is not a placement of a tensor over a mesh axis; expected {expected}")
    if match["rows"]:
        return PerRank(tuple(map(int, match["rows"].split(","))))
    if match["op"]:
        return Partial(match["op"])
    if match["dim"]:
        sizes = tuple(int(s) for s in match["sizes"].split(",") if s)
        halo = int(match["before"] or 0), int(match["after"] or 0)
        return shard(int(match["dim"]), sizes, int(match["blocks"] or 1), halo)
    return B if text == "B" else FIRST


def count_moved_bytes(source: Placement, target: Placement, tensor_bytes: int, size: int) -> int:
    """Returns the logical bytes that a reshard moves, over all ranks of one mesh axis together.

    With p ranks and a tensor of T bytes:

        S -> B                    (p-1) T     all-gather
        P -> S                    (p-1) T     reduce-scatter
        P -> B                    2 (p-1) T   all-reduce
        S -> S                    what is not yet at its owner; (p-1)/p T from one evenly cut dimension to another
        S -> S, runs of one dim   (p-1) T     by way of B
        B -> S, B -> P, S -> P    0           a slice, or a fill with the reduction's identity

    The count is exact for uneven and empty shards: between S, B and O it counts what each coordinate needs and lacks.

    Args:
      tensor_bytes: T, the bytes of the whole tensor.
      size: p, the number of ranks along the axis.
    """
    if source == target or size == 1 or isinstance(source, Replicate) or isinstance(target, PerRank):
        return 0
    if isinstance(target, Shard) and target.halo != (0, 0):
        more = sum(target.local_size(i) for i in range(size)) - target.extent
        return count_moved_bytes(source, target.without_halo, tensor_bytes, size) + tensor_bytes * more // max(
            1, target.extent
        )
    if isinstance(source, Partial):
        op = "WhaleAllReduce" if isinstance(target, Replicate) else "WhaleReduceScatter"
        return count_collective_bytes(op, tensor_bytes, size)  # P -> P of another reduction goes by way of S
    if isinstance(target, Partial):
        return 0
    if isinstance(source, PerRank):
        return count_moved_bytes(P_SUM, target, tensor_bytes, size)
    by_way_of_whole = (
        isinstance(source, Shard) and isinstance(target, Shard) and source.dim == target.dim
        and (is_in_runs(source) or is_in_runs(target))
    )  # fmt: skip
    if isinstance(target, Replicate) or by_way_of_whole:
        return count_collective_bytes("WhaleAllGather", tensor_bytes, size)
    return tensor_bytes - tensor_bytes * _count_staying(source, target) // _count_positions(source, target)


def format_label(placement: Placement) -> str:
    """Returns a short text of a placement, for node names and keys; texts differ for the different placements of a
    tensor.
    """
    return placement.label if isinstance(placement, Shard) else str(placement)


def is_in_runs(placement: Placement) -> bool:
    """Returns True if a placement shards a dimension that consists of several runs (``Shard.blocks`` > 1)."""
    return isinstance(placement, Shard) and placement.blocks > 1


def _count_staying(source: Placement, target: Placement) -> int:
    """Returns how many index positions need not move in a reshard, because a coordinate holds them before and after."""
    if isinstance(source, Shard) and isinstance(target, Shard):
        if source.dim == target.dim:
            return sum(_count_overlap(source, target, i) for i in range(len(source.sizes)))
        return sum(a * b for a, b in zip(source.sizes, target.sizes))
    cut = source if isinstance(source, Shard) else target
    return cut.sizes[0] if isinstance(cut, Shard) else 1


def _count_positions(source: Placement, target: Placement) -> int:
    """Returns the number of index positions of the sharded dimensions: their sizes multiplied; at least 1.

    ``_count_staying`` counts among these positions, so that their quotient is the fraction of the tensor that need not
    move.
    """
    count = 1
    for cut in {p.dim: p for p in (source, target) if isinstance(p, Shard)}.values():
        count *= cut.run
    return count or 1


def _count_overlap(a: Shard, b: Shard, i: int) -> int:
    low = max(a.offset(i), b.offset(i))
    high = min(a.offset(i) + a.sizes[i], b.offset(i) + b.sizes[i])
    return max(0, high - low)


def count_collective_bytes(op: str, tensor_bytes: int, ranks: int) -> int:
    """Returns the logical bytes that all ranks together send in the collective ``op``, whatever algorithm carries it
    out.

    With p ranks and a tensor of T bytes: 2(p-1)T for an all-reduce; (p-1)T for an all-gather, a reduce-scatter or a
    broadcast, in which every rank but one has to get each element, or its contribution to the element's sum.
    """
    return (2 if op in ALL_REDUCES else 1) * (ranks - 1) * tensor_bytes


def count_wire_bytes(tensor_bytes: int, dtype: str, wire_dtype: str) -> int:
    """Returns the bytes of a tensor when it is sent in ``wire_dtype``; "" means in its own dtype."""
    return tensor_bytes // count_item_bytes(dtype) * count_item_bytes(wire_dtype) if wire_dtype else tensor_bytes


def count_operand_bytes(node: Node, inputs: Sequence[TensorType]) -> int:
    """Returns the bytes of all tensors that one rank passes to a communication op, in the dtype in which they are sent.

    Args:
      inputs: the operands' types on this rank; the communicator handle counts nothing.
    """
    wire_dtype = str(node.attrs.get("wire_dtype", ""))
    return sum(count_wire_bytes(t.bytes, t.dtype, wire_dtype) for t in inputs if t.dtype != "resource")


def count_rank_bytes(node: Node, inputs: Sequence[TensorType], place: int, ranks: int) -> int:
    """Returns the logical bytes that one rank sends in a communication op.

    Over all ranks of a collective, these add up to ``count_collective_bytes``. A send counts its tensor, a receive 0.

    Args:
      inputs: the operands' types on this rank.
      place: the rank's position in the group of ranks that take part; unused for sends and receives.
      ranks: number of ranks in that group; unused for sends and receives.
    """
    sent = count_operand_bytes(node, inputs)
    if node.op == "WhaleSend":
        return sent
    if node.op == "WhaleRecv":
        return 0
    if node.op in ALL_REDUCES:
        total = count_collective_bytes(node.op, sent, ranks)
        return total // ranks + (place < total % ranks)
    if node.op == "WhaleAllGather":  # its part goes to all others
        return count_collective_bytes(node.op, sent, ranks)
    if node.op == "WhaleReduceScatter":  # all others' parts of what it keeps
        return count_collective_bytes(node.op, node.outputs[0].bytes, ranks)
    if node.op == "WhaleAllToAll":  # all but what it keeps
        sizes = node.attrs["split_sizes"]
        return sent - (sent * sizes[place] // sum(sizes) if sum(sizes) else 0)
    if node.op in ROW_EXCHANGES:
        return node.marks.expected_bytes
    assert node.op == "WhaleBroadcast", node.op
    whole = sum(t.bytes for t in node.outputs)
    return count_collective_bytes(node.op, whole, ranks) if place == int(node.attrs["root"]) else 0
