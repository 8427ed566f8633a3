"""Lists strategies that can run for a captured program, and applies them to the program.

    choices                   strategies to try: rows divided, every rank alone, tensors divided from a large weight on
    divide_over_all           a strategy of one stage on all ranks
    add_scopes                the program as if the user had put `wh.split` around the part that a strategy divides
    drop_scopes               the program without the user's scopes
    put_on_first_rank         the program as if the user had put all of it in one `wh.stage`, of rank 0
    trains, updates, products find what a program does with its variables

Pipelines are in `pipelines.py`. The program's own layouts are then found as for any other program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cost_model.kernels.op_work import count_matmul_flops
from whale.ir.mesh import DATA, TENSOR, Axis
from whale.ir.ops import ROW_LOOKUPS
from whale.ir.program import Node, Program, Ref
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Stage
from whale.ir.topology import Topology
from whale.passes.analysis.rank_order import order_ranks
from whale.passes.analysis.scopes import PASSED_ON
from whale.passes.normalize.annotate import annotate

SCOPE = "auto_parallel/split_0"
FIRST_RANK = "auto_parallel/stage_0(ranks=0)"
MOST_WEIGHTS = 3  # that a split is tried from
LEAST_BYTES = 1 << 20  # smaller weights are not worth it


def divide_over_all(
    name: str, size: int, tensor: int = 1, order: tuple[int, ...] = (), **more: Any
) -> ParallelStrategy:
    """Returns a strategy of one stage on all ranks with tensor-parallel degree ``tensor``.

    Args:
      order: the rank at each position of the mesh; (): position and rank are the same number.
    """
    part = DeviceGroup(0, tensor, size // tensor)
    return ParallelStrategy((Stage(parts=(part,), bound_ranks=order),), name=name, **more)


def choices(program: Program, size: int, topology: Topology | None = None) -> list[ParallelStrategy]:
    """Returns the strategies to try, plain data parallelism first; a program with the user's scopes gets no other
    ones.

    Args:
      topology: the hosts of the ranks; None: all are on one.
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
    """Returns the orders of ranks to try, by words for them: what sends less lies between hosts, tensors or rows.

    Many rows have large activations, which groups that divide tensors exchange; those of few rows are smaller than
    weights.
    """
    axes = (Axis(DATA, size // tensor), Axis(TENSOR, tensor))
    found = {"": order_ranks(topology, axes)}
    if (rows_within := order_ranks(topology, axes, (TENSOR,))) != found[""]:
        found[", rows divided within hosts"] = rows_within
    return found


def has_scopes(program: Program) -> bool:
    """Tells whether the user has put any node or variable of the program into a scope."""
    return any(n.scope for n in program.nodes) or any(v.scope for v in program.variables)


def drop_scopes(program: Program) -> Program:
    """Returns the program without scopes."""
    return replace(
        program,
        nodes=tuple(replace(n, scope="") for n in program.nodes),
        variables=tuple(replace(v, scope="") for v in program.variables),
        functions={name: drop_scopes(body) for name, body in program.functions.items()},
    )


def put_on_first_rank(program: Program) -> Program:
    """Puts all nodes and variables in one stage, of rank 0."""
    nodes = tuple(replace(n, scope=FIRST_RANK) for n in program.nodes)
    variables = tuple(replace(v, scope=FIRST_RANK) for v in program.variables)
    return annotate(replace(program, nodes=nodes, variables=variables))


def trains(program: Program) -> bool:
    """Tells whether the program has inputs and updates variables."""
    return bool(program.inputs) and any(updates(program, n) for n in program.nodes)


def updates(program: Program, node: Node) -> list[str]:
    """Returns the handles of the variables that a node updates."""
    return [] if node.outputs else [r.node for r in node.inputs if r.node in program.variable_of]


def _find_weight_behind(program: Program, ref: Ref) -> str | None:
    """Returns the handle of the variable whose elements a tensor has."""
    node = program.by_name[ref.node]
    while node.name not in program.variable_of:
        if node.op not in PASSED_ON or not node.inputs:
            return None
        node = program.by_name[node.inputs[0].node]
    return node.name


def products(program: Program) -> dict[str, list[Node]]:
    """Returns, for each variable of rank 2 or more, by handle, the products and lookups that read it, in order."""
    found: dict[str, list[Node]] = {}
    for node in program.nodes:
        if node.op not in ROW_LOOKUPS and not count_matmul_flops(node, [program.find_type(r) for r in node.inputs]):
            continue
        for ref in node.inputs[:1] if node.op in ROW_LOOKUPS else node.inputs:
            handle = _find_weight_behind(program, ref)
            if handle is not None and len(program.variable_of[handle].type.shape or ()) >= 2:
                found.setdefault(handle, []).append(node)
    return found


def find_trained_weights(program: Program) -> dict[str, int]:
    """Returns the bytes of each trained weight that products or lookups read, by handle, largest first."""
    updated = {handle for node in program.nodes for handle in updates(program, node)}
    sizes = {h: program.variable_of[h].type.bytes for h in products(program) if h in updated}
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _large_weights(program: Program) -> list[str]:
    """Returns the names of the largest trained weights, largest first."""
    sizes = find_trained_weights(program)
    least = max(LEAST_BYTES, 0.05 * sum(sizes.values()))
    return [program.variable_of[h].name for h, size in sizes.items() if size >= least][:MOST_WEIGHTS]


def _tables(program: Program) -> tuple[str, ...]:
    """Returns the names of all large trained weights that are only looked up; () where they are a small part."""
    sizes, read = find_trained_weights(program), products(program)
    tables = {h: n for h, n in sizes.items() if n >= LEAST_BYTES and all(r.op in ROW_LOOKUPS for r in read[h])}
    if sum(tables.values()) < 0.05 * sum(sizes.values()):
        return ()
    return tuple(program.variable_of[h].name for h in tables)


def add_scopes(program: Program, strategy: ParallelStrategy) -> Program:
    """Puts a split scope on the nodes between the first product of a weight and its gradient.

    That is everything from the product to its gradients: for the last layer, its loss; for an earlier one, all layers
    after it; where nothing is trained, all that follows. For a lookup, the lookup and the update of its table.
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
    """Returns the handles of variables that split scopes may divide: their own, and those that only they use."""
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
    # What comes after the weight's last product (its operand's gradient) belongs to the layers before.
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
        # Variables that are used inside (biases, the state of the optimizer), and their updates.
        behind = {_find_weight_behind(program, r) for n in program.nodes if n.name in inside for r in n.inputs}
        own |= {h for h in behind if h is not None and program.variable_of[h].type.shape}
        targets |= {n.name for n in program.nodes if n.name in after and own & set(updates(program, n))}


def _readers(program: Program, handle: str) -> set[str]:
    """Returns the nodes that pass a variable's elements on."""
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
