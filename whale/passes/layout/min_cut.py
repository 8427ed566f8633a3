"""Minimum cuts of flow networks (Dinic, "Algorithm for solution of a problem of maximum flow", 1970)."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator

Node = Hashable
Capacities = dict[Node, dict[Node, float]]
SOURCE, SINK = object(), object()
_LEAST = 1e-6  # of an edge's capacity: what is left of less than that is rounding


class Network:
    """A directed graph whose edges have capacities, between ``SOURCE`` and ``SINK``."""

    def __init__(self) -> None:
        self._after: defaultdict[Node, dict[Node, float]] = defaultdict(dict)
        self._before: defaultdict[Node, dict[Node, float]] = defaultdict(dict)

    def add(self, tail: Node, head: Node, capacity: float = math.inf) -> None:
        """An edge; of two between the same nodes the later one counts."""
        self._after[tail][head] = self._before[head][tail] = capacity

    def after(self, node: Node) -> dict[Node, float]:
        """Where edges lead from ``node`` -> their capacities."""
        return self._after.get(node, {})

    def before(self, node: Node) -> dict[Node, float]:
        """Where edges to ``node`` begin -> their capacities."""
        return self._before.get(node, {})

    def regions(self) -> Iterator[set[Node]]:
        """Nodes between the ends that edges connect, in either direction."""
        seen: set[Node] = {SOURCE, SINK}
        for first in [*self._after, *self._before]:
            if first in seen:
                continue
            region, waiting = {first}, [first]
            while waiting:
                node = waiting.pop()
                for other in (*self.after(node), *self.before(node)):
                    if other not in region and other not in (SOURCE, SINK):
                        region.add(other)
                        waiting.append(other)
            seen |= region
            yield region

    def source_side(self, region: Iterable[Node]) -> set[Node]:
        """What stays with the source in the minimum cut of ``region`` that is nearest to it."""
        left, least = self._capacities(region)
        while True:
            distance: dict[Node, int] = {SOURCE: 0}
            waiting: deque[Node] = deque([SOURCE])
            while waiting:
                node = waiting.popleft()
                for head, capacity in left[node].items():
                    if head not in distance and capacity > least[node, head]:
                        distance[head] = distance[node] + 1
                        waiting.append(head)
            if SINK not in distance:
                return set(distance)
            _fill(left, least, distance)

    def _capacities(self, region: Iterable[Node]) -> tuple[Capacities, dict[tuple[Node, Node], float]]:
        """Of ``region``'s edges and of the opposite ones: what is left, and what is taken for nothing."""
        edges = [(tail, head, capacity) for tail in region for head, capacity in self.after(tail).items()]
        of_source = self.after(SOURCE)  # leads into every region there is
        edges += [(SOURCE, head, of_source[head]) for head in region if head in of_source]
        # Infinite ones can carry more than all others together.
        much = 3.0 * sum(capacity for _, _, capacity in edges if capacity < math.inf) or 1.0
        left: Capacities = {SOURCE: {}, SINK: {}}
        for tail, head, capacity in edges:
            left.setdefault(tail, {})[head] = min(capacity, much)
            left.setdefault(head, {}).setdefault(tail, 0.0)
        least = {(tail, head): _LEAST * max(1.0, c) for tail, heads in left.items() for head, c in heads.items()}
        return left, least


def _fill(
    left: dict[Node, dict[Node, float]], least: dict[tuple[Node, Node], float], distance: dict[Node, int]
) -> None:
    """Takes as much as goes along shortest ways from what is ``left``."""
    untried = {node: iter(list(left[node])) for node in distance}
    way: list[Node] = [SOURCE]
    while way:
        tail = way[-1]
        if tail is SINK:
            steps = list(itertools.pairwise(way))
            most = min(left[a][b] for a, b in steps)
            for a, b in steps:
                left[a][b] -= most
                left[b][a] += most
            full = next(i for i, (a, b) in enumerate(steps) if left[a][b] <= least[a, b])
            del way[full + 1 :]
            continue
        for head in untried[tail]:
            if distance.get(head) == distance[tail] + 1 and left[tail][head] > least[tail, head]:
                way.append(head)
                break
        else:
            way.pop()
