"""Defines the topology of a run: which host each rank is on, and the speed of links between hosts.

Links are measured, or described by the user.

Decision: 0174.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx

# Links whose bandwidths differ by less than this factor count as equal: so far apart are measurements of equal links.
CLASS = 1.5


@dataclass(frozen=True, slots=True)
class Link:
    """Describes a network link, or the links of one rank to all others taken together.

    Attributes:
      exchange_s: latency of one exchange, in seconds.
      bytes_per_s: bandwidth in each direction.
    """

    exchange_s: float
    bytes_per_s: float

    def slow_down(self, times: float) -> Link:
        """Returns a link over which every exchange takes ``times`` as long."""
        return Link(times * self.exchange_s, self.bytes_per_s / times)


@dataclass(frozen=True, slots=True)
class Topology:
    """Describes on which hosts the ranks of a run are, and how fast the links between the hosts are.

    ``make_topology`` creates it at the start of a run, from measurements or from the user's description. The planner
    and the order of ranks in the mesh use it, so that less is sent over slow links.

    Attributes:
      hosts: for each rank, the number of its host. Hosts are numbered from 0 in the order of their first ranks.
      names: name of each host, by its number.
      links: (i, j) with i < j -> the link between hosts number i and j. Empty if unknown; all links are then assumed
        equal.
      inside: the slowest link between two ranks of the same host; None if unknown.
    """

    hosts: tuple[int, ...]
    names: tuple[str, ...]
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    inside: Link | None = None

    @property
    def ranks_of(self) -> list[list[int]]:
        """Returns the ranks of each host, in the order of the hosts."""
        found: list[list[int]] = [[] for _ in self.names]
        for rank, host in enumerate(self.hosts):
            found[host].append(rank)
        return found

    def find_link(self, one: int, other: int) -> Link | None:
        """Returns the link between hosts number ``one`` and ``other``, in any order; None if it is unknown."""
        return self.links.get((min(one, other), max(one, other)))

    def slow_down(self, times: float) -> Topology:
        """Returns the same hosts with links over which every exchange takes ``times`` as long."""
        links = {pair: link.slow_down(times) for pair, link in self.links.items()}
        return replace(self, links=links, inside=self.inside and self.inside.slow_down(times))

    def graph(self) -> networkx.Graph:
        """Returns the hosts and their links as a ``networkx.Graph``.

        A node is the name of a host, with its ``ranks``. An edge has ``bytes_per_s`` and ``exchange_s`` if they are
        known, and a ``distance``: 1 for the fastest links between hosts, 2 for links slower than these by more than the
        factor ``CLASS``, and so on.
        """
        import networkx  # importing takes half a second, and runs on one host never need it

        graph = networkx.Graph()
        graph.add_nodes_from((name, {"ranks": ranks}) for name, ranks in zip(self.names, self.ranks_of))
        distances = self.distances()
        for (one, other), distance in distances.items():
            graph.add_edge(self.names[one], self.names[other], distance=distance)
            if (link := self.find_link(one, other)) is not None:
                graph.edges[self.names[one], self.names[other]].update(
                    bytes_per_s=link.bytes_per_s, exchange_s=link.exchange_s
                )
        return graph

    def distances(self) -> dict[tuple[int, int], int]:
        """Returns the distance of each pair of hosts (see ``graph``); unknown links get the distance of the slowest
        known ones.
        """
        count = len(self.names)
        pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
        rates = sorted((self.links[pair].bytes_per_s for pair in pairs if pair in self.links), reverse=True)
        starts = list[float]()  # the fastest rate of each class
        for rate in rates:
            if not starts or rate * CLASS < starts[-1]:
                starts.append(rate)
        slowest = max(1, len(starts))
        return {
            pair: sum(self.links[pair].bytes_per_s <= start for start in starts) if pair in self.links else slowest
            for pair in pairs
        }


def make_topology(
    names: Sequence[str], links: Mapping[tuple[int, int], Link] | None = None, inside: Link | None = None
) -> Topology | None:
    """Returns the topology of a run; None if all ranks are on one host.

    Args:
      names: for each rank, the name of its host.
      links: (i, j) with i < j -> the link between hosts number i and j, as in ``Topology``; None: unknown.
      inside: the slowest link between two ranks of the same host; None: unknown.
    """
    numbers: dict[str, int] = {}
    hosts = tuple(numbers.setdefault(name, len(numbers)) for name in names)
    return Topology(hosts, tuple(numbers), links or {}, inside) if len(numbers) > 1 else None
