"""Groups small all-reduces into fused ones, by the Plan: no negotiation at run time. So are all-gathers of what updates
take (gradients of looked-up rows, parts of updates under ZeRO), of tensors that are divided alike, and messages to and
from tables that are whole on one rank: those of all tables together, whichever ranks have them.

Members of a group are ready at about the same time and none waits for another: the *depth* of a collective is the
number of collectives on the longest path into it, and only equal depths join (a member that needed another's result
would be deeper). Order is that of the producers in the program, which for gradients is the order of the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whale.ir.layout import Partial, PerRank, Placement, Replicate, Shard
from whale.ir.plan import Reshard
from whale.ir.program import Program, Ref
from whale.passes.analysis.uses import is_taken_by_updates
from whale.passes.propagation.graph_layout import GraphLayout

# Gathered together, parts are copied into a message and out of it; copying so much takes as long as an exchange.
GATHERED_BYTES = 256 << 10


def fuse_all_reduces(
    program: Program,
    layouts: Mapping[str, GraphLayout],
    reshards: tuple[Reshard, ...],
    group_bytes: int,
    microbatched: bool = False,
    gathers: bool = True,
) -> tuple[Reshard, ...]:
    """Assigns fused groups to ``reshards``; tensors above ``group_bytes``, and those without a partner, are sent alone.

    Args:
      group_bytes: largest sum of tensor bytes of one group.
      microbatched: the program will run in micro-batches. Tensors with rows of the batch are then sent in each of
        them, counts before the first one, and only sums that updates alone read, after the last one, may wait for
        others.
      gathers: whether all-gathers are fused; devices have no such exchange.
    """
    numbers: dict[str, int] = {}
    open_groups: dict[tuple, tuple[int, int, list[str]]] = {}
    closed: list[list[str]] = []
    for graph in layouts:
        body = program if graph == "" else program.functions[graph]
        mine = [r for r in reshards if r.graph == graph]
        depth = _depths(body, layouts[graph], mine)
        position = {node.name: i for i, node in enumerate(body.nodes)}
        fusable = [r for r in mine if is_all_reduce(r) or is_of_whole_table(r) or (gathers and is_all_gather(r))]
        for r in sorted(fusable, key=lambda r: position[r.ref.node]):
            tensor = body.find_type(r.ref)
            what = "parts" if is_of_whole_table(r) else r.source
            kind = (graph, depth[r.key], tensor.dtype, what, r.backend, r.wire_dtype)
            if not tensor.is_static or tensor.bytes > group_bytes:
                continue
            if microbatched and not (is_all_reduce(r) and is_taken_by_updates(body, r.ref)):
                continue
            if is_all_gather(r) and (tensor.bytes > GATHERED_BYTES or not is_taken_by_updates(body, r.ref)):
                continue  # a weight is gathered where it is used
            _, used, members = open_groups.get(kind, (0, 0, []))
            if members and used + tensor.bytes > group_bytes:
                closed.append(members)
                used, members = 0, []
            members.append(r.key)
            open_groups[kind] = (0, used + tensor.bytes, members)
    closed += [members for _, _, members in open_groups.values()]
    for number, members in enumerate(m for m in closed if len(m) > 1):
        numbers.update((key, number) for key in members)
    return tuple(replace(r, group=numbers.get(r.key, -1)) for r in reshards)


def is_all_reduce(r: Reshard) -> bool:
    """Tells whether a reshard reduces a partial tensor to a replicated one."""
    return isinstance(r.source, Partial) and isinstance(r.target, Replicate)


def is_all_gather(r: Reshard) -> bool:
    """Tells whether a reshard gathers a tensor that is divided in one run to a replicated one."""
    have = r.source
    whole = isinstance(have, Shard) and have is have.without_halo and have.blocks == 1
    return whole and isinstance(r.target, Replicate)


def is_of_whole_table(r: Reshard) -> bool:
    """Tells whether a reshard gathers a divided tensor to one rank, or scatters it from there."""
    have, want = r.source, r.target
    if not isinstance(have, Shard) or not isinstance(want, Shard) or have.dim != want.dim:
        return False
    alone = len(have.holders) == 1 or len(want.holders) == 1
    return alone and all(cut is cut.without_halo and cut.blocks == 1 for cut in (have, want))


def moves(r: Reshard) -> bool:
    """Tells whether a reshard sends data. (A sum of unknown size has no bytes in the plan, but sends some.)"""
    return r.bytes > 0 or (isinstance(r.source, Partial) and not isinstance(r.target, PerRank | Partial))


def _depths(program: Program, layout: GraphLayout, reshards: list[Reshard]) -> dict[str, int]:
    """Maps each reshard's key to the number of moving collectives on the longest path that ends with it."""
    by_target = {(r.ref, r.target): r for r in reshards}
    changed = {r.ref for r in reshards}
    tensor_depth: dict[str, int] = {}
    result: dict[str, int] = {}

    def through(ref: Ref, placement: Placement) -> int:
        base = tensor_depth[ref.node]
        r = by_target.get((ref, placement))
        if r is None:
            return base
        if r.key not in result:
            start = base if r.source == layout.produced[ref] else through(ref, r.source)
            result[r.key] = start + moves(r)
        return result[r.key]

    for node in program.nodes:
        depth = max([tensor_depth[c] for c in node.controls], default=0) if node.controls else 0
        for ref, placement in zip(node.inputs, layout.strategies[node.name].inputs):
            depth = max(depth, through(ref, placement) if ref in changed else tensor_depth[ref.node])
        tensor_depth[node.name] = depth
    for ref, placement in zip(program.outputs, layout.outputs):
        through(ref, placement)
    return result
