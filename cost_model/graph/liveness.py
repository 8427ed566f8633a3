"""Simulates the live bytes of one rank, node by node: results allocate, share, reuse and free memory.

Memory comes from TensorFlow's best-fit allocator with coalescing, as far as sizes go
(xla/tsl/framework/bfc_allocator.cc). The allocator takes the smallest free piece that is large enough, and splits it
only if it is at least twice as large as the request (or 128 MiB larger), so a tensor may occupy nearly twice its bytes.
Memory comes from the system in regions, each twice as large as the one before; neighbouring free pieces of a region are
merged. Ranks that share a host have Whale's own heap instead (whale_ops/core/transport/block_heap.h), whose pieces are
as large as the request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cost_model.graph.executor_graph import Graph
from whale.ir.ops import APPLIES_ROWS, FUSED_UPDATES, SCATTERS, UPDATES

# Updates that copy a variable first if it is still being read. For the others, reads are copies
# (`executor_graph.find_copied_reads`), or the update waits for the readers (whale.kernels.updates).
_COPIED_FIRST = UPDATES - SCATTERS - APPLIES_ROWS - FUSED_UPDATES
STEPS = 5  # at least; the first is not counted: the allocator has not yet settled into its final regions
_FIRST_REGION_BYTES = 2 << 20
_LARGEST_WASTE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Kinds:
    """Classifies memory, to report the peak by kind; kinds are numbers below `count` that the caller chooses.

    Attributes:
        results: kind of each result.
        variables: kind of each variable, by handle node.
        resident: kind of inputs and communication buffers.
    """

    count: int
    results: Sequence[int]
    variables: dict[str, int]
    resident: int


def peak_bytes(
    graph: Graph, orders: Sequence[Sequence[int]], scratch_bytes: Sequence[int], whole_blocks: bool = True
) -> tuple[int, int, int]:
    """Simulates the memory of one rank over several steps.

    Args:
        orders: execution orders of the nodes in consecutive steps, repeated. In each, number n stands for the start of
            node n, and its complement (~n) for its end.
        scratch_bytes: memory of each node while it runs, besides its results.
        whole_blocks: see `Allocator`.

    Returns:
        (peak bytes during a step, bytes between steps, peak of the bytes requested).
    """
    nothing = Kinds(1, [0] * len(graph.sizes), dict.fromkeys(graph.variable_bytes, 0), 0)
    allocator = Allocator(whole_blocks=whole_blocks)
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
    """Simulates the memory of one rank over several steps; returns (bytes by kind at the peak, bytes between steps).

    Args:
        orders, scratch_bytes: see `peak_bytes`; scratch memory has kind 0.
        kinds: kind of each result and variable.
        steps: least number of steps to simulate.
        calls: nodes that call functions: their scratch memory consists of many pieces, of which only the sum is known.
        allocator: the allocator to simulate on; None: a new one.
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


def live_bytes(
    graph: Graph, order: Sequence[int], scratch_bytes: Sequence[int], whole_blocks: bool = True
) -> list[int]:
    """Returns the live bytes after each event of a step, after one step to warm up (arguments as in ``peak_bytes``)."""
    allocator = Allocator(whole_blocks=whole_blocks)
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
    """Represents a piece of memory that several results may share; freed when its reference count becomes 0."""

    __slots__ = ("_allocator", "piece", "references")

    def __init__(self, allocator: Allocator, size: int, references: int, kind: int = 0) -> None:
        self._allocator = allocator
        self.piece = allocator.take(size, kind) if size else -1
        self.references = references

    def become(self, kind: int) -> None:
        """Changes the kind under which this memory is counted."""
        if self.piece >= 0:
            self._allocator.become(self.piece, kind)

    def drop(self) -> None:
        self.references -= 1
        if self.references == 0 and self.piece >= 0:
            self._allocator.give(self.piece)
            self.piece = -1


class _Memory:
    """Simulates the memory of one step as nodes begin and end.

    Each reader of a result holds a reference to its memory until it has run; the caller holds those of fetched results.
    """

    def __init__(self, graph: Graph, allocator: Allocator, variables: dict[str, _Owner], kinds: Kinds) -> None:
        self._graph, self._allocator, self._variables, self._kinds = graph, allocator, variables, kinds
        self._held = _Owner(allocator, 0, 1 << 60)  # inputs and constants stay where they are
        self._owner: list[_Owner] = [self._held] * len(graph.sizes)
        self._readers = graph.readers

    def begin(self, node: int) -> None:
        """Starts a node: allocates its results, or lets them share or reuse memory; copies a variable that must not be
        changed.
        """
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
                # An operand's buffer is free to be reused if only this node still refers to it.
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
        """Ends a node: drops its references to operands, which frees memory that nothing else refers to."""
        g = self._graph
        for mine in g.results[node]:
            self._owner[mine].references += self._readers[mine]
        for mine in g.results[node]:
            self._owner[mine].drop()
        for r in g.operands[node]:
            self._owner[r].drop()

    def close(self) -> None:
        """Ends the step: drops the caller's references to fetched results."""
        for r in self._graph.fetched:
            self._owner[r].drop()

    def _change(self, name: str) -> None:
        """Simulates an in-place update of a variable, which is first copied if it is still being read; ignores other
        nodes.
        """
        owner = self._variables.get(name)
        if owner is not None and owner.references > 1:
            size, kind = self._graph.variable_bytes[name], self._kinds.variables[name]
            self._variables[name] = _Owner(self._allocator, size, 1, kind)
            owner.drop()


class Allocator:
    """Simulates a best-fit allocator by sizes alone; pieces of memory are numbered.

    Args:
        kinds: number of kinds of memory that callers distinguish.
        whole_blocks: a free piece that has less than twice what is requested is given whole, as by TensorFlow's
            allocator; if not, every piece is as large as the request.

    Attributes:
        live_bytes, peak_bytes: bytes of allocated pieces now and at the peak, whole pieces as TensorFlow reports them.
        peak_asked_bytes: peak of the bytes that were requested, which does not depend on how pieces are split.
        at_peak: bytes at the peak by kind, a small number that callers give to each piece.
    """

    def __init__(self, kinds: int = 1, whole_blocks: bool = True) -> None:
        self._whole_blocks = whole_blocks
        self.live_bytes = self.peak_bytes = 0
        self.at_peak = [0] * kinds
        self._live = [0] * kinds
        self.peak_asked_bytes = self._asked_bytes = 0
        self._asked: list[int] = []
        self._kind: list[int] = []
        self._region_bytes = _FIRST_REGION_BYTES
        self._sizes: list[int] = []
        self._before: list[int] = []  # neighbours within the region, -1 at its ends
        self._behind: list[int] = []
        self._used: list[bool] = []
        self._free: list[tuple[int, int]] = []  # (bytes, piece), sorted

    def take(self, size: int, kind: int = 0) -> int:
        """Allocates a piece of at least `size` bytes; returns its number."""
        at = bisect_left(self._free, (size, -1))
        if at == len(self._free):
            grown = False
            while self._region_bytes < size:
                self._region_bytes *= 2
                grown = True
            insort(self._free, (self._region_bytes, self._piece(self._region_bytes, -1, -1)))
            if not grown:
                self._region_bytes *= 2
            at = bisect_left(self._free, (size, -1))
        whole, piece = self._free.pop(at)
        cut = whole >= 2 * size or whole - size >= _LARGEST_WASTE_BYTES
        if cut or (whole > size and not self._whole_blocks):
            rest = self._piece(whole - size, piece, self._behind[piece])
            if self._behind[piece] >= 0:
                self._before[self._behind[piece]] = rest
            self._behind[piece] = rest
            self._sizes[piece] = size
            insort(self._free, (whole - size, rest))
        self._used[piece] = True
        self.live_bytes += self._sizes[piece]
        self._live[kind] += self._sizes[piece]
        self._kind[piece] = kind
        self._asked[piece] = size
        self._more(size)
        return piece

    def lend(self, size: int) -> None:
        """Adds `size` bytes of kind 0 that consist of many pieces, of which only the sum is known; a negative size
        removes them.
        """
        self.live_bytes += size
        self._live[0] += size
        self._more(size)

    def _more(self, asked: int) -> None:
        self._asked_bytes += asked
        self.peak_asked_bytes = max(self.peak_asked_bytes, self._asked_bytes)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = self.live_bytes, self._live.copy()

    def become(self, piece: int, kind: int) -> None:
        """Changes the kind of an allocated piece."""
        self._live[self._kind[piece]] -= self._sizes[piece]
        self._live[kind] += self._sizes[piece]
        self._kind[piece] = kind

    def forget_peak(self) -> None:
        """Resets the peaks to the present values, to begin measuring a step."""
        self.peak_asked_bytes = self._asked_bytes
        self.peak_bytes, self.at_peak = self.live_bytes, self._live.copy()

    def give(self, piece: int) -> None:
        """Frees a piece and merges it with free neighbours of its region."""
        self._asked_bytes -= self._asked[piece]
        self.live_bytes -= self._sizes[piece]
        self._live[self._kind[piece]] -= self._sizes[piece]
        self._used[piece] = False
        behind, before = self._behind[piece], self._before[piece]
        if behind >= 0 and not self._used[behind]:
            self._merge(piece, behind)
        if before >= 0 and not self._used[before]:
            self._merge(before, piece, free=False)
            piece = before
        insort(self._free, (self._sizes[piece], piece))

    def _piece(self, size: int, before: int, behind: int) -> int:
        self._sizes.append(size)
        self._before.append(before)
        self._behind.append(behind)
        self._used.append(False)
        self._kind.append(0)
        self._asked.append(0)
        return len(self._sizes) - 1

    def _merge(self, one: int, other: int, free: bool = True) -> None:
        """Merges piece `other` into the piece `one` before it; the list of free pieces loses `other`, or `one` if not
        `free`.
        """
        gone = other if free else one
        del self._free[bisect_left(self._free, (self._sizes[gone], gone))]
        self._sizes[one] += self._sizes[other]
        self._behind[one] = self._behind[other]
        if self._behind[other] >= 0:
            self._before[self._behind[other]] = one
        self._sizes[other] = 0
