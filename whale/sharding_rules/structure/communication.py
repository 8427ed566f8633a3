"""Defines sharding rules of communication ops of one mesh axis, for another axis: each coordinate communicates its
shard.

These nodes occur in programs that are already lowered for one axis. Operand 0 is the communicator.
"""

from __future__ import annotations

from collections.abc import Collection

from whale.ir.values import Shape
from whale.sharding_rules.base import Local, OpView, Strategy, local_output_shape, make_labels, write_term
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def reduction(op: OpView) -> str:
    """Writes the sharding rule of all-reduce: a single tensor can be sharded anywhere, fused ones cannot."""
    return "., * -> *" if len(op.inputs) == 2 else REPLICATED


def _find_linear_sum(op: OpView) -> str | None:
    """Returns ``lin``: partial sums pass a sum over ranks if it has one tensor, else None."""
    return "1" if op.attr("reduction") == "sum" and len(op.inputs) == 2 else None


def _find_extremum(op: OpView) -> str | None:
    """Returns ``mono``: partial maxima pass a maximum over ranks, and minima a minimum, if it has one tensor; else
    None.
    """
    kind = op.attr("reduction")
    return f"{kind}:1" if kind in ("max", "min") and len(op.inputs) == 2 else None


def _write_except(op: OpView, moved: Collection[int]) -> str:
    shape = op.inputs[1].shape
    if shape is None:
        return REPLICATED
    here, there = (
        [f"{kind}{i}^" if i in moved else x for i, x in enumerate(make_labels("a", len(shape)))]
        for kind in ("part", "whole")
    )
    return f"., {write_term(here)} -> {write_term(there)}"


def cut_or_join(op: OpView) -> str:
    """Writes the sharding rule of reduce-scatter and all-gather: all dimensions but their own can be sharded."""
    if len(op.inputs) > 2:
        return REPLICATED
    return _write_except(op, {int(op.attr("axis"))})


def cut_and_join(op: OpView) -> str:
    """Writes the sharding rule of all-to-all: all dimensions but its two can be sharded."""
    return _write_except(op, {int(op.attr("split_axis")), int(op.attr("concat_axis"))})


def send(op: OpView) -> str:
    """Writes the sharding rule of a send: shardable if it sends a micro-batch's rows, or is part of a ring."""
    return "., * ->" if op.marks.micro_batch_rows or op.marks.ring_dim is not None else REPLICATED


def receive(op: OpView) -> str:
    """Writes the sharding rule of a receive: shardable if it gets a micro-batch's rows, or is part of a ring."""
    if len(op.inputs) == 2:
        assert op.marks.ring_dim is not None
        return _write_except(op, {op.marks.ring_dim})
    return ". -> p*" if op.marks.micro_batch_rows else REPLICATED


def _set_received_shape(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Sets the attribute with the received shape to the local shape."""
    return Local(attrs={"shape": Shape(local_output_shape(op, strategy, 0, coordinate))})


RULES = (
    rule("WhaleAllReduce", reduction, lin=_find_linear_sum, mono=_find_extremum),
    rule("WhaleReduceScatter", cut_or_join, lin=_find_linear_sum, mono=_find_extremum),
    rule("WhaleAllGather", cut_or_join, lin="1"),
    rule("WhaleAllToAll", cut_and_join, lin="1"),
    rule("WhaleSend", send),
    rule("WhaleRecv", receive, local=_set_received_shape, produces_any=True),
    rule("WhaleCommunicator WhaleBroadcast WhaleCheck WhaleRouteIds WhaleReturnRows WhaleSendRows", REPLICATED),
)
