"""Cuts the chain of weights of a captured program into pipeline stages, and assigns the stages to ranks.

A stage is given by the weights it holds; which other nodes belong to it is inferred as for `wh.stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from cost_model.kernels.op_work import count_matmul_flops
from whale.ir.mesh import EXPERT
from whale.ir.ops import ROW_LOOKUPS
from whale.ir.program import Node, Program
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Stage
from whale.passes.analysis.stages import share_ranks
from whale.passes.normalize.annotate import annotate
from whale.planner.graph_search.strategies import products, updates

MICRO_BATCHES = (2, 4, 8)  # numbers of micro-batches that are tried, as multiples of the number of stages
EXPERTS_RANK = 3  # rank of a weight that holds a matrix for each expert of a layer


def chain(program: Program) -> list[str]:
    """Returns the handles of the trained weights of rank 2 or more, in the order in which the forward pass reads
    them.
    """
    trained = {handle for node in program.nodes for handle in updates(program, node)}
    return [handle for handle in products(program) if handle in trained]


@dataclass(frozen=True)
class Levels:
    """Stores the position of nodes along the chain of weights, by node name.

    Attributes:
      forward: number of the last weight of the chain that the node depends on.
      backward: number of the weight to whose position the node belongs in the backward pass.
    """

    forward: dict[str, int]
    backward: dict[str, int]


def levels(program: Program) -> Levels:
    """Finds the position of nodes along the chain of weights, by which they belong to one pipeline stage or another.

    In the forward pass, the products with the chain's weights and all nodes that they depend on have a position: the
    number of the last weight that the node depends on. In the backward pass, the nodes that depend on the last product
    and lead to the gradient of one weight have that weight's position. Nodes that combine gradients of several
    positions (a global norm), and nodes that depend on such nodes, have no position.
    """
    weights, read = chain(program), products(program)
    first = {read[handle][0].name: i for i, handle in enumerate(weights)}
    level: dict[str, int] = {}
    for node in program.nodes:
        level[node.name] = max([first.get(node.name, -1), *(level.get(r.node, -1) for r in node.inputs)])
    again = {name for handle in weights for name in _read_again(program, read[handle])}
    forward = _find_before(program, {*first, *again}, set())
    # A backward product with a weight gives the gradient of its operand, which belongs to the operand's position.
    operand: dict[str, int] = {}
    for i, handle in enumerate(weights):
        earlier = [level[r.node] for r in read[handle][0].inputs if r.node in forward]
        operand.update((node.name, max([-1, *(n for n in earlier if n < i)])) for node in read[handle][1:])
    # A weight that is read at several positions (a tied embedding) is also read at each of them in the backward pass.
    of_weight = {
        node.name: sorted({i, *(level[n.name] for n in read[handle] if n.name in forward)})
        for i, handle in enumerate(weights)
        for node in read[handle][1:]
    }
    on_path = _find_before(program, of_weight, forward)
    backward: dict[str, int | None] = {}
    last = len(weights) - 1
    for node in program.nodes:
        if node.name in forward or level[node.name] < last:
            continue
        if node.name in of_weight:
            after = [n for r in node.inputs if (n := backward.get(r.node)) is not None]
            places = of_weight[node.name]
            place = max((n for n in places if n <= min(after, default=last)), default=places[0])
            backward[node.name] = place
            if place != places[0]:
                operand[node.name] = place  # the weight is only read again here; it belongs to its first position
            continue
        found = {operand.get(r.node, backward[r.node]) for r in node.inputs if r.node in backward}
        if not found:
            backward[node.name] = last
        elif None not in found and (len(found) == 1 or node.name in on_path):
            backward[node.name] = max(0, min(n for n in found if n is not None))
        else:
            backward[node.name] = None
    return Levels(
        {name: max(0, level[name]) for name in forward}, {name: n for name, n in backward.items() if n is not None}
    )


def _read_again(program: Program, readers: Sequence[Node]) -> list[str]:
    """Returns the names of forward products that read a weight a second time, as logits do with a tied embedding.

    Forward and backward products differ so: the other operand of a forward product is read again by a later product
    that computes the weight's gradient; the other operand of a backward product is not.
    """
    if len(readers) < (2 if readers[0].op in ROW_LOOKUPS else 3):
        return []  # a product and its operand's gradient, or a lookup
    found = []
    for node in readers[1:]:
        after = _find_after(program, node)
        others = [c for r in node.inputs for c, _ in program.consumers.get(r, ()) if c.name in after]
        if any(count_matmul_flops(c, [program.find_type(r) for r in c.inputs]) for c in others):
            found.append(node.name)
    return found


def _find_after(program: Program, node: Node) -> set[str]:
    """Returns the names of all nodes that depend on a node."""
    found: set[str] = set()
    stack = [node]
    while stack:
        for ref in stack.pop().list_refs():
            for consumer, _ in program.consumers.get(ref, ()):
                if consumer.name not in found:
                    found.add(consumer.name)
                    stack.append(consumer)
    return found


def _find_before(program: Program, names: Iterable[str], without: Collection[str]) -> set[str]:
    """Returns the given names and the names of all nodes that they depend on, without going beyond those in
    `without`.
    """
    found: set[str] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name not in found and name not in without:
            found.add(name)
            stack += [r.node for r in program.by_name[name].inputs]
    return found


def work_of_chain(program: Program, seconds: Callable[[Node], float]) -> list[float]:
    """Returns the seconds of each weight of the chain: all nodes at its position, in both passes.

    Args:
        seconds: (node) -> its seconds.
    """
    found = [0.0] * len(chain(program))
    if not found:
        return found
    at = levels(program)
    for name, level in (at.forward | at.backward).items():
        found[level] += seconds(program.by_name[name])
    return found


def cut(work: Sequence[float], speeds: Sequence[float]) -> list[int] | None:
    """Cuts the chain into stages so that the slowest stage is as fast as possible, by dynamic programming.

    Args:
        work: seconds of each weight of the chain.
        speeds: speed of each stage's ranks, in stage order.

    Returns:
        the number of the first weight of each stage but the first; None: there are more stages than weights.
    """
    count, stages = len(work), len(speeds)
    if stages > count:
        return None
    sums = [0.0]
    for one in work:
        sums.append(sums[-1] + one)
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * count]
    for stage, speed in enumerate(speeds):
        row = [(float("inf"), 0)] * (count + 1)
        for high in range(stage + 1, count + 1):
            row[high] = min(
                (max(best[-1][low][0], (sums[high] - sums[low]) / speed), low) for low in range(stage, high)
            )
        best.append(row)
    cuts, high = [], count
    for stage in range(stages, 1, -1):
        high = best[stage][high][1]
        cuts.append(high)
    return cuts[::-1]


def pipelines(
    program: Program,
    size: int,
    rows: int,
    work: Sequence[float],
    speeds: Sequence[float],
    asked: int = 1,
    schedule: str = "1f1b",
    hosts: tuple[int, ...] = (),
) -> list[ParallelStrategy]:
    """Returns the pipelines to try: 2 to `size` stages over all ranks, with replicas if there are fewer stages than
    ranks.

    Args:
        size: number of ranks.
        rows: rows of the global batch; 0: they cannot be divided, so that there are no pipelines.
        work: seconds of each weight of the chain, see `work_of_chain`.
        speeds: speed of each rank; a stage is as fast as its slowest rank.
        asked: the only number of micro-batches to try; 1: several multiples of the number of stages.
        schedule: the order in which stages run micro-batches.
        hosts: the host number of each rank; (): all are on one host.
    """
    if program.functions or not rows:
        return []
    found = []
    for stages in (n for n in range(2, size + 1) if size % n == 0):
        # The fastest ranks form the first stage of all replicas, and so on, so that replicas are equally fast.
        replicas = size // stages
        groups = groups_of(speeds, stages, hosts)
        cuts = cut(work, [min(speeds[r] for r in group) for group in groups])
        if cuts is None:
            continue
        for count in [times * stages for times in MICRO_BATCHES] if asked == 1 else [asked]:
            if rows % (replicas * count) == 0:
                name = f"pipeline of {stages} stages, {count} micro-batches"
                name += f", {_counts(cuts, len(work))} weights" + (f", {replicas} replicas" if replicas > 1 else "")
                part = DeviceGroup(0, 1, replicas, rows // (replicas * count))
                ends = zip([0, *cuts], [*cuts, len(work)])
                of = tuple(Stage((own,), (part,), bound_ranks=ranks) for own, ranks in zip(ends, groups))
                found.append(ParallelStrategy(of, count, schedule=schedule, name=name))
    return found


def why_none(program: Program, size: int, rows: int, local: bool, stages: int, asked: int) -> str:
    """Explains why there is no pipeline with `stages` stages to try, for the error that the user gets.

    Args:
        size: number of ranks.
        rows: rows of the global batch; 0: they cannot be divided.
        local: each rank loads rows of its own (``batch.mode=local``), which pipelines do not support.
        stages: the number of stages that the user has set.
        asked: the only number of micro-batches that the user allows; 1: any.
    """
    weights = len(chain(program))
    if local:
        return "every rank is given its own rows (batch.mode=local), but the stages of a pipeline work on the same rows"
    if program.functions:
        return "the step has loops or branches"
    if not rows:
        return "the step has no rows that can be divided"
    if size % stages or stages < 2:
        return f"{size} ranks are no whole number of {stages} stages"
    if weights < stages:
        return f"the step has {weights} weights one after the other, fewer than {stages} stages"
    counts = " or ".join(str(times * stages) for times in MICRO_BATCHES) if asked == 1 else str(asked)
    replicas = size // stages
    return f"{rows} rows cannot be divided into {counts} micro-batches" + (f" of {replicas} replicas" * (replicas > 1))


def groups_of(speeds: Sequence[float], stages: int, hosts: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each stage.

    If all ranks are equally fast, they are chosen as `wh.stage` chooses them; otherwise ranks of similar speed form a
    stage, the fastest ranks the first one.
    """
    size = len(speeds)
    order = list(range(size))
    if max(speeds) > 1.05 * min(speeds):
        order.sort(key=lambda r: (-speeds[r], r))
        replicas = size // stages
        return tuple(tuple(sorted(order[s * replicas : (s + 1) * replicas])) for s in range(stages))
    return tuple(share_ranks(stages, size, hosts))


def _counts(cuts: Sequence[int], count: int) -> str:
    return "+".join(str(b - a) for a, b in zip([0, *cuts], [*cuts, count]))


def is_of_experts(program: Program, handle: str) -> bool:
    """Returns True if a weight is a stack of matrices, one for each expert of a layer."""
    return len(program.variable_of[handle].type.shape or ()) == EXPERTS_RANK


def find_experts(program: Program, at: Levels) -> list[str]:
    """Returns the weights of experts (handles) and the names of the nodes that compute with them, in both passes.

    Those nodes are the products with experts' weights, and all nodes between the products of one layer. Nodes that
    dispatch tokens to experts or combine their results are not included.

    Args:
        at: position of the program's nodes, from `levels`.
    """
    weights, read = chain(program), products(program)
    found: dict[str, None] = {}
    of_experts = [number for number, handle in enumerate(weights) if is_of_experts(program, handle)]
    for _, run in groupby(enumerate(of_experts), key=lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        first, last = own[0], own[-1]
        for number in own:
            found[weights[number]] = None
            found.update((node.name, None) for node in read[weights[number]])
        # Nodes at the last weight's backward position belong here only if no earlier position needs them.
        shared: set[str] = set()
        for node in reversed(program.nodes):
            name = node.name
            if first <= at.forward.get(name, -1) < last or first <= at.backward.get(name, -1) < last:
                found[name] = None
            elif at.backward.get(name) == last:
                readers = [reader.name for ref in node.list_refs() for reader, _ in program.consumers.get(ref, ())]
                if any(at.backward.get(one, last) < last or one in shared for one in readers):
                    shared.add(name)
                else:
                    found[name] = None
    inside = at.forward.keys() | at.backward.keys() | set(weights)
    return [name for name in found if name in inside]


def make_staged(program: Program, strategy: ParallelStrategy) -> Program:
    """Puts the program's nodes into scopes, as if the user had built it under `wh.stage` and `wh.split`.

    Each stage's weights and nodes get a stage scope with its ranks. Context parallelism is a split of dimension 1 of
    activations (the tokens). With expert parallelism, nodes between the products with the weights of a layer's experts
    are also in a split scope over the expert axis.
    """
    scopes: list[str] = []
    count, tensor = len(chain(program)), strategy.tensor
    parts = strategy.ordered_layers if strategy.is_pipelined else []
    lows = [0, *(low for _, low, _ in parts[1:])]
    for number, (low, high) in enumerate(zip(lows, [*lows[1:], count])):
        path = ["auto_parallel"]
        if strategy.is_pipelined:
            ranks = parts[number][0].bound_ranks
            path.append(f"stage_{number}(ranks={'+'.join(map(str, ranks))})")
        if strategy.context > 1:
            path.append("split_1(axis=context,context=1)")
        if tensor > 1:
            path.append("split_0(sequence=1)" if strategy.sequence_parallel else "split_0")
        scopes += ["/".join(path)] * (high - low)
    at = levels(program)
    stage = {name: scopes[level] for name, level in (at.forward | at.backward).items()}
    stage.update((handle, scopes[i]) for i, handle in enumerate(chain(program)))
    if strategy.expert_ranks > 1:
        stage.update((name, f"{stage[name]}/split_2(axis={EXPERT})") for name in find_experts(program, at))
    variables = tuple(replace(v, scope=stage.get(v.node, "")) for v in program.variables)
    nodes = tuple(replace(n, scope=stage.get(n.name, "")) for n in program.nodes)
    return annotate(replace(program, nodes=nodes, variables=variables))
