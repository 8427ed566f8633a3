"""Solves the choice of ``whale.passes.autoshard.choose`` by eliminating nodes.

All that depends on a node is put into one table over the node and its neighbours; the node's best option is written
down for every combination of theirs, and the table of these best costs takes the node's place (Bertele and Brioschi,
"Nonserial Dynamic Programming", 1972).

Decision: 0071.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from whale.ir.layout import B
from whale.passes.autoshard.tensor_forms import TensorForms

_LARGEST_TABLE = 30_000_000  # entries, of eight bytes
_FEW_ENTRIES = 10_000  # entries of all tables, per node: the search for a better order takes as long as these
_MOST_TRIES = 12
_SWAY = 0.3
_OF_A_BIT = 1 << 20  # parts in which logarithms of sizes are counted

# A cost that depends on some nodes, in ascending order: one dimension for each.
_Table = tuple[tuple[int, ...], np.ndarray]


def solve(costs: Sequence[Sequence[float]], tensors: Sequence[TensorForms]) -> list[int] | None:
    """Returns the option of every node; None when a table would become too large."""
    tables: list[_Table] = [((i,), np.array(options, float)) for i, options in enumerate(costs)]
    known: dict[Hashable, np.ndarray] = {}  # the tables of repeated blocks are the same
    for tensor in tensors:
        around = {n for n in tensor.nodes if n is not None}
        if math.prod(len(costs[n]) for n in around) > _LARGEST_TABLE:
            return None
        nodes = tuple(sorted(around))
        alike = tensor.shape, tuple([None if n is None else nodes.index(n) for n in tensor.nodes])
        if (values := known.get(alike)) is None:
            values = known[alike] = _table_of(tensor, nodes, costs)
        tables.append((nodes, values))
    order = _order([len(options) for options in costs], [nodes for nodes, _ in tables])
    if order is None:
        return None
    of_node: list[dict[int, _Table]] = [{} for _ in costs]
    for number, (nodes, values) in enumerate(tables):
        for n in nodes:
            of_node[n][number] = (nodes, values)
    number = len(tables)
    best: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    for node in order:
        joined, total = _join(list(of_node[node].values()), node)
        least, options = _least(total)
        best.append((node, joined, options))
        for key, (nodes, _) in list(of_node[node].items()):
            for n in nodes:
                of_node[n].pop(key, None)
        for n in joined:
            of_node[n][number] = (joined, least)
        number += 1
    chosen = [0] * len(costs)
    for node, joined, options in reversed(best):
        chosen[node] = int(options[tuple(chosen[n] for n in joined)])
    return chosen


def _join(tables: Sequence[_Table], node: int) -> tuple[tuple[int, ...], np.ndarray]:
    """Sums the cost tables that contain ``node``; returns (the other nodes, the sum with ``node`` as its first
    dimension).
    """
    others = tuple(sorted({n for nodes, _ in tables for n in nodes} - {node}))
    place = {n: i for i, n in enumerate((node, *others))}
    total = np.zeros((1,) * len(place))
    for nodes, values in tables:
        here = [place[n] for n in nodes]
        shape = [1] * len(place)
        for at, size in zip(here, values.shape):
            shape[at] = size
        total = total + np.transpose(values, np.argsort(here)).reshape(shape)
    return others, total


def _least(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the minimum along the first dimension, and its first index; NumPy's own reductions take far longer."""
    least = np.array(total[0])
    where = np.zeros(least.shape, np.uint16)
    for i in range(1, len(total)):
        where[total[i] < least] = i
        np.minimum(least, total[i], out=least)
    return least, where


def _order(sizes: Sequence[int], groups: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Returns the nodes in the order of elimination; None when a table on the way would be too large."""
    found = _Elimination(sizes, groups).run(math.inf)
    assert found is not None
    for seed in range(_MOST_TRIES):
        if found.entries <= (1 + seed) * _FEW_ENTRIES * len(sizes):
            break
        fits = found.largest <= _LARGEST_TABLE
        again = _Elimination(sizes, groups, by_fill=True, seed=seed).run(found.entries if fits else math.inf)
        if again is not None:
            found = min(found, again, key=lambda one: (one.largest > _LARGEST_TABLE, one.entries))
    return found.order if found.largest <= _LARGEST_TABLE else None


class _Found(NamedTuple):
    """An order of elimination, with the number of entries of all tables, and of the largest table."""

    order: list[int]
    entries: int
    largest: int


class _Elimination:
    """The graph of nodes that share a table, from which nodes are eliminated one after the other.

    Next comes the node whose table is smallest, or whose elimination adds the least weight of new edges (weighted
    min-fill: Kjaerulff, "Triangulation of graphs - algorithms giving small total state space", 1990), which takes
    longer to find and leaves far smaller tables where several chains run side by side, as the passes of a model do. The
    best of some orders, whose ties a seed breaks, is several times better than the first one.

    ``fill`` is updated edge by edge: the weight of the pairs of a node's neighbours that have no edge. It is of
    integers, so that the order in which these are added does not matter.
    """

    def __init__(self, sizes: Sequence[int], groups: Sequence[tuple[int, ...]], by_fill: bool = False, seed: int = 0):
        self.sizes, self.by_fill = sizes, by_fill
        generator = random.Random(seed)
        self.sway = [generator.random() if seed else 0.0 for _ in sizes]
        self.near: list[set[int]] = [set() for _ in sizes]
        for group in groups:
            several = [n for n in group if sizes[n] > 1]  # a node of one option is no dimension of a table
            for n in several:
                self.near[n].update(several)
        for n, others in enumerate(self.near):
            others.discard(n)
        self.bits = [round(math.log2(size) * _OF_A_BIT) for size in sizes]
        self.fill = [self._count_missing(around) for around in self.near] if by_fill else []

    def run(self, most: float) -> _Found | None:
        """Eliminates all nodes and returns the order; None if its tables have ``most`` entries or more."""
        keys = [self._key(n) for n in range(len(self.sizes))]
        heap = [(key, n) for n, key in enumerate(keys)]
        heapq.heapify(heap)
        order: list[int] = []
        gone = [False] * len(self.sizes)
        entries = largest = 0
        while heap:
            key, n = heapq.heappop(heap)
            if gone[n] or key != keys[n]:
                continue
            gone[n] = True
            order.append(n)
            own = self._entries(n)
            entries += own
            if entries >= most:
                return None
            largest = max(largest, own)
            for m in self._take_out(n):
                if (now := self._key(m)) != keys[m]:
                    keys[m] = now
                    heapq.heappush(heap, (now, m))
        return _Found(order, entries, largest)

    def _take_out(self, n: int) -> set[int]:
        """Eliminates a node: connects its neighbours with each other. Returns the nodes whose priority may have
        changed.
        """
        near, around = self.near, self.near[n]
        changed = set(around)
        for m in around:
            near[m].discard(n)
            if self.by_fill:
                self.fill[m] -= self.bits[n] * self._weight(near[m] - around)
        for m in around:
            for other in around - near[m]:
                if other != m:
                    changed |= self._link(m, other)
        return changed

    def _link(self, a: int, b: int) -> set[int]:
        """Adds an edge between two nodes. Returns their common neighbours, whose fill decreases by this edge."""
        one, other = self.near[a], self.near[b]
        both: set[int] = set()
        if self.by_fill:
            fill, bits, both = self.fill, self.bits, one & other
            fill[a] += bits[b] * self._weight(one - other)
            fill[b] += bits[a] * self._weight(other - one)
            for c in both:
                fill[c] -= bits[a] * bits[b]
        one.add(b)
        other.add(a)
        return both

    def _count_missing(self, around: set[int]) -> int:
        """Returns the weight of the pairs of these nodes that have no edge."""
        return sum(self.bits[m] * self._weight(around - self.near[m] - {m}) for m in around) // 2

    def _weight(self, nodes: set[int]) -> int:
        return sum(map(self.bits.__getitem__, nodes))

    def _entries(self, n: int) -> int:
        return self.sizes[n] * math.prod(map(self.sizes.__getitem__, self.near[n]))

    def _key(self, n: int) -> float:
        if not self.by_fill:
            return self._entries(n)
        return 2 * self.fill[n] / _OF_A_BIT**2 * (1 + _SWAY * self.sway[n]) + 0.01 * self.sway[n]


def _table_of(tensor: TensorForms, nodes: tuple[int, ...], costs: Sequence[Sequence[float]]) -> np.ndarray:
    """Returns the cost of a tensor for every combination of options of the nodes around it."""
    place = {n: i for i, n in enumerate(nodes)}

    def along(node: int | None, flags: Sequence[bool]) -> np.ndarray:
        """Tells whether each combination has one of the flagged options of ``node``."""
        if node is None:
            return np.array(flags[0])
        shape = [1] * len(nodes)
        shape[place[node]] = len(flags)
        return np.array(flags).reshape(shape)

    forms = dict.fromkeys(q for _, wanted in tensor.readers for q in wanted)
    asked = {q: _any_of([along(r, [w == q for w in wanted]) for r, wanted in tensor.readers]) for q in forms}
    values = np.zeros([len(costs[n]) for n in nodes])
    for p in dict.fromkeys(tensor.forms):
        made = along(tensor.producer, [form == p for form in tensor.forms])
        apart = np.zeros((1,) * len(nodes))
        for q in forms:
            price = tensor.price(p, q)
            if price:
                apart = apart + np.where(asked[q], price, 0.0)
        whole = tensor.price(p, B) if B in forms else math.inf
        if 0 < whole < math.inf:
            apart = np.where(np.isinf(apart), apart, np.minimum(apart, whole))
        values = values + np.where(made, apart, 0.0)
    return values


def _any_of(flags: Sequence[np.ndarray]) -> np.ndarray:
    result = flags[0]
    for one in flags[1:]:
        result = result | one
    return result
