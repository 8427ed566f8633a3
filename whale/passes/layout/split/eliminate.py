"""The choice of ``whale.passes.layout.split.choose`` by eliminating nodes.

All that depends on a node is put into one table over the node and its neighbours; the node's best option is written
down for every combination of theirs, and the table of these best costs takes the node's place (Bertele and Brioschi,
"Nonserial Dynamic Programming", 1972). The next node is always the one whose table is smallest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from whale.ir.layout import B
from whale.passes.layout.split.tensor_forms import TensorForms

_LARGEST_TABLE = 10_000_000  # entries, of eight bytes

# A cost that depends on some nodes, in ascending order: one dimension for each.
_Table = tuple[tuple[int, ...], np.ndarray]


def solve(costs: Sequence[Sequence[float]], tensors: Sequence[TensorForms]) -> list[int] | None:
    """The option of every node; None when a table would become too large."""
    tables: list[_Table] = [((i,), np.array(options, float)) for i, options in enumerate(costs)]
    for tensor in tensors:
        around = {n for n, _ in (*tensor.readers, (tensor.producer, ())) if n is not None}
        if math.prod(len(costs[n]) for n in around) > _LARGEST_TABLE:
            return None
        tables.append(_table_of(tensor, tuple(sorted(around)), costs))
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
        joined, total = _joined(list(of_node[node].values()), node)
        best.append((node, joined, total.argmin(-1).astype(np.int32)))
        for key, (nodes, _) in list(of_node[node].items()):
            for n in nodes:
                of_node[n].pop(key, None)
        for n in joined:
            of_node[n][number] = (joined, total.min(-1))
        number += 1
    chosen = [0] * len(costs)
    for node, joined, options in reversed(best):
        chosen[node] = int(options[tuple(chosen[n] for n in joined)])
    return chosen


def _joined(tables: Sequence[_Table], node: int) -> tuple[tuple[int, ...], np.ndarray]:
    """(the other nodes of these tables, the sum of the tables with ``node`` as the last dimension)."""
    others = tuple(sorted({n for nodes, _ in tables for n in nodes} - {node}))
    place = {n: i for i, n in enumerate((*others, node))}
    total = np.zeros((1,) * len(place))
    for nodes, values in tables:
        here = [place[n] for n in nodes]
        shape = [1] * len(place)
        for at, size in zip(here, values.shape):
            shape[at] = size
        total = total + np.transpose(values, np.argsort(here)).reshape(shape)
    return others, total


def _order(sizes: Sequence[int], groups: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Nodes in the order of elimination; None when a table on the way would be too large."""
    near: list[set[int]] = [set() for _ in sizes]
    for group in groups:
        for n in group:
            near[n].update(group)
    for n, others in enumerate(near):
        others.discard(n)

    def entries(n: int) -> int:
        return sizes[n] * math.prod(sizes[m] for m in near[n])

    heap = [(entries(n), n) for n in range(len(sizes))]
    heapq.heapify(heap)
    order: list[int] = []
    gone = [False] * len(sizes)
    while heap:
        count, n = heapq.heappop(heap)
        if gone[n] or count != entries(n):
            continue
        if count > _LARGEST_TABLE:
            return None
        gone[n] = True
        order.append(n)
        for m in near[n]:
            near[m] |= near[n]
            near[m] -= {m, n}
        for m in near[n]:
            heapq.heappush(heap, (entries(m), m))
    return order


def _table_of(tensor: TensorForms, nodes: tuple[int, ...], costs: Sequence[Sequence[float]]) -> _Table:
    """What a tensor costs, for every combination of options of the nodes around it."""
    place = {n: i for i, n in enumerate(nodes)}

    def along(node: int | None, flags: Sequence[bool]) -> np.ndarray:
        """Whether each combination has one of the flagged options of ``node``."""
        if node is None:
            return np.array(flags[0])
        shape = [1] * len(nodes)
        shape[place[node]] = len(flags)
        return np.array(flags).reshape(shape)

    forms = dict.fromkeys(q for _, wanted in tensor.readers for q in wanted)
    asked = {q: _any([along(r, [w == q for w in wanted]) for r, wanted in tensor.readers]) for q in forms}
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
    return nodes, values


def _any(flags: Sequence[np.ndarray]) -> np.ndarray:
    result = flags[0]
    for one in flags[1:]:
        result = result | one
    return result
