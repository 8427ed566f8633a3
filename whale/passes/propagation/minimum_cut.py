"""Finds minimum cuts of flow networks, for ``whale.passes.propagation.partial_sums``.

The networks of a step are many and small, and importing a graph library would take longer than cutting all of them.

Decision: 0101.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from itertools import pairwise

from whale.errors import PlanError

UNBOUNDED = float("inf")
_LEAST = 1e-6  # relative to a capacity, or to 1: with less than this left it counts as used up


class Network:
    """A flow network: points, and the capacity from one to another.

    Attributes:
      after: point -> its successors, with capacities; before: point -> its predecessors.
    """

    def __init__(self) -> None:
        self.after: dict[Hashable, dict[Hashable, float]] = {}
        self.before: dict[Hashable, dict[Hashable, None]] = {}

    def add(self, point: Hashable, other: Hashable, capacity: float = UNBOUNDED) -> None:
        """Sets the capacity from ``point`` to ``other``."""
        for one in (point, other):
            self.after.setdefault(one, {})
            self.before.setdefault(one, {})
        self.after[point][other] = capacity
        self.before[other][point] = None

    def parts(self, ends: Iterable[Hashable]) -> Iterator[list[Hashable]]:
        """Yields the connected components of the points without ``ends``."""
        seen = set(ends)
        for first in self.after:
            if first in seen:
                continue
            seen.add(first)
            found = [first]
            for point in found:  # which grows
                for other in (*self.after[point], *self.before[point]):
                    if other not in seen:
                        seen.add(other)
                        found.append(other)
            yield found

    def find_reachable(self, members: Iterable[Hashable], source: Hashable, sink: Hashable) -> set[Hashable]:
        """Returns the source side of a minimum cut among ``members``; of several minimum cuts, the nearest to
        ``source``.

        By E. A. Dinic's algorithm: flow along shortest paths, as long as there are any.

        Raises:
          PlanError: unbounded flow goes from source to sink.
        """
        inside = dict.fromkeys([*members, sink])
        full = {p: {o: c for o, c in self.after.get(p, {}).items() if o in inside} for p in inside}
        made = self.after.get(source, {})  # there are edges into every part
        full[source] = {point: made[point] for point in inside if point in made}
        left = {point: dict(others) for point, others in full.items()}
        for point, others in full.items():
            for other in others:
                left[other].setdefault(point, 0.0)

        def open_(point: Hashable, other: Hashable) -> bool:
            capacity = full[point].get(other, 0.0)
            return capacity == UNBOUNDED or left[point][other] > _LEAST * max(1.0, capacity)

        while True:
            level = {source: 0}
            queue = deque([source])
            while queue:
                point = queue.popleft()
                for other in left[point]:
                    if other not in level and open_(point, other):
                        level[other] = level[point] + 1
                        queue.append(other)
            if sink not in level:
                return set(level)
            ahead = {point: iter(left[point]) for point in level}
            way = [source]
            while way:
                point = way[-1]
                if point == sink:
                    steps = list(pairwise(way))
                    flow = min(left[a][b] for a, b in steps)
                    if flow == UNBOUNDED:
                        raise PlanError(
                            "a sum has to be both replicated and partial",
                            op=next((str(p) for p in way[1:-1]), ""),
                            action="please report it, with the script",
                        )
                    for a, b in steps:
                        left[a][b] -= flow
                        left[b][a] += flow
                    way = [source]
                    continue
                onward = next((o for o in ahead[point] if level.get(o) == level[point] + 1 and open_(point, o)), None)
                if onward is not None:
                    way.append(onward)
                else:
                    way.pop()
                    level.pop(point)
