"""Defines the topology of a run: which host each rank is on, and the links between the hosts, as measured or described.

Decision: 0174.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx

# Links whose rates differ by less are of one class: measurements of equal links differ by some of that.
CLASS = 1.5


@dataclass(frozen=True, slots=True)
class Link:
    """The latency of a link in seconds, and the bytes per second that it carries in each direction.

    Of a rank's exchanges with all others: those that the rank sends and receives.
    """

    exchange_s: float
    bytes_per_s: float

    def slow_down(self, times: float) -> Link:
        """Returns a link over which exchanges take so many times as long."""
        return Link(times * self.exchange_s, self.bytes_per_s / times)


@dataclass(frozen=True, slots=True)
class Topology:
    """The hosts of a run's ranks, and the links between them.

    Attributes:
      hosts: of each rank, the number of its host; hosts are numbered in the order of their first ranks.
      names: of the hosts.
      links: (one host, another one with a larger number) -> the link between them; {}: they are not known, and are
        taken to be equal.
      inside: the slowest link between ranks of one host; None: not known.
    """

    hosts: tuple[int, ...]
    names: tuple[str, ...]
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    inside: Link | None = None

    @property
    def ranks_of(self) -> list[list[int]]:
        """Returns the ranks of each host."""
        found: list[list[int]] = [[] for _ in self.names]
        for rank, host in enumerate(self.hosts):
            found[host].append(rank)
        return found

    def find_link(self, one: int, other: int) -> Link | None:
        """Returns the link between two hosts; None: it is not known."""
        return self.links.get((min(one, other), max(one, other)))

    def slow_down(self, times: float) -> Topology:
        """Returns the same hosts with links over which exchanges take so many times as long."""
        links = {pair: link.slow_down(times) for pair, link in self.links.items()}
        return replace(self, links=links, inside=self.inside and self.inside.slow_down(times))

    def graph(self) -> networkx.Graph:
        """Returns the hosts and their links as a ``networkx.Graph``.

        A node is the name of a host, with its ``ranks``. An edge has ``bytes_per_s`` and ``exchange_s`` where they are
        known, and its ``distance``: 1 for the fastest links between hosts, 2 for those that are slower by more than
        ``CLASS``, and so on.
        """
        import networkx  # takes half a second, and runs on one host never need it

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
        """Returns the distance of each pair of hosts (see ``graph``); links of unknown rates are as the slowest."""
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
    """Returns the topology of ranks by the names of their hosts; None: all are on one.

    Args:
      names: of each rank's host.
    """
    numbers: dict[str, int] = {}
    hosts = tuple(numbers.setdefault(name, len(numbers)) for name in names)
    return Topology(hosts, tuple(numbers), links or {}, inside) if len(numbers) > 1 else None
