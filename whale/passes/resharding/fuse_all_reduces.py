"""Fuses all-reduces: small ones of a plan, gradients' over several mesh axes, sums along one axis after another.

``fuse_all_reduces`` groups a plan's small all-reduces into buckets while planning, so that ranks need not negotiate at
run time. It also groups all-gathers of tensors that updates read (gradients of looked-up rows, parts of updates under
ZeRO), and the messages to and from embedding tables that are whole on one rank: those of all tables together, whichever
ranks have them. Members of a group must be ready at about the same time, and none may wait for another. The *depth* of
a collective is the number of collectives on the longest path into it; only collectives of equal depth join, since a
member that needs another's result would be deeper. Members are ordered by their producers in the program, which for
gradients is the order of the backward pass.

``sums_to_join`` and ``join_sums`` merge two all-reduces. Each mesh axis is planned by itself, so a gradient that is
partial along two axes is summed along one and then along the other. If nothing else reads the tensor between, one sum
over all of these ranks gives the same and moves less: of p x q ranks, 2 (p q - 1) T bytes instead of 2 q (p - 1) T + 2
p (q - 1) T. ``sums_to_join`` finds such sums in a program's plan, ``join_sums`` merges them in a rank's program.

``fuse_sums`` fuses the all-reduces along earlier axes in a rank's program. The plan of an axis fuses all-reduces along
this axis only: to the plans of later axes an all-reduce along an earlier one is an ordinary op, and a fused op over
many tensors, each sharded in another way, would have no rule. In a rank's program the tensors are local, and this does
not matter. The depth follows from the program that all ranks together run, since in that of a rank without rows a sum
to which it gives zeros depends on nothing; and from the rank's own, where sums wait for all that is fused with what
they read.

Decisions: 0076, 0212.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from whale.ir.layout import B, Partial, PerRank, Placement, Replicate, Shard
from whale.ir.ops import ALL_REDUCE
from whale.ir.plan import STAGE_OUTPUT, Plan, Reshard
from whale.ir.program import Node, Program, Ref, rewire
from whale.ir.values import group_by_bytes
from whale.passes.analysis.uses import is_taken_by_updates
from whale.passes.propagation.graph_layout import GraphLayout

# The largest tensor in a fused all-gather. Its parts are copied into a message and out of it, and copying more than
# that takes as long as an exchange of its own.
GATHERED_BYTES = 256 << 10


def fuse_all_reduces(
    program: Program,
    layouts: Mapping[str, GraphLayout],
    reshards: tuple[Reshard, ...],
    group_bytes: int,
    microbatched: bool = False,
    gathers: bool = True,
) -> tuple[Reshard, ...]:
    """Returns ``reshards`` with small all-reduces and all-gathers assigned to fused groups (gradient buckets).

    Tensors above ``group_bytes``, and those without a partner, are sent alone.

    Args:
      group_bytes: the most bytes of all tensors of one group.
      microbatched: the program will run in micro-batches. Then only sums that updates alone read are fused, which are
        sent after the last micro-batch.
      gathers: whether all-gathers are fused as well; devices have no fused all-gather.
    """
    numbers: dict[str, int] = {}
    open_groups: dict[tuple, tuple[int, list[str]]] = {}
    closed: list[list[str]] = []
    for graph in layouts:
        body = program if graph == "" else program.functions[graph]
        mine = [r for r in reshards if r.graph == graph]
        depth = _depths(body, layouts[graph], mine)
        position = {node.name: i for i, node in enumerate(body.nodes)}
        # What sends nothing (over one rank, or without elements) adds no depth, and might join what waits for it.
        sending = filter(moves, mine)
        fusable = [r for r in sending if is_all_reduce(r) or is_of_whole_table(r) or (gathers and is_all_gather(r))]
        for r in sorted(fusable, key=lambda r: position[r.ref.node]):
            tensor = body.find_type(r.ref)
            what = "parts" if is_of_whole_table(r) else r.source
            kind = (graph, depth[r.key], tensor.dtype, what, r.backend, r.wire_dtype)
            if not tensor.is_static or tensor.bytes > group_bytes:
                continue
            if microbatched and not (is_all_reduce(r) and is_taken_by_updates(body, r.ref)):
                continue
            if is_all_gather(r) and (tensor.bytes > GATHERED_BYTES or not is_taken_by_updates(body, r.ref)):
                continue  # a weight is gathered by itself where it is used
            used, members = open_groups.get(kind, (0, []))
            if members and used + tensor.bytes > group_bytes:
                closed.append(members)
                used, members = 0, []
            members.append(r.key)
            open_groups[kind] = (used + tensor.bytes, members)
    closed += [members for _, members in open_groups.values()]
    for number, members in enumerate(m for m in closed if len(m) > 1):
        numbers.update((key, number) for key in members)
    return tuple(replace(r, group=numbers.get(r.key, -1)) for r in reshards)


def is_all_reduce(r: Reshard) -> bool:
    """Returns True if a reshard is an all-reduce: from partial to replicated."""
    return isinstance(r.source, Partial) and isinstance(r.target, Replicate)


def is_all_gather(r: Reshard) -> bool:
    """Returns True if a reshard is a plain all-gather: from a split without halo or several runs to replicated."""
    have = r.source
    whole = isinstance(have, Shard) and have is have.without_halo and have.blocks == 1
    return whole and isinstance(r.target, Replicate)


def is_of_whole_table(r: Reshard) -> bool:
    """Returns True if a reshard collects a sharded tensor on one rank, or scatters it from one rank, along the same
    dimension. Exchanges with an embedding table that is whole on one rank are of this kind.
    """
    have, want = r.source, r.target
    if not isinstance(have, Shard) or not isinstance(want, Shard) or have.dim != want.dim:
        return False
    alone = len(have.holders) == 1 or len(want.holders) == 1
    return alone and all(cut is cut.without_halo and cut.blocks == 1 for cut in (have, want))


def moves(r: Reshard) -> bool:
    """Returns True if a reshard sends data; also for a sum of unknown size, for which the plan counts no bytes."""
    return r.bytes > 0 or (isinstance(r.source, Partial) and not isinstance(r.target, PerRank | Partial))


def _depths(program: Program, layout: GraphLayout, reshards: list[Reshard]) -> dict[str, int]:
    """Maps each reshard's key to the number of reshards that send data on the longest path that ends with it."""
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
        if node.inputs:
            for ref, placement in zip(node.inputs, layout.strategies[node.name].inputs):
                reached = through(ref, placement) if ref in changed else tensor_depth[ref.node]
                if reached > depth:
                    depth = reached
        tensor_depth[node.name] = depth
    for ref, placement in zip(program.outputs, layout.outputs):
        through(ref, placement)
    return result


def order_sums(program: Program, sums: Mapping[str, Ref]) -> dict[str, tuple[int, int]]:
    """Returns the key of each all-reduce that updates read -> its depth, and its place in the order in which those of
    one depth join.

    Args:
      program: the program that all ranks together run.
      sums: key of an all-reduce -> the tensor of ``program`` that it sums.
    """
    taken = {ref for ref in dict.fromkeys(sums.values()) if is_taken_by_updates(program, ref)}
    summed = {ref.node for ref in taken}
    depth: dict[str, int] = {}
    for node in program.nodes if taken else ():
        before = [name for name, _ in node.inputs]
        depth[node.name] = max((depth[name] + (name in summed) for name in (*before, *node.controls)), default=0)
    return {key: (depth[ref.node], i) for i, (key, ref) in enumerate(sums.items()) if ref in taken}


def fuse_sums(
    program: Program, group_bytes: int, order: Mapping[str, tuple[int, int]], axes: Sequence[tuple[int, ...]]
) -> Program:
    """Fuses independent all-reduces over the same ranks in a rank's program, if updates read them.

    All ranks of a group find the same fused groups, since keys, types and order of these all-reduces are the same on
    them; where a rank without rows does not wait as the others do, the plan is refused (`refuse_unlike_phases`). Nodes
    between them along later axes may differ, where ranks have different rows; so axes are processed one after the
    other.

    Args:
      group_bytes: the most bytes of a fused all-reduce.
      order: the result of ``order_sums``, by the part of a key before "@".
      axes: for each axis, or pair of joined axes, the ranks that reduce along it together with this rank; all these
        ranks must list the axes in the same order.
    """
    for ranks in axes:
        program = _fuse_group(program, _along(program, group_bytes, order, ranks))
    return program


def _along(
    program: Program, group_bytes: int, order: Mapping[str, tuple[int, int]], ranks: tuple[int, ...]
) -> list[list[Node]]:
    """Returns the groups of all-reduces over ``ranks`` that are to be fused, each of two or more nodes.

    Args:
      group_bytes, order: as of ``fuse_sums``.
    """
    joining: list[tuple[tuple[int, int], str, Node]] = []
    own: dict[str, int] = {}  # in this program, where sums also wait for what the plans of later axes have fused
    for node in program.nodes:
        own[node.name] = max((own[name] for name in (*[name for name, _ in node.inputs], *node.controls)), default=0)
        if node.op == ALL_REDUCE and tuple(node.attrs["ranks"]) == ranks and len(node.outputs) == 1:
            key, result = str(node.attrs["key"]), node.outputs[0]
            place = order.get(key.partition("@")[0])
            if place is not None and result.is_static and result.bytes <= group_bytes:
                joining.append((place, key, node))
                own[node.name] += 1
    kinds: dict[tuple[object, ...], list[Node]] = {}
    for (depth, _), _, node in sorted(joining, key=lambda one: one[:2]):
        alike = node.attrs["reduction"], node.attrs.get("wire_dtype"), node.outputs[0].dtype
        kinds.setdefault((depth, own[node.name], *alike), []).append(node)
    groups = (
        group
        for members in kinds.values()
        for group in group_by_bytes(members, lambda n: n.outputs[0].bytes, group_bytes)
    )
    return [group for group in groups if len(group) > 1]


def _fuse_group(program: Program, groups: list[list[Node]]) -> Program:
    if not groups:
        return program
    results: dict[Ref, Ref] = {}
    stands_for: dict[str, Node] = {}  # name of each member -> the fused all-reduce
    for members in groups:
        first, name = members[0], f"{members[0].name}/whale_sums"
        results.update((Ref(node.name), Ref(name, i)) for i, node in enumerate(members))
        joined = replace(
            first,
            name=name,
            inputs=(first.inputs[0], *(n.inputs[1] for n in members)),
            controls=tuple(dict.fromkeys(c for n in members for c in n.controls)),
            attrs={**first.attrs, "N": len(members), "key": f"{first.attrs['key']}+{len(members) - 1}"},
            outputs=tuple(n.outputs[0] for n in members),
        )
        stands_for.update((node.name, joined) for node in members)
    found = [stands_for.get(node.name, node) for node in program.nodes]
    return rewire(program, {node.name: node for node in found}, results)


def sums_to_join(program: Program, plan: Plan) -> dict[str, tuple[Reshard, Node]]:
    """Finds pairs of all-reduces that can be merged: one along an earlier mesh axis, the other along the axis of
    ``plan``, and the second sums the result of the first.

    Args:
      program: the plan's expanded program, in which all-reduces along earlier axes are nodes; that of the first
        coordinates of these axes.

    Returns:
      Key of the all-reduce along the earlier axis -> (the all-reduce along the plan's axis, as a reshard; the node of
      the one along the earlier axis).
    """
    sums: dict[tuple[str, Ref], list[Reshard]] = {}
    for r in plan.reshards:
        if isinstance(r.source, Partial):
            sums.setdefault((r.graph, r.ref), []).append(r)
    found = {}
    for graph, body in (("", program), *program.functions.items()):
        for node in body.nodes if graph in plan.strategies else ():
            if _is_one_sum(node):
                before, behind = (sums.get((graph, ref), ()) for ref in (node.inputs[1], Ref(node.name)))
                for made, others in ((behind, before), (before, behind)):
                    if len(made) == 1 and not others and _is_joint(body, graph, plan, node, made[0]):
                        found[str(node.attrs["key"])] = made[0], node
    return found


def _is_joint(body: Program, graph: str, plan: Plan, node: Node, r: Reshard) -> bool:
    """Returns True if the all-reduces ``node`` and ``r`` can be merged: nothing reads the tensor between them, and all
    readers of the result want it replicated.
    """
    if r.target != B or r.source != Partial(str(node.attrs["reduction"])):
        return False
    strategies = plan.strategies[graph]
    readers = body.consumers.get(r.ref, ())
    if r.ref.node != node.name and ([reader.name for reader, _ in readers] != [node.name] or r.ref in body.outputs):
        return False
    # Readers in other stage groups do not count: the plan of the whole program says how they get the tensor.
    taken = [strategies[reader.name].inputs[i] for reader, i in readers if reader.op != STAGE_OUTPUT]
    taken += [p for ref, p in zip(body.outputs, plan.returned[graph]) if ref == r.ref]
    return all(p == B for p in taken)


def join_sums(program: Program, keys: Collection[str], axis: str) -> Program:
    """Merges all-reduces along ``axis`` in one rank's program into the neighbouring ones with ``keys``, which then
    reduce along both axes.
    """
    if not keys:
        return program
    functions = {name: _join_in_graph(body, keys, axis) for name, body in program.functions.items()}
    return replace(_join_in_graph(program, keys, axis), functions=functions)


def _join_in_graph(program: Program, keys: Collection[str], axis: str) -> Program:
    moved: dict[Ref, Ref] = {}
    over: dict[str, Node] = {}
    left: dict[str, list[int]] = {}  # all-reduce along the axis -> numbers of the tensors that it keeps
    for node in program.nodes:
        if node.op != ALL_REDUCE or node.marks.axis != (axis,) or node.controls:
            continue
        for i, operand in enumerate(node.inputs[1:]):
            made = Ref(node.name, i)
            before, behind = program.by_name[operand.node], _only_reader(program, made)
            if _takes_up(before, node, keys) and _only_reader(program, operand) is not None:
                one = before
            elif behind is not None and _takes_up(behind, node, keys):
                one = behind
            else:
                continue
            over[one.name] = one.with_marks(axis=(*axes_of_sum(one), axis))
            moved[made] = operand
            left.setdefault(node.name, list(range(len(node.inputs) - 1))).remove(i)
    if not moved:
        return program
    for name, kept in left.items():
        moved.update((Ref(name, i), Ref(name, at)) for at, i in enumerate(kept))
    gone = {name for name, kept in left.items() if not kept}
    nodes = {}
    for node in program.nodes:
        if node.name not in gone:
            node = over.get(node.name, node)
            nodes[node.name] = _restrict(node, left[node.name]) if node.name in left else node
    effects = tuple(e for e in program.effects if e not in gone)
    return rewire(replace(program, effects=effects), nodes, moved)


def _takes_up(one: Node, node: Node, keys: Collection[str]) -> bool:
    """Returns True if ``one``, an all-reduce along earlier axes, is to be merged with the all-reduce ``node``: they
    have the same reduction and wire dtype.

    Args:
      keys: keys of the all-reduces along earlier axes that are to be merged.
    """
    alike = all(one.attrs.get(name) == node.attrs.get(name) for name in ("reduction", "wire_dtype"))
    return str(one.attrs.get("key", "")) in keys and _is_one_sum(one) and alike


def _only_reader(program: Program, ref: Ref) -> Node | None:
    readers = program.consumers.get(ref, ())
    return readers[0][0] if len(readers) == 1 and ref not in program.outputs else None


def _restrict(node: Node, kept: Collection[int]) -> Node:
    """Returns a fused all-reduce with only the tensors numbered ``kept``."""
    return replace(
        node,
        inputs=(node.inputs[0], *(node.inputs[1 + i] for i in kept)),
        outputs=tuple(node.outputs[i] for i in kept),
        attrs={**node.attrs, "N": len(kept)},
    )


def axes_of_sum(node: Node) -> tuple[str, ...]:
    """Returns the names of the mesh axes along which a node sums; () once they are replaced by ranks."""
    return node.marks.axis


def _is_one_sum(node: Node) -> bool:
    return node.op == ALL_REDUCE and bool(node.marks.axis) and len(node.outputs) == 1
