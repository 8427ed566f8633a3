"""Simulates the live bytes of one rank, node by node: what results take, share, take over and give back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cost_model.graph.allocator import Allocator
from cost_model.graph.executor_graph import Graph
from whale.ir.ops import APPLIES_ROWS, SCATTERS, UPDATES

_COPIED_FIRST = UPDATES - SCATTERS - APPLIES_ROWS  # these change it whoever reads it: see buffers.copied_reads
STEPS = 5  # at least; the first is left out: pieces do not lie yet as they will from then on


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of memory, as numbers below `count`: of each result, of variables by handle node, of the rest."""

    count: int
    results: Sequence[int]
    variables: dict[str, int]
    resident: int


def peak_bytes(graph: Graph, orders: Sequence[Sequence[int]], scratch_bytes: Sequence[int]) -> tuple[int, int, int]:
    """Returns the most bytes that a rank holds during a step.

    Args:
        orders: in which it starts and ends its nodes in steps one after the other, over and over; in each a node where
            it starts, its complement (~node) where it has ended.
        scratch_bytes: memory of each node while it runs.

    Returns:
        (most bytes during a step, bytes between steps, most bytes that were asked for at a time).
    """
    nothing = Kinds(1, [0] * len(graph.sizes), dict.fromkeys(graph.variable_bytes, 0), 0)
    allocator = Allocator()
    most, resident = peaks(graph, orders, scratch_bytes, nothing, allocator=allocator)
    return sum(most), resident, allocator.peak_asked_bytes


def peaks(
    graph: Graph,
    orders: Sequence[Sequence[int]],
    scratch_bytes: Sequence[int],
    kinds: Kinds,
    steps: int = STEPS,
    calls: Collection[int] = (),
    allocator: Allocator | None = None,
) -> tuple[list[int], int]:
    """Returns (bytes by kind at the moment when they are most, bytes between steps); scratch memory is of the kind 0.

    Args:
        calls: nodes whose scratch memory is that of many nodes.
    """
    allocator = allocator or Allocator(kinds.count)
    variables = {}
    for handle, size in graph.variable_bytes.items():
        drawn = _Owner(allocator, size, 1)  # random bits, of which the initial value is computed
        variables[handle] = _Owner(allocator, size, 1, kinds.variables[handle])
        drawn.drop()
    for size in graph.resident_sizes:
        if size:
            allocator.take(size, kinds.resident)
    resident = 0
    for step in range(max(steps, 2 * len(orders) + 1)):
        resident = max(resident, allocator.live_bytes) if step > 1 else allocator.live_bytes
        if step <= 1:
            allocator.forget_peak()
        memory = _Memory(graph, allocator, variables, kinds)
        scratch: dict[int, int] = {}
        for event in orders[step % len(orders)]:
            if event >= 0:
                memory.begin(event)
                if event in calls:
                    allocator.lend(scratch_bytes[event])
                elif scratch_bytes[event]:
                    scratch[event] = allocator.take(scratch_bytes[event])
            else:
                if ~event in calls:
                    allocator.lend(-scratch_bytes[~event])
                elif ~event in scratch:
                    allocator.give(scratch.pop(~event))
                memory.end(~event)
        memory.close()
    return allocator.at_peak, resident


def live_bytes(graph: Graph, order: Sequence[int], scratch_bytes: Sequence[int]) -> list[int]:
    """Returns the bytes that a rank holds after each event of a step that is not its first one (see ``peak_bytes``)."""
    allocator = Allocator()
    variables = {handle: _Owner(allocator, size, 1) for handle, size in graph.variable_bytes.items()}
    for size in filter(None, graph.resident_sizes):
        allocator.take(size)
    nothing = Kinds(1, [0] * len(graph.sizes), dict.fromkeys(graph.variable_bytes, 0), 0)
    found: list[int] = []
    for _ in range(2):
        found.clear()
        memory = _Memory(graph, allocator, variables, nothing)
        scratch: dict[int, int] = {}
        for event in order:
            if event >= 0:
                memory.begin(event)
                if scratch_bytes[event]:
                    scratch[event] = allocator.take(scratch_bytes[event])
            else:
                if ~event in scratch:
                    allocator.give(scratch.pop(~event))
                memory.end(~event)
            found.append(allocator.live_bytes)
        memory.close()
    return found


class _Owner:
    """Memory that results share; it is given back when nobody refers to it any more."""

    __slots__ = ("_allocator", "piece", "references")

    def __init__(self, allocator: Allocator, size: int, references: int, kind: int = 0) -> None:
        self._allocator = allocator
        self.piece = allocator.take(size, kind) if size else -1
        self.references = references

    def become(self, kind: int) -> None:
        """Changes the kind of what lies there."""
        if self.piece >= 0:
            self._allocator.become(self.piece, kind)

    def drop(self) -> None:
        self.references -= 1
        if self.references == 0 and self.piece >= 0:
            self._allocator.give(self.piece)
            self.piece = -1


class _Memory:
    """The memory of one step.

    Readers of a result refer to its memory until they have run; the caller refers to what it fetches.
    """

    def __init__(self, graph: Graph, allocator: Allocator, variables: dict[str, _Owner], kinds: Kinds) -> None:
        self._graph, self._allocator, self._variables, self._kinds = graph, allocator, variables, kinds
        self._held = _Owner(allocator, 0, 1 << 60)  # inputs and constants stay where they are
        self._owner: list[_Owner] = [self._held] * len(graph.sizes)
        self._readers = graph.readers

    def begin(self, node: int) -> None:
        """Starts a node: its results get memory."""
        g = self._graph
        op = g.nodes[node].op
        results = g.results[node]
        if op == "ReadVariableOp" and g.shared[results[0]] >= 0:
            owner = self._variables.get(g.nodes[node].inputs[0].node, self._held)
            self._owner[results[0]] = owner
            owner.references += 1
            return
        for mine in results:
            if g.shared[mine] >= 0:
                owner = self._owner[g.shared[mine]]
            elif mine in g.held:
                owner = self._held
            else:
                candidates = (self._owner[r] for r in g.taken[mine])
                # Only the node that asks refers to it.
                free = next((o for o in candidates if o.references == 1), None)
                kind = self._kinds.results[mine]
                if free is None:
                    free = _Owner(self._allocator, g.sizes[mine], 0, kind)
                elif self._kinds.count > 1:
                    free.become(kind)
                owner = free
            self._owner[mine] = owner
            owner.references += 1
        if op == "AssignVariableOp":
            handle = g.nodes[node].inputs[0].node
            if handle in self._variables:
                value = self._owner[g.operands[node][1]]
                value.references += 1
                self._variables[handle].drop()
                self._variables[handle] = value
                value.become(self._kinds.variables[handle])
        elif op in _COPIED_FIRST:
            for ref in g.nodes[node].inputs:
                self._change(ref.node)

    def end(self, node: int) -> None:
        """Ends a node: what nobody will read any more is given back."""
        g = self._graph
        for mine in g.results[node]:
            self._owner[mine].references += self._readers[mine]
        for mine in g.results[node]:
            self._owner[mine].drop()
        for r in g.operands[node]:
            self._owner[r].drop()

    def close(self) -> None:
        """Ends the step: the caller gives back what it has fetched."""
        for r in self._graph.fetched:
            self._owner[r].drop()

    def _change(self, name: str) -> None:
        """Changes a variable in place, first copied where somebody still reads it; does nothing for other nodes."""
        owner = self._variables.get(name)
        if owner is not None and owner.references > 1:
            size, kind = self._graph.variable_bytes[name], self._kinds.variables[name]
            self._variables[name] = _Owner(self._allocator, size, 1, kind)
            owner.drop()
