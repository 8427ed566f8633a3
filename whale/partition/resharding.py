"""Emits the nodes that change the placement of a tensor (a reshard) on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whale.errors import LayoutError
from whale.ir.emitter import Emitter, replace_size
from whale.ir.layout import (
    LEGEND,
    B,
    Partial,
    PerRank,
    Placement,
    RankZero,
    Replicate,
    Shard,
    format_label,
    is_in_runs,
    local_shape,
    shard,
)
from whale.ir.marks import Marks
from whale.ir.ops import COLLECTIVES
from whale.ir.plan import Reshard
from whale.ir.program import Ref
from whale.ir.values import DType, Shape, TensorType, find_numpy_dtype, require_static_shape


@dataclass(frozen=True, slots=True)
class Move:
    """Represents a change of a tensor's shard sizes or halos along one dimension, which ``move_shares`` emits.

    Attributes:
      name: prefix of the names of the nodes that are emitted for the change.
      source: this rank's present shard.
      type: global type of the tensor.
      have: the present shards.
      want: the shards to make.
    """

    name: str
    source: Ref
    type: TensorType
    have: Shard
    want: Shard

    def find_common(self, owner: int, to: int) -> tuple[int, int]:
        """Returns the indices that ``owner`` has and ``to`` wants, as (first, one past the last); empty if first >=
        last.
        """
        mine, theirs = self.have.find_span(owner), self.want.find_span(to)
        return max(mine[0], theirs[0]), min(mine[1], theirs[1])

    def make_piece_type(self, count: int) -> TensorType:
        """Returns the type of a message that carries ``count`` indices of the sharded dimension."""
        return TensorType(self.type.dtype, replace_size(self.type, self.have.dim, count))


def emit_reshard(e: Emitter, r: Reshard, t: TensorType, source: Callable[[], Ref | None]) -> Ref | None:
    """Emits one reshard on one rank, and returns the tensor in its new placement; None if this rank does not hold it
    then.

    Args:
      t: global type of the tensor.
      source: returns the tensor in its old placement; None on ranks that do not hold an ``O`` tensor.

    Raises:
      LayoutError: no implementation of this change exists.
    """
    if e.size == 1:
        return source()  # the first rank is all ranks
    name = make_reshard_name(e.prefix, r.ref, r.target)
    have, want = r.source, r.target
    if is_in_runs(have) or is_in_runs(want):
        return _emit_by_runs(e, name, r, t, source)
    local = source()
    if isinstance(have, RankZero):
        return _emit_from_first(e, name, local, r, t)
    assert local is not None, r
    if isinstance(have, PerRank) and isinstance(want, Partial):
        return e.multiply_by_weight(name, local, t, have.share(e.rank))
    if isinstance(want, PerRank) and isinstance(have, Partial):
        share = want.share(e.rank)
        return e.multiply_by_weight(name, local, t, 1 / share if share else 0.0)
    if isinstance(want, RankZero):
        return local if e.rank == 0 else None
    if isinstance(have, Replicate):
        if isinstance(want, Shard):
            return e.cut(name, local, t, want)
        assert isinstance(want, Partial)
        return local if e.rank == 0 else e.fill(name, local, t, want.op)
    if isinstance(have, Shard):
        if isinstance(want, Partial):
            return e.pad(name, local, t, have, want.op)
        if isinstance(want, Replicate):
            return e.all_gather(name, (local,), (t,), have, r.key)
        assert isinstance(want, Shard)
        if want.dim == have.dim:
            return move_shares(e, name, r.key, [Move(name, local, t, have, want)])[0]
        attrs = {
            "key": r.key,
            "split_axis": want.dim,
            "split_sizes": want.sizes,
            "concat_axis": have.dim,
            "concat_sizes": have.sizes,
        }
        return e.comm_op(
            name, "WhaleAllToAll", (local,), t, attrs, (TensorType(t.dtype, local_shape(t.shape, want, e.rank)),)
        )
    assert isinstance(have, Partial)
    if isinstance(want, Replicate):
        return e.all_reduce(name, (local,), (t,), r, r.key)
    if isinstance(want, Shard):
        if r.wire_dtype:
            return _emit_rounded_scatter(e, name, local, t, want, r)
        attrs = {"key": r.key, "reduction": have.op, "axis": want.dim, "sizes": want.sizes}
        return e.comm_op(
            name, "WhaleReduceScatter", (local,), t, attrs, (TensorType(t.dtype, local_shape(t.shape, want, e.rank)),)
        )
    raise LayoutError(
        "a change of a tensor's placement cannot be carried out by one reshard",
        op=str(r.ref),
        given=f"{have} -> {want}",
        notation=LEGEND,
        expected="two reshards: to a replicated tensor (B), and from it",
        action="make the plan again with `whale plan`",
    )


def _emit_rounded_scatter(e: Emitter, name: str, local: Ref, t: TensorType, want: Shard, r: Reshard) -> Ref:
    """Emits a reduce-scatter that sends 16-bit elements: shards are rounded, sent to their rank, widened, and summed
    there.
    """
    shape, wire = require_static_shape(t), r.wire_dtype
    to_wire = {"SrcT": DType(t.dtype), "DstT": DType(wire), "Truncate": False}
    rounded = e.add(
        f"{name}/rounded", "Cast", (local,), to_wire, (TensorType(wire, shape),), marks=Marks(rounds_for_wire=True)
    )
    lifted = TensorType(wire, (1, *shape))
    source = e.reshape(f"{name}/lifted", rounded, wire, (1, *shape))
    attrs = {
        "key": r.key,
        "split_axis": want.dim + 1,
        "split_sizes": want.sizes,
        "concat_axis": 0,
        "concat_sizes": (1,) * e.size,
    }
    mine = require_static_shape(TensorType(t.dtype, local_shape(shape, want, e.rank)))
    parts = (TensorType(wire, (e.size, *mine)),)
    got = e.comm_op(f"{name}/parts", "WhaleAllToAll", (source,), lifted, attrs, parts)
    from_wire = {"SrcT": DType(wire), "DstT": DType(t.dtype), "Truncate": False}
    wide = e.add(f"{name}/widened", "Cast", (got,), from_wire, (TensorType(t.dtype, (e.size, *mine)),))
    operands = (wide, e.const(f"{name}/first", np.array([0], np.int32)))
    summed = {"T": DType(t.dtype), "Tidx": DType("int32"), "keep_dims": False}
    return e.add(name, "Sum", operands, summed, (TensorType(t.dtype, mine),))


def _emit_by_runs(e: Emitter, name: str, r: Reshard, t: TensorType, source: Callable[[], Ref | None]) -> Ref | None:
    """Emits a reshard from or to a shard of several runs, by viewing the dimension as (runs, run) and sharding the
    second.

    Between two such shards of one dimension, the tensor is gathered and sliced instead.
    """
    have, want = r.source, r.target
    if isinstance(have, Shard) and isinstance(want, Shard) and have.dim == want.dim:
        whole = emit_reshard(e, replace(r, target=B), t, source)
        return emit_reshard(e, replace(r, source=B), t, lambda: whole)
    runs_of = {p.dim: p.blocks for p in (have, want) if isinstance(p, Shard) and p.blocks > 1}
    cut = {p.dim: p.extent for p in (have, want) if isinstance(p, Shard)}  # known of branches' results, too
    known = None if t.shape is None else tuple(cut.get(dim, size) for dim, size in enumerate(t.shape))
    whole_shape = require_static_shape(replace(t, shape=known))
    shape: tuple[int, ...] = ()
    place: list[int] = []  # dimension of the tensor -> its dimension in the view; of (runs, run), the second
    for dim, size in enumerate(whole_shape):
        shape += (runs_of[dim], size // runs_of[dim]) if dim in runs_of else (size,)
        place.append(len(shape) - 1)
    view = TensorType(t.dtype, shape)
    have_at, want_at = (shard(place[p.dim], p.sizes) if isinstance(p, Shard) else p for p in (have, want))
    local = source()
    # The tensor may itself be such a view made for another mesh axis, so the name has that axis's prefix.
    runs = "runs" if e.prefix == "whale" else f"{e.prefix.replace('/', '_')}_runs"
    if local is not None:
        local = e.reshape(f"{name}/{runs}", local, t.dtype, local_shape(shape, have_at, e.rank))
    inner = replace(r, ref=Ref(f"{r.ref.node}/{runs}", r.ref.index), source=have_at, target=want_at)
    before = set(e.nodes)
    got = emit_reshard(e, inner, view, lambda: local)
    if len(runs_of) == 1:
        seen_as = next(iter(runs_of.items()))
        for node in [n for n in e.nodes.values() if n.name not in before and n.op in COLLECTIVES]:
            e.nodes[node.name] = node.with_marks(runs=seen_as)
    return None if got is None else e.reshape(name, got, t.dtype, local_shape(whole_shape, want, e.rank))


def _emit_from_first(e: Emitter, name: str, local: Ref | None, r: Reshard, t: TensorType) -> Ref | None:
    want: Placement = r.target
    if isinstance(want, RankZero):
        return local
    if isinstance(want, Shard) and t.is_static:
        return e.scatter(name, local, t, want, r.key)
    if local is None:
        local = e.const(name + "/nothing", np.zeros((0,), find_numpy_dtype(t.dtype)))
    attrs = {"key": r.key, "root": 0, "N": 1, "shapes": (Shape(t.shape),)}
    if isinstance(want, Partial) and t.is_static:
        return local if e.rank == 0 else e.fill(name, local, t, want.op)
    whole = e.comm_op(name, "WhaleBroadcast", (local,), t, attrs, (t,))
    if isinstance(want, Shard):
        return e.cut(name + "/cut", whole, t, want)
    if isinstance(want, Partial):
        return whole if e.rank == 0 else e.fill(name + "/fill", whole, t, want.op)
    return whole


def emit_fused(
    e: Emitter, name: str, members: Sequence[Reshard], sources: Sequence[Ref], types: Sequence[TensorType]
) -> None:
    """Emits the reshards of several tensors as one fused exchange; ``find_fused_result`` returns their results."""
    first = members[0]
    if isinstance(first.source, Partial):
        e.all_reduce(name, sources, types, first, name)
        return
    if isinstance(first.source, Shard) and isinstance(first.target, Replicate):
        e.all_gather(name, sources, types, first.source, name)
        return
    moves = [
        Move(make_reshard_name(e.prefix, r.ref, r.target), source, t, r.source, r.target)
        for r, source, t in zip(members, sources, types)
        if isinstance(r.source, Shard) and isinstance(r.target, Shard)
    ]
    for move, found in zip(moves, move_shares(e, name, name, moves)):
        if found.node != move.name:
            t = TensorType(move.type.dtype, local_shape(move.type.shape, move.want, e.rank))
            e.add(move.name, "Identity", (found,), {"T": DType(t.dtype)}, (t,))


def move_shares(e: Emitter, name: str, key: str, moves: Sequence[Move]) -> list[Ref]:
    """Emits changes of shard sizes or halos: each rank sends the indices that others lack, and joins what it receives.

    The data of all ``moves`` from one rank to another form one message; all tensors must have one dtype.

    Returns:
      the new shard of each move.
    """
    for peer in range(e.size):
        sent = [(m, m.find_common(e.rank, peer)) for m in moves if peer != e.rank]
        pieces = [
            (_slice(e, f"{m.name}/to_{peer}", m, low, high), m.make_piece_type(high - low))
            for m, (low, high) in sent
            if low < high
        ]
        if pieces:
            piece = pieces[0][0] if len(pieces) == 1 else _pack(e, f"{name}/to_{peer}", pieces)
            attrs = {"key": f"{key}/{e.rank}to{peer}", "peer": peer}
            e.comm_op(f"{name}/send_{peer}", "WhaleSend", (piece,), moves[0].type, attrs, ())
    found: list[list[Ref]] = [[] for _ in moves]
    for peer in range(e.size):
        got = [(i, m, *m.find_common(peer, e.rank)) for i, m in enumerate(moves)]
        got = [one for one in got if one[2] < one[3]]
        if peer == e.rank:
            for i, m, low, high in got:
                found[i].append(_slice(e, f"{m.name}/kept", m, low, high))
        elif got:
            shapes = [m.make_piece_type(high - low) for _, m, low, high in got]
            whole = shapes[0] if len(got) == 1 else TensorType(shapes[0].dtype, (sum(t.elements for t in shapes),))
            attrs = {"key": f"{key}/{peer}to{e.rank}", "peer": peer, "shape": Shape(whole.shape)}
            received = e.comm_op(f"{name}/recv_{peer}", "WhaleRecv", (), whole, attrs, (whole,))
            names = [f"{m.name}/from_{peer}" for _, m, _, _ in got]
            parts = [received] if len(got) == 1 else _unpack(e, names, received, whole, shapes)
            for (i, *_), part in zip(got, parts):
                found[i].append(part)
    return [_join_pieces(e, m, pieces) for m, pieces in zip(moves, found)]


def _slice(e: Emitter, name: str, m: Move, low: int, high: int) -> Ref:
    return e.rows(name, m.source, m.type, m.have.dim, low - m.have.find_span(e.rank)[0], high - low)


def _pack(e: Emitter, name: str, pieces: Sequence[tuple[Ref, TensorType]]) -> Ref:
    """Concatenates tensors, flattened, into one vector."""
    flat = [e.reshape(f"{name}/flat_{i}", p, t.dtype, (t.elements,)) for i, (p, t) in enumerate(pieces)]
    operands = (*flat, e.const(e.name_part(name, "axis"), np.array(0, np.int32)))
    dtype = pieces[0][1].dtype
    kinds = {"T": DType(dtype), "Tidx": DType("int32"), "N": len(flat)}
    return e.add(name, "ConcatV2", operands, kinds, (TensorType(dtype, (sum(t.elements for _, t in pieces),)),))


def _unpack(e: Emitter, names: Sequence[str], vector: Ref, t: TensorType, shapes: Sequence[TensorType]) -> list[Ref]:
    """Splits a vector made by ``_pack`` into its tensors."""
    found, first = [], 0
    for name, shape in zip(names, shapes):
        flat = e.rows(f"{name}/flat", vector, t, 0, first, shape.elements)
        found.append(e.reshape(name, flat, shape.dtype, require_static_shape(shape)))
        first += shape.elements
    return found


def _join_pieces(e: Emitter, m: Move, pieces: Sequence[Ref]) -> Ref:
    """Concatenates the pieces of one tensor that a rank kept and received; zero-sized if there are none."""
    out = TensorType(m.type.dtype, local_shape(m.type.shape, m.want, e.rank))
    if not pieces:
        return e.const(m.name, np.zeros(require_static_shape(out), find_numpy_dtype(out.dtype)))
    if len(pieces) == 1:
        return pieces[0]
    operands = (*pieces, e.const(e.name_part(m.name, "axis"), np.array(m.have.dim, np.int32)))
    kinds = {"T": DType(out.dtype), "Tidx": DType("int32"), "N": len(pieces)}
    return e.add(m.name, "ConcatV2", operands, kinds, (out,))


def find_fused_result(prefix: str, r: Reshard, place: int) -> Ref:
    """Returns the result of ``r``, which is number ``place`` in its fused group."""
    whole = isinstance(r.target, Replicate)
    return Ref(f"{prefix}/group_{r.group}", place) if whole else Ref(make_reshard_name(prefix, r.ref, r.target))


def make_reshard_name(prefix: str, ref: Ref, target: Placement) -> str:
    """Returns the name of the node that yields ``ref`` in placement ``target``."""
    text = f"{ref.node}_{ref.index}_to_{format_label(target)}"
    return f"{prefix}/" + "".join(c if c.isalnum() or c in "._/-" else "_" for c in text)


def is_joint(r: Reshard) -> bool:
    """Returns True if all ranks have to take part in the reshard, even those that do not need its result."""
    have, want = type(r.source), type(r.target)
    if PerRank in (have, want):
        return False
    return have is not Replicate and want is not RankZero and not (have is Shard and want is Partial)
