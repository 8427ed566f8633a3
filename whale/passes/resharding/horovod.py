"""Chooses the all-reduces that Horovod runs (``communication.backend=horovod``), and refuses programs that call Horovod
themselves.

Horovod gets the sums that no other communication depends on: gradients, the loss, metrics. They are recognised by that
property, not by names: no path leads from such a sum to another reshard that moves data. Whale runs the other reshards,
also the sums that later computation waits for (batch statistics, a softmax's normaliser): Horovod answers once in a
cycle of some milliseconds, which would add up along a chain.

Decision: 0025.
"""

from __future__ import annotations

from dataclasses import replace

from whale.errors import ProgramError
from whale.ir.layout import P_SUM, Partial, Placement, Replicate
from whale.ir.plan import Reshard
from whale.ir.program import Program, Ref
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.resharding.fuse_all_reduces import moves

# Element types of Horovod's all-reduce kernels for TensorFlow.
HOROVOD_DTYPES = frozenset({"float16", "float32", "float64", "int32", "int64", "uint8", "int8"})
# Ops that Horovod's Python calls leave in a graph -> the calls.
_CALLS = {
    "HorovodAllreduce": "hvd.DistributedOptimizer, hvd.DistributedGradientTape or hvd.allreduce",
    "HorovodGroupedAllreduce": "hvd.DistributedOptimizer, hvd.DistributedGradientTape or hvd.grouped_allreduce",
    "HorovodAllgather": "hvd.DistributedOptimizer or hvd.DistributedGradientTape (sparse gradients), or hvd.allgather",
    "HorovodGroupedAllgather": "hvd.grouped_allgather",
    "HorovodBroadcast": "hvd.broadcast_variables, broadcast_global_variables, its callback or hook, or hvd.broadcast",
    "HorovodBroadcastInplace": "hvd.broadcast_variables, hvd.broadcast_global_variables, or its callback or hook",
    "HorovodAlltoall": "hvd.alltoall",
    "HorovodReducescatter": "hvd.reducescatter",
    "HorovodGroupedReducescatter": "hvd.grouped_reducescatter",
    "HorovodJoin": "hvd.join",
}


def refuse_horovod(program: Program) -> None:
    """Refuses a program that communicates through Horovod itself: its gradients would be averaged twice.

    Raises:
      ProgramError: names the operations and the calls to remove.
    """
    graphs = [program, *program.functions.values()]
    found = [node for graph in graphs for node in graph.nodes if node.op in _CALLS]
    if not found:
        return
    calls = list(dict.fromkeys(_CALLS[node.op] for node in found))
    raise ProgramError(
        "the program already averages gradients through Horovod, and Whale would average them again",
        op=f"{found[0].name} ({found[0].op})" + (f" and {len(found) - 1} more" if len(found) > 1 else ""),
        given="; ".join(calls),
        expected="a program for one device: Whale divides the global batch and sums the gradients",
        action=(
            "remove hvd.DistributedOptimizer(...) and hvd.DistributedGradientTape(...) around the optimizer and the "
            "tape, hvd.broadcast_variables and BroadcastGlobalVariablesCallback, MetricAverageCallback, the factor "
            "hvd.size() on the learning rate, and dataset.shard(hvd.size(), hvd.rank()); hvd.init() and hvd.rank() "
            'may stay. To sum gradients through Horovod set communication.backend to "horovod"'
        ),
    )


def horovod_can(program: Program, r: Reshard) -> bool:
    """Returns True if Horovod can carry out this reshard: an all-reduce sum of the step itself (not in a loop or
    branch), of a dtype that Horovod supports.
    """
    return (
        r.graph == ""
        and isinstance(r.source, Partial)
        and r.source == P_SUM
        and isinstance(r.target, Replicate)
        and program.find_type(r.ref).dtype in HOROVOD_DTYPES
    )


def give_to_horovod(program: Program, layout: GraphLayout, reshards: tuple[Reshard, ...]) -> tuple[Reshard, ...]:
    """Returns ``reshards`` with the sums that no other data movement depends on assigned to Horovod."""
    moves_after = find_waited_for(program, layout, reshards)
    return tuple(
        replace(r, backend="horovod") if horovod_can(program, r) and r.key not in moves_after else r for r in reshards
    )


def find_waited_for(program: Program, layout: GraphLayout, reshards: tuple[Reshard, ...]) -> set[str]:
    """Returns the keys of reshards of the main graph on whose results another reshard that moves data depends."""
    mine = [r for r in reshards if r.graph == ""]
    by_target = {(r.ref, r.target): r for r in mine}
    waited: set[str] = set()  # nodes from which a path leads to a movement
    moves_after: set[str] = set()

    def follow(ref: Ref, placement: Placement, leads_on: bool) -> bool:
        """Follows the reshards that lead to one operand, from its reader back to its producer.

        Adds to the result the reshards behind which another one moves data.

        Args:
          placement: the placement in which the reader takes ``ref``.
          leads_on: whether data move behind the reader.

        Returns:
          Whether data move behind the producer of ``ref``.
        """
        r = by_target.get((ref, placement))
        while r is not None:
            if leads_on:
                moves_after.add(r.key)
            leads_on = leads_on or moves(r)
            r = by_target.get((ref, r.source)) if r.source != layout.produced[ref] else None
        return leads_on

    for ref, placement in zip(program.outputs, layout.outputs):
        if follow(ref, placement, False):
            waited.add(ref.node)
    for node in reversed(program.nodes):
        leads_on = node.name in waited
        for ref, placement in zip(node.inputs, layout.strategies[node.name].inputs):
            if follow(ref, placement, leads_on):
                waited.add(ref.node)
        if leads_on:
            waited.update(node.controls)
    return moves_after
