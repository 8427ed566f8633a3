"""Fuses all-reduces: small ones of a plan, gradients' over several mesh axes, sums along one axis after another.

A plan groups small all-reduces: no negotiation at run time. So are all-gathers of what updates take (gradients of
looked-up rows, parts of updates under ZeRO), of tensors that are divided alike, and messages to and from tables that
are whole on one rank: those of all tables together, whichever ranks have them. Members of a group are ready at about
the same time and none waits for another: the *depth* of a collective is the number of collectives on the longest path
into it, and only equal depths join (a member that needed another's result would be deeper). Order is that of the
producers in the program, which for gradients is the order of the backward pass (``fuse_all_reduces``).

Each mesh axis is planned by itself. So a gradient that is partial along two of them is summed along the first and then
along the second, or the other way round. If nothing else reads the tensor between, one sum over all of these ranks
gives the same, and moves less: of p x q ranks, 2 (p q - 1) T bytes instead of 2 q (p - 1) T + 2 p (q - 1) T.
``sums_to_join`` finds such sums by a program's plan, ``join_sums`` merges them in a rank's program.

And the plan of an axis fuses only the all-reduces along the last one: to the axes after it, an all-reduce along an
earlier axis is an ordinary op, and a rule cannot split many tensors, each differently. In a rank's program they are
local tensors, and are fused there (``fuse_sums``).

Decision: 0076.
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


def fuse_sums(program: Program, group_bytes: int, order: Mapping[str, int], axes: Sequence[tuple[int, ...]]) -> Program:
    """Fuses independent all-reduces of gradients of ``program`` over the same ranks.

    All ranks of a group find the same groups: keys, types and the order of these all-reduces are the same on them.
    Nodes between them along later axes may differ, where rows do; so axes are processed in turn.

    Args:
      group_bytes: largest size of a fused all-reduce.
      order: the order in which all-reduces join, by the part of a key before its ranks.
      axes: the ranks that reduce along each axis, or along several; the same axes in the same order on all of these.
    """
    for ranks in axes:
        program = _fuse_group(program, _along(program, group_bytes, order, ranks))
    return program


def _along(program: Program, group_bytes: int, order: Mapping[str, int], ranks: tuple[int, ...]) -> list[list[Node]]:
    """Returns the groups of all-reduces over ``ranks`` that are to be fused."""
    over = [n for n in program.nodes if n.op == ALL_REDUCE and tuple(n.attrs["ranks"]) == ranks]
    joining = {n.name for n in over if _may_join(program, n, group_bytes)}
    if len(joining) < 2:
        return []
    depth: dict[str, int] = {}
    kinds: dict[tuple[object, ...], list[Node]] = {}
    for node in program.nodes:
        behind = max([0, *[depth[r.node] for r in node.inputs], *[depth[name] for name in node.controls]])
        joins = node.name in joining
        depth[node.name] = behind + joins
        if joins:
            kind = (behind, node.attrs["reduction"], node.attrs.get("wire_dtype"), node.outputs[0].dtype)
            kinds.setdefault(kind, []).append(node)
    groups: list[list[Node]] = []
    for members in kinds.values():
        groups += group_by_bytes(
            sorted(members, key=lambda n: _place(n, order)), lambda n: n.outputs[0].bytes, group_bytes
        )
    return [group for group in groups if len(group) > 1]


def _may_join(program: Program, node: Node, group_bytes: int) -> bool:
    t = node.outputs[0]
    return (
        len(node.outputs) == 1
        and t.is_static
        and t.bytes <= group_bytes
        and is_taken_by_updates(program, Ref(node.name))
    )


def _place(node: Node, order: Mapping[str, int]) -> tuple[int, str]:
    key = str(node.attrs["key"])
    return order.get(key.partition("@")[0], len(order)), key


def _fuse_group(program: Program, groups: list[list[Node]]) -> Program:
    if not groups:
        return program
    results: dict[Ref, Ref] = {}
    stands_for: dict[str, Node] = {}  # of the sums that are joined
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
    """Maps the key of a sum along earlier axes to the adjacent sum along the axis of ``plan``, and its node.

    Args:
      program: expanded, for the first coordinates of the earlier axes.
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
    """Tells whether only ``node`` reads a sum along the plan's axis, or the sum reads all results of ``node``."""
    if r.target != B or r.source != Partial(str(node.attrs["reduction"])):
        return False
    strategies = plan.strategies[graph]
    readers = body.consumers.get(r.ref, ())
    if r.ref.node != node.name and ([reader.name for reader, _ in readers] != [node.name] or r.ref in body.outputs):
        return False
    # What another stage group takes it has made itself, or its own sum of it, as the program in whole says.
    taken = [strategies[reader.name].inputs[i] for reader, i in readers if reader.op != STAGE_OUTPUT]
    taken += [p for ref, p in zip(body.outputs, plan.returned[graph]) if ref == r.ref]
    return all(p == B for p in taken)


def join_sums(program: Program, keys: Collection[str], axis: str) -> Program:
    """Merges sums along ``axis`` in one rank's program into those with ``keys``, which then are along both axes."""
    if not keys:
        return program
    functions = {name: _join_in_graph(body, keys, axis) for name, body in program.functions.items()}
    return replace(_join_in_graph(program, keys, axis), functions=functions)


def _join_in_graph(program: Program, keys: Collection[str], axis: str) -> Program:
    moved: dict[Ref, Ref] = {}
    over: dict[str, Node] = {}
    left: dict[str, list[int]] = {}  # sum along the axis -> the operands that it keeps
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
    """Tells whether ``one``, a sum along earlier axes, is to be merged with ``node``."""
    alike = all(one.attrs.get(name) == node.attrs.get(name) for name in ("reduction", "wire_dtype"))
    return str(one.attrs.get("key", "")) in keys and _is_one_sum(one) and alike


def _only_reader(program: Program, ref: Ref) -> Node | None:
    readers = program.consumers.get(ref, ())
    return readers[0][0] if len(readers) == 1 and ref not in program.outputs else None


def _restrict(node: Node, kept: Collection[int]) -> Node:
    """Restricts a sum to some of its tensors."""
    return replace(
        node,
        inputs=(node.inputs[0], *(node.inputs[1 + i] for i in kept)),
        outputs=tuple(node.outputs[i] for i in kept),
        attrs={**node.attrs, "N": len(kept)},
    )


def axes_of_sum(node: Node) -> tuple[str, ...]:
    """Returns the axes over which a node sums; this is known until ranks replace them."""
    return node.marks.axis


def _is_one_sum(node: Node) -> bool:
    return node.op == ALL_REDUCE and bool(node.marks.axis) and len(node.outputs) == 1
