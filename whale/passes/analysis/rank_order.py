"""Lays the ranks of several hosts on a mesh: which rank is at which position of the grid of axes.

Ranks that exchange most are near each other. Groups along axes that divide tensors (tensor, expert, context) are formed
first, of ranks of one host where hosts have enough; then groups along the axis ``data``. Stages of a pipeline, which
send least, are what is left between the groups. Each time groups are joined over the shortest links: pairs by a
matching of least weight, larger groups within the parts that are left of the graph of hosts when all slower links are
cut, in the order of a spanning tree. The stages follow each other along the shortest path.

Decision: 0177.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise, permutations
from math import prod

import numpy as np

from whale.ir.mesh import DATA, STAGE, Axis
from whale.ir.topology import Topology

_MOST_PERMUTED = 7  # stages whose orders are all looked at
_MOST_MATCHED = 64  # blocks; of more, those of one host are paired before
_FARTHER = 4  # one exchange over a link of the next class is as bad as so many over one of this class

_Block = tuple[int, ...]  # ranks in the order of their coordinates along the axes that are laid already


def order_ranks(topology: Topology | None, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Returns the rank at each position of a mesh; () where the ranks' own order is as good.

    Rank 0 is at the first position of its stage, and without stages of the mesh.

    Args:
      topology: None: all ranks are on one host.
      axes: from the outermost to the innermost one.
    """
    sizes = [axis.size for axis in axes]
    if topology is None or sum(size > 1 for size in sizes) < 2 or prod(sizes) != len(topology.hosts):
        return ()
    laid = sorted(axes[::-1], key=lambda axis: (axis.name == DATA) + 2 * (axis.name == STAGE))
    links = _Links(topology)
    blocks: list[_Block] = [(rank,) for rank in range(prod(sizes))]
    for axis in laid:
        groups = links.join(blocks, axis.size)
        if axis.name == STAGE:
            groups = [links.chain(group) for group in groups]
        blocks = sorted((tuple(rank for block in group for rank in block) for group in groups), key=min)
    outermost = laid[::-1]
    grid = np.array(blocks[0]).reshape([axis.size for axis in outermost])
    order = tuple(map(int, grid.transpose([outermost.index(axis) for axis in axes]).ravel()))
    own = tuple(range(len(order)))
    return order if links.cost(order, axes, laid) < links.cost(own, axes, laid) else ()


class _Links:
    """What exchanges between ranks cost, by the classes of the links that they take."""

    def __init__(self, topology: Topology) -> None:
        count = len(topology.names)
        of_hosts = np.zeros((count, count), np.int64)
        for (one, other), distance in topology.distances().items():
            of_hosts[one, other] = of_hosts[other, one] = _FARTHER**distance
        hosts = np.array(topology.hosts)
        self._costs = of_hosts[np.ix_(hosts, hosts)]

    def between(self, one: _Block, other: _Block) -> int:
        """Returns the cost of the slowest link between ranks of equal coordinates."""
        return int(self._costs[list(one), list(other)].max())

    def cost(self, order: _Block, axes: Sequence[Axis], laid: Sequence[Axis]) -> list[tuple[int, int]]:
        """Returns the most that a group along each axis costs, and what all cost together; of ``laid``, in its order.

        The ranks of a group all exchange with each other, those along ``stage`` with the next one.
        """
        grid, found = np.array(order).reshape([axis.size for axis in axes]), []
        for axis in laid:
            groups = np.moveaxis(grid, axes.index(axis), -1).reshape(-1, axis.size)
            if axis.name == STAGE:
                of_each = self._costs[groups[:, :-1], groups[:, 1:]]
            else:
                of_each = self._costs[groups[:, :, None], groups[:, None, :]].max((1, 2))
            found.append((int(of_each.max(initial=0)), int(of_each.sum())))
        return found

    def join(self, blocks: Sequence[_Block], size: int) -> list[list[_Block]]:
        """Joins blocks in groups of ``size`` that are near each other."""
        if size in (1, len(blocks)):
            return [list(blocks)] if size > 1 else [[block] for block in blocks]
        if size == 2:
            return self._match(blocks)
        if size % 2:
            return self._gather(blocks, size)
        pairs = [(*one, *other) for one, other in self._match(blocks)]
        return self.join(sorted(pairs, key=min), size // 2)

    def chain(self, blocks: Sequence[_Block]) -> list[_Block]:
        """Orders blocks so that the links from each to the next are short, the longest one above all."""
        if len(blocks) > _MOST_PERMUTED:
            return self._walk_tree(blocks)

        def length(order: tuple[_Block, ...]) -> tuple[int, int]:
            steps = [self.between(*both) for both in pairwise(order)]
            return max(steps, default=0), sum(steps)

        return list(min(permutations(blocks), key=length))

    def _match(self, blocks: Sequence[_Block]) -> list[list[_Block]]:
        """Pairs blocks so that the links within pairs cost least."""
        import networkx  # takes half a second, and runs on one host never need it

        pairs: list[list[_Block]] = []
        if len(blocks) > _MOST_MATCHED:
            alone: dict[bytes, _Block] = {}  # by what they are far from, which those of one host have in common
            for block in blocks:
                other = alone.pop(place := self._costs[list(block)].tobytes(), None)
                if other is None:
                    alone[place] = block
                else:
                    pairs.append([other, block])
            blocks = list(alone.values())
        graph = networkx.Graph()
        graph.add_weighted_edges_from((one, other, self.between(one, other)) for one, other in combinations(blocks, 2))
        return sorted([*pairs, *(sorted(pair, key=min) for pair in networkx.min_weight_matching(graph))])

    def _gather(self, blocks: Sequence[_Block], size: int) -> list[list[_Block]]:
        """Forms groups over the shortest links that still connect enough blocks."""
        import networkx

        left, groups = list(blocks), list[list[_Block]]()
        for cost in np.unique(self._costs):
            graph = networkx.Graph()
            graph.add_nodes_from(left)
            graph.add_edges_from(both for both in combinations(left, 2) if self.between(*both) <= cost)
            left = []
            for part in sorted(networkx.connected_components(graph), key=min):
                walked = self._walk_tree(sorted(part, key=min))
                whole = len(walked) // size * size
                groups += [sorted(walked[i : i + size], key=min) for i in range(0, whole, size)]
                left += walked[whole:]
        return sorted(groups)

    def _walk_tree(self, blocks: Sequence[_Block]) -> list[_Block]:
        """Orders blocks along a spanning tree of the shortest links, from the first one on."""
        import networkx

        graph = networkx.Graph()
        graph.add_nodes_from(blocks)
        graph.add_weighted_edges_from((one, other, self.between(one, other)) for one, other in combinations(blocks, 2))
        return list(networkx.dfs_preorder_nodes(networkx.minimum_spanning_tree(graph), blocks[0]))
