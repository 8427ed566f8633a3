"""Lists the strategies to try for a captured program, and applies some of them to it by scopes.

    choices                   strategies to try: rows divided, every rank alone, tensors divided from a large weight on
    divide_over_all           a strategy of one stage on all ranks
    add_scopes                the program as if the user had put `wh.split` around the part that a strategy divides
    drop_scopes               the program without the user's scopes
    put_on_first_rank         the program as if the user had put all of it in one `wh.stage`, of rank 0
    trains, updates, products find what a program does with its variables

Pipelines are in `pipelines.py`. After scopes are added, layouts are found as for any program of a user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cost_model.kernels.op_work import count_matmul_flops
from whale.ir.mesh import DATA, TENSOR, Axis
from whale.ir.ops import CONTRACTIONS, ROW_LOOKUPS
from whale.ir.program import Node, Program, Ref
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Stage
from whale.ir.topology import Topology
from whale.passes.analysis.rank_order import order_ranks
from whale.passes.analysis.scopes import PASSED_ON
from whale.passes.normalize.annotate import annotate

SCOPE = "auto_parallel/split_0"
FIRST_RANK = "auto_parallel/stage_0(ranks=0)"
MOST_WEIGHTS = 3  # splits are tried from this many of the largest weights on
LEAST_BYTES = 1 << 20  # splits are not tried from smaller weights on


def divide_over_all(
    name: str, size: int, tensor: int = 1, order: tuple[int, ...] = (), **more: Any
) -> ParallelStrategy:
    """Returns a strategy of one stage on all ranks, with tensor-parallel degree ``tensor``.

    Args:
      name: what the report calls the strategy.
      size: number of ranks.
      order: the rank at each position of the mesh; (): position i is rank i.
      more: other fields of `ParallelStrategy`.
    """
    part = DeviceGroup(0, tensor, size // tensor)
    return ParallelStrategy((Stage(parts=(part,), bound_ranks=order),), name=name, **more)


def choices(program: Program, size: int, topology: Topology | None = None) -> list[ParallelStrategy]:
    """Returns the strategies to try except pipelines, plain data parallelism first.

    If the user has put scopes into the program, data parallelism under these scopes is the only one.

    Args:
      size: number of ranks.
      topology: the hosts of the ranks; None: all are on one host.
    """
    found = [divide_over_all("data parallel", size)]
    if size == 1 or has_scopes(program):
        return found
    found.append(divide_over_all("every rank alone", size, replicated=True))
    tables = _tables(program)
    degrees = [g for g in range(2, size) if size % g == 0]
    if len(tables) > 1:
        found.append(divide_over_all(f"split of {len(tables)} tables", size, size, split=tables))
    for name in _large_weights(program):
        found.append(divide_over_all(f"split from {name} on", size, size, split=(name,)))
        if not program.functions:
            found += [
                divide_over_all(f"split from {name} on, {size // g} groups of {g}{how}", size, g, order, split=(name,))
                for g in degrees
                for how, order in _list_orders(size, g, topology).items()
            ]
    return found


def _list_orders(size: int, tensor: int, topology: Topology | None) -> dict[str, tuple[int, ...]]:
    """Returns the orders of ranks on a data x tensor mesh to try, by a text for the strategy's name.

    The axis that communicates less should cross hosts. With many rows per rank, tensor-parallel groups exchange large
    activations and belong within a host; with few rows, these are smaller than the gradients of weights, and the
    data-parallel groups belong there.
    """
    axes = (Axis(DATA, size // tensor), Axis(TENSOR, tensor))
    found = {"": order_ranks(topology, axes)}
    if (rows_within := order_ranks(topology, axes, (TENSOR,))) != found[""]:
        found[", rows divided within hosts"] = rows_within
    return found


def has_scopes(program: Program) -> bool:
    """Returns True if any node or variable of the program is in a scope of the user (`wh.split`, `wh.stage`, ...)."""
    return any(n.scope for n in program.nodes) or any(v.scope for v in program.variables)


def drop_scopes(program: Program) -> Program:
    """Returns the program, and its functions, without scopes."""
    return replace(
        program,
        nodes=tuple(replace(n, scope="") for n in program.nodes),
        variables=tuple(replace(v, scope="") for v in program.variables),
        functions={name: drop_scopes(body) for name, body in program.functions.items()},
    )


def put_on_first_rank(program: Program) -> Program:
    """Returns the program with all nodes and variables in one pipeline stage, which rank 0 runs."""
    nodes = tuple(replace(n, scope=FIRST_RANK) for n in program.nodes)
    variables = tuple(replace(v, scope=FIRST_RANK) for v in program.variables)
    return annotate(replace(program, nodes=nodes, variables=variables))


def trains(program: Program) -> bool:
    """Returns True if the program has inputs and updates variables."""
    return bool(program.inputs) and any(updates(program, n) for n in program.nodes)


def updates(program: Program, node: Node) -> list[str]:
    """Returns the handles of the variables that a node updates; [] for a node with outputs, which only reads."""
    return [] if node.outputs else [r.node for r in node.inputs if r.node in program.variable_of]


def _find_weight_behind(program: Program, ref: Ref) -> str | None:
    """Returns the handle of the variable that a tensor is read from, possibly through nodes that pass elements on
    unchanged.

    None: the tensor is computed, not read.
    """
    node = program.by_name[ref.node]
    while node.name not in program.variable_of:
        if node.op not in PASSED_ON or not node.inputs:
            return None
        node = program.by_name[node.inputs[0].node]
    return node.name


def products(program: Program) -> dict[str, list[Node]]:
    """Returns {handle: nodes} for each variable of rank 2 or more: the matrix products, convolutions and lookups that
    read it.
    """
    found: dict[str, list[Node]] = {}
    for node in program.nodes:
        if node.op not in ROW_LOOKUPS:
            if node.op not in CONTRACTIONS or not count_matmul_flops(node, [program.find_type(r) for r in node.inputs]):
                continue
        for ref in node.inputs[:1] if node.op in ROW_LOOKUPS else node.inputs:
            handle = _find_weight_behind(program, ref)
            if handle is not None and len(program.variable_of[handle].type.shape or ()) >= 2:
                found.setdefault(handle, []).append(node)
    return found


def find_trained_weights(program: Program) -> dict[str, int]:
    """Returns {handle: bytes} of the trained weights that products or lookups read, largest first."""
    updated = {handle for node in program.nodes for handle in updates(program, node)}
    sizes = {h: program.variable_of[h].type.bytes for h in products(program) if h in updated}
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _large_weights(program: Program) -> list[str]:
    """Returns the names of the largest trained weights, largest first, at most `MOST_WEIGHTS`."""
    sizes = find_trained_weights(program)
    least = max(LEAST_BYTES, 0.05 * sum(sizes.values()))
    return [program.variable_of[h].name for h, size in sizes.items() if size >= least][:MOST_WEIGHTS]


def _tables(program: Program) -> tuple[str, ...]:
    """Returns the names of large trained weights that are only looked up; () if they are a small part of all
    weights.
    """
    sizes, read = find_trained_weights(program), products(program)
    tables = {h: n for h, n in sizes.items() if n >= LEAST_BYTES and all(r.op in ROW_LOOKUPS for r in read[h])}
    if sum(tables.values()) < 0.05 * sum(sizes.values()):
        return ()
    return tuple(program.variable_of[h].name for h in tables)


def add_scopes(program: Program, strategy: ParallelStrategy) -> Program:
    """Returns the program with a split scope from the first product with each of the strategy's weights to its
    gradient.

    For the last layer this covers the loss; for an earlier layer, all layers after it. In a program that does not
    train, it covers all that follows. For a table it covers the lookup and the table's update only.
    """
    handles = [v.node for v in program.variables if v.name in strategy.split]
    inside: set[str] = set()
    read = products(program)
    for handle in handles:
        if handle in read:
            inside |= _find_between(program, read[handle], handle)
    if not inside:
        return program
    nodes = tuple(replace(n, scope=SCOPE) if n.name in inside else n for n in program.nodes)
    owned = {r.node for n in nodes if n.scope for r in n.inputs if r.node in program.variable_of} - {
        r.node for n in nodes if not n.scope and n.outputs for r in n.inputs
    }
    variables = tuple(replace(v, scope=SCOPE) if v.node in owned else v for v in program.variables)
    return annotate(replace(program, nodes=nodes, variables=variables))


def divisible(program: Program) -> set[str]:
    """Returns the handles of variables that split scopes may shard: those in a scope, and those read only by nodes in
    one.
    """
    inside = {n.name for n in program.nodes if n.scope}
    return {
        v.node
        for v in program.variables
        if v.scope or all(node.name in inside for node, _ in program.consumers.get(Ref(v.node), ()))
    }


def _find_between(program: Program, products: list[Node], handle: str) -> set[str]:
    first = products[0]
    targets = {n.name for n in products} | {n.name for n in program.nodes if handle in updates(program, n)}
    if first.op in ROW_LOOKUPS:
        return targets | _readers(program, handle)
    # What depends on the weight's last product (the gradient of its operand) belongs to earlier layers.
    ends = {n.name for n in products[1:]}
    arrows = {
        n.name: [] if n.name in ends else [c.name for r in n.list_refs() for c, _ in program.consumers.get(r, ())]
        for n in program.nodes
    }
    after = _find_reachable([first.name], arrows)
    if not any(handle in updates(program, n) for n in program.nodes):
        return after | _readers(program, handle)  # nothing is trained: all that follows
    inside: set[str] = set()
    own, operands = {handle}, {n.name: [r.node for r in n.inputs] for n in program.nodes}
    while True:
        before = _find_reachable(targets, operands)
        now = (after & before) | targets | {name for h in own for name in _readers(program, h)}
        if now == inside:
            return inside
        inside = now
        # Variables that are used inside (biases, optimizer state) and their updates belong to it as well.
        behind = {_find_weight_behind(program, r) for n in program.nodes if n.name in inside for r in n.inputs}
        own |= {h for h in behind if h is not None and program.variable_of[h].type.shape}
        targets |= {n.name for n in program.nodes if n.name in after and own & set(updates(program, n))}


def _readers(program: Program, handle: str) -> set[str]:
    """Returns the names of nodes that pass a variable's elements on unchanged (identities, casts and the like)."""
    found: set[str] = set()
    left = [handle]
    while left:
        for ref in program.by_name[left.pop()].list_refs():
            for node, i in program.consumers.get(ref, ()):
                if i == 0 and node.op in PASSED_ON and node.name not in found:
                    found.add(node.name)
                    left.append(node.name)
    return found


def _find_reachable(starts: Iterable[str], arrows: Mapping[str, Iterable[str]]) -> set[str]:
    found = set(starts)
    left = list(found)
    while left:
        for name in arrows[left.pop()]:
            if name not in found:
                found.add(name)
                left.append(name)
    return found
