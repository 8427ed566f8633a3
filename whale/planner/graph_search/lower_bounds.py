"""Computes lower bounds of step times, so that the search need not plan strategies that cannot be the fastest.

Speed, speed_of         how fast one kind of rank computes nodes
Shares                  the smallest share of an operation that a rank computes
alone                   bound for: every rank computes everything
Bound                   a bound in two parts: computation, exchanges
bound_pipelines         bound for: pipeline stages and micro-batches
bound_divided_state     bound for: data parallelism with sharded optimizer state
bound_splits            bound for: tensors sharded from a weight on, by all ranks or in groups

Decisions: 0090, 0117, 0218.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from cost_model.graph.executor_graph import BIAS, MAY_BE_FUSED
from cost_model.graph.fusion import is_fusible
from cost_model.graph.machine import Rates
from cost_model.kernels.op_work import Work, estimate_work
from whale.ir.ops import CONTRACTIONS, CONVOLUTIONS, FILTER_GRADIENTS, LOOKUPS, READS, ROW_LOOKUPS
from whale.ir.program import PRODUCT, Node, Program, Ref
from whale.ir.strategy import ParallelStrategy
from whale.ir.values import TensorType
from whale.planner.graph_search.pipelines import chain, levels
from whale.planner.graph_search.strategies import divisible, find_trained_weights, products, updates


class Bound(NamedTuple):
    """Holds a lower bound of a step in two parts, as exchanges are known exactly once a strategy is lowered.

    Attributes:
        computing_s: seconds of the rank's operations.
        exchanging_s: seconds of exchanges that take the core which computes.
    """

    computing_s: float
    exchanging_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Returns the bound of the step's seconds."""
        return self.computing_s + self.exchanging_s


@dataclass(frozen=True)
class Speed:
    """Holds functions that return how long one kind of rank takes for a node of the program.

    Attributes:
        seconds: (node) -> seconds for the whole batch.
        part: (node, share, by_rows) -> least seconds for a part of the node that is `share` (0 to 1) of it. by_rows:
            the node is divided by rows of the batch; False: along whichever dimension is fastest.
        of_rows: (node, share, whole bytes) -> seconds for a share of the node's rows, as for one micro-batch; of the
            bytes that the node moves, `whole bytes` (its weights) are moved in full, all others in proportion to the
            share.
        moving_s: (bytes) -> seconds to read or write so many bytes of memory.
        start_s: seconds of an operation that do not depend on its size.
    """

    seconds: Callable[[Node], float]
    part: Callable[[Node, float, bool], float]
    of_rows: Callable[[Node, float, float], float]
    moving_s: Callable[[float], float]
    start_s: float


def speed_of(
    programs: Sequence[Program], price: Callable[[Program, Node, Work], tuple[float, int]], start_s: float
) -> Speed:
    """Returns the speed of one kind of rank; each operation is priced once and cached.

    Args:
      programs: where to look nodes up, by name and op: a fused operation may have the name of the one that it replaces.
      price: (program, node, work) -> (seconds, a count that is not used here).
      start_s: seconds of an operation that do not depend on its size.
    """

    @cache
    def does(name: str, op: str) -> tuple[Program, Node, Work]:
        program = next(one for one in programs if name in one.by_name and one.by_name[name].op == op)
        node = program.by_name[name]
        return program, node, estimate_work(node, [program.find_type(r) for r in node.inputs])

    @cache
    def seconds(name: str, op: str) -> float:
        _, node, work = does(name, op)
        return price(*does(name, op))[0] if work.kernels and not is_fusible(node) else 0.0

    @cache
    def part(name: str, op: str, share: float, by_rows: bool) -> float:
        program, node, every = does(name, op)
        if not every.kernels or is_fusible(node):
            return 0.0
        some = Work(share * every.flops, share * every.read_bytes, share * every.written_bytes, every.kernels)
        nodes = [node]  # the share is of the summed dimension: the result keeps its size
        if node.op in CONTRACTIONS and not (by_rows and node.op in FILTER_GRADIENTS):
            out = node.outputs[0]
            columns = (out.shape or (1,))[-1] or 1
            rows = out.elements // columns
            fewer = [(int(share * rows), columns)] + [(rows, int(share * columns))] * (not by_rows)
            smaller = [TensorType(out.dtype, (max(1, m), max(1, n))) for m, n in fewer]
            nodes = [node] * (not by_rows or node.op not in CONVOLUTIONS)
            nodes += [replace(node, outputs=(one, *node.outputs[1:])) for one in smaller]
        return min(price(program, one, some)[0] for one in nodes)

    def part_of(node: Node, share: float, by_rows: bool) -> float:
        return part(node.name, node.op, share, by_rows)

    def of_rows(node: Node, share: float, whole_bytes: float) -> float:
        program, node, every = does(node.name, node.op)
        moved_bytes = share * max(0.0, every.moved_bytes - whole_bytes) + min(whole_bytes, every.moved_bytes)
        return price(program, node, Work(share * every.flops, moved_bytes, 0.0, every.kernels))[0]

    def moving_s(size_bytes: float) -> float:
        node = Node("sum", "AddN")
        return price(programs[0], node, Work(0.0, size_bytes, 0.0, 1))[0] - start_s

    return Speed(lambda node: seconds(node.name, node.op), part_of, of_rows, moving_s, start_s)


def bound_pipelines(
    program: Program, whole: Program, kinds: Sequence[Speed], equal_rows: bool
) -> Callable[[ParallelStrategy], float]:
    """Returns a function that computes a lower bound of a pipeline's step, from the work that each micro-batch repeats.

    A stage processes all m micro-batches after the stages before it have passed on the first one; the stages before it
    finish the last one afterwards. Of n stages the slowest processes all micro-batches, while first and last stage wait
    for the others once: if a micro-batch takes t in all stages together, a step takes at least t * (1 + (m - 1) / n).
    The first stage gets the gradient of the last micro-batch last, and then updates its weights. Matrix products read
    their weights, and write weight gradients, once per micro-batch, and all these gradients but the first are added up.

    Args:
        whole: the program as it runs, in which fused operations replace some nodes.
        kinds: the speed of each rank.
        equal_rows: all ranks of a stage have as many rows, so that the stage waits for its slowest rank.
    """
    of_rows = _find_dependents(program, program.inputs)
    at = levels(program)
    handles = chain(program)
    trained = find_trained_weights(program)
    shapes = {program.variable_of[handle].type.shape for handle in handles}
    read = products(program)
    added = {h: 0 if any(n.op in ROW_LOOKUPS for n in read[h]) else trained.get(h, 0) for h in handles}
    counted, contracted = [], []
    for name, level in (at.forward | at.backward).items():
        node = whole.by_name.get(f"{name}/{PRODUCT}") or whole.by_name.get(name)
        if node is not None and name in of_rows and not {node.op, program.by_name[name].op} & MAY_BE_FUSED:
            if node.op in CONTRACTIONS:
                weights_bytes = sum(whole.find_type(r).bytes for r in node.inputs if r.node not in of_rows)
                out = node.outputs[0]
                contracted.append((node, level, weights_bytes + (out.bytes if out.shape in shapes else 0)))
            else:
                counted.append((node, level))
    weights = len(handles)
    gradient_bytes = list(accumulate(added.values(), initial=0))
    # Cumulative along the chain: (seconds of operations, number of operations that take time).
    sums: dict[Speed, list[tuple[float, int]]] = {}
    for kind in dict.fromkeys(kinds):
        seconds, started = [0.0] * weights, [0] * weights
        for node, level in counted:
            taken_s = kind.seconds(node)
            seconds[level] += taken_s
            started[level] += taken_s > 0.0
        sums[kind] = list(zip(accumulate(seconds, initial=0.0), accumulate(started, initial=0)))

    @cache
    def sum_products(kind: Speed, parts: int) -> list[float]:
        """Returns the seconds of all products for one micro-batch, as cumulative sums over the chain of weights from 0
        on.

        Args:
            parts: number of parts into which a step's rows are divided; one of them is computed.
        """
        seconds = [0.0] * weights
        for node, level, whole_bytes in contracted:
            seconds[level] += kind.of_rows(node, 1 / parts, whole_bytes)
        return list(accumulate(seconds, initial=0.0))

    @cache
    def update_s(kind: Speed, high: int) -> float:
        """Returns the seconds of the updates of the first `high` weights of the chain."""
        first, found_s = {*handles[:high]}, 0.0
        for node, of_handles in _find_writers(program, whole):
            own, every = (sum(trained.get(h, 0) for h in found) for found in (first & {*of_handles}, of_handles))
            found_s += max(0.0, kind.seconds(node) - kind.start_s) * own / every if every else 0.0
        return found_s

    def bound_stage(kind: Speed, low: int, high: int, parts: int) -> float:
        (before_s, before), (until_s, until) = sums[kind][low], sums[kind][high]
        started_s = kind.start_s * (until - before)
        products = sum_products(kind, parts)
        return started_s + max(0.0, until_s - before_s - started_s) / parts + products[high] - products[low]

    def least(strategy: ParallelStrategy) -> float:
        count, stages = strategy.micro_batches, len(strategy.stages)
        pick = max if equal_rows else min
        each, adding = [], []
        for stage, low, high in strategy.ordered_layers:
            of_ranks = [kinds[rank] for rank in stage.bound_ranks]
            each.append(pick(bound_stage(kind, low, high, count * stage.ranks) for kind in of_ranks))
            moved_bytes = 2 * (count - 1) * (gradient_bytes[high] - gradient_bytes[low])
            adding.append(min(kind.moving_s(moved_bytes) for kind in of_ranks))
        stage, _, high = strategy.ordered_layers[0]
        updated_s = min(update_s(kinds[rank], high) for rank in stage.bound_ranks)
        filled = accumulate(each, initial=0.0)
        slowest_s = max(count * one + more + first for one, more, first in zip(each, adding, filled))
        return updated_s + max(sum(each) * (1 + (count - 1) / stages) + min(adding), slowest_s)

    return least


def _find_writers(program: Program, whole: Program) -> list[tuple[Node, list[str]]]:
    """Returns (node, handles) for each node that writes variables; a fused update writes several."""
    known = {v.node for v in program.variables}
    nodes = [node for node in whole.nodes if node.op not in READS | LOOKUPS]
    found = [(node, [r.node for r in node.inputs if r.node in known]) for node in nodes]
    return [(node, handles) for node, handles in found if handles]


def alone(program: Program, seconds: Callable[[Node], float]) -> float:
    """Returns a lower bound of the step of a rank that computes everything: the sum over all operations that always
    run.
    """
    return sum(seconds(node) for node in program.nodes if node.op not in MAY_BE_FUSED)


@dataclass(frozen=True)
class Shares:
    """Holds the smallest share of an operation that a rank can get.

    Attributes:
        rows: share of operations that are divided by rows of the batch.
        parts: number of parts into which other operations are divided.
        whole: ranks are equal, so that each computes exactly 1 / ``parts`` of each operation.
    """

    rows: float
    parts: int
    whole: bool

    def find_smallest(self, program: Program, node: Node, by_rows: bool) -> float:
        """Returns the smallest share of a node that a rank can get, if the node is divided by rows, or else along any
        dimension.
        """
        if self.whole:
            return 1 / self.parts
        if by_rows:
            return self.rows
        types = (*(program.find_type(r) for r in node.inputs), *node.outputs)
        sizes = {size for t in types for size in t.shape or () if size is not None and size >= self.parts}
        return min((size // self.parts / size for size in sizes), default=0.0)


def _bound_divided(
    program: Program, kinds: Collection[Speed], shares: Shares, rows: Collection[str], own: Mapping[str, float]
) -> float:
    """Returns a lower bound of the seconds that the slowest kind of rank takes for its part of all operations.

    Args:
        rows: names of the nodes that are divided by rows.
        own: node name -> share of the node that every rank computes itself (replicated), where it is not 0.
    """
    found_s = dict.fromkeys(kinds, 0.0)
    for node in program.nodes:
        if node.op in MAY_BE_FUSED and (node.op == BIAS or program.by_name[node.inputs[0].node].op == BIAS):
            continue
        by_rows, mine = node.name in rows, own.get(node.name, 0.0)
        share = mine + (1 - mine) * shares.find_smallest(program, node, by_rows)
        for kind in found_s:
            found_s[kind] += kind.part(node, share, by_rows)
    return max(found_s.values())


def bound_divided_state(
    program: Program,
    whole: Program,
    kinds: Collection[Speed],
    shares: Shares,
    rates: Sequence[Rates],
    state: Collection[str],
) -> Bound:
    """Returns a lower bound of a step of data parallelism with sharded optimizer state.

    All operations are divided over the ranks. Each weight whose state is sharded is all-gathered after its update; the
    bytes sent for that and for reducing its gradient count. Small all-reduces are fused into one, but reduce-scatters
    and all-gathers are not (`whale.passes.resharding.fuse_all_reduces`), so that each counts with its start.

    Args:
        whole: the program with its updates as they run, and composite ops expanded as data parallelism needs.
        kinds: the speeds of the kinds of ranks.
        rates: the figures of each rank.
        state: handles of the variables that are sharded.
    """
    updated = {node.name for node in whole.nodes if any(r.node in whole.variable_of for r in node.inputs)}
    computed_s = _bound_divided(whole, kinds, shares, {node.name for node in whole.nodes} - updated, {})
    if not rates[0].exchanges_compute:
        return Bound(computed_s)
    size = len(rates)
    of_state = _find_dependents(program, state)
    sizes = find_trained_weights(program)
    gathered = {
        handle: sizes[handle]
        for node in program.nodes
        for handle in updates(program, node)
        if handle in sizes and handle not in state and any(r.node in of_state for r in node.inputs if r != Ref(handle))
    }
    sent_bytes = 2 * sum(gathered.values()) * (size - 1) / size
    links = [rate.link(through) for rate in rates for through in ("", "devices")]
    exchange_s, bytes_per_s = min(link.exchange_s for link in links), max(link.bytes_per_s for link in links)
    return Bound(computed_s, len(gathered) * exchange_s + sent_bytes / bytes_per_s)


def bound_splits(
    program: Program,
    whole: Program,
    kinds: Collection[Speed],
    shares: Shares,
    rates: Sequence[Rates],
) -> Callable[[ParallelStrategy, Program], Bound]:
    """Returns a function that computes a lower bound of a step with tensors sharded from some weight on.

    All operations are divided, except updates of variables outside of the split scope, which are replicated. The bound
    includes the time to exchange the gradient of each weight outside of the scope.

    Args:
        whole: the program with its updates as they run, and composite ops expanded as data parallelism needs.
        kinds: the speeds of the kinds of ranks.
        rates: the figures of each rank.

    Returns:
        a function of the strategy, and of the program with a split scope on the nodes that the strategy shards.
    """
    sizes = {v.node: v.type.bytes for v in program.variables}
    written = {node.name: handles for node, handles in _find_writers(program, whole)}
    of_rows = _find_dependents(program, program.inputs)
    trained = {h for node in program.nodes if node.name in of_rows for h in updates(program, node)}
    sent = {
        handle: sizes[handle]
        for handle, readers in products(program).items()
        if handle in trained and not any(node.op in ROW_LOOKUPS for node in readers)
    }
    bytes_per_s = max(one.link(through).bytes_per_s for one in rates for through in ("", "devices"))
    known: dict[tuple[str, ...], Bound] = {}

    def own(handles: Sequence[str], divided: Collection[str]) -> float:
        total = sum(sizes[h] for h in handles)
        return sum(sizes[h] for h in handles if h not in divided) / total if total else 0.0

    def least(strategy: ParallelStrategy, inside: Program) -> Bound:
        if strategy.split not in known:
            divided = divisible(inside)
            by_rows = {node.name for node in inside.nodes if not node.scope}
            mine = {name: own(handles, divided) for name, handles in written.items()}
            outside_bytes = sum(size for handle, size in sent.items() if handle not in divided)
            sent_s = outside_bytes * (1 - 1 / len(rates)) / bytes_per_s if rates[0].exchanges_compute else 0.0
            known[strategy.split] = Bound(_bound_divided(whole, kinds, shares, by_rows, mine), sent_s)
        return known[strategy.split]

    return least


def _find_dependents(program: Program, names: Iterable[str]) -> set[str]:
    """Returns the given names and the names of all nodes that depend on one of them."""
    found = {*names}
    for node in program.nodes:
        if any(ref.node in found for ref in node.inputs):
            found.add(node.name)
    return found
