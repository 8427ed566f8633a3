"""Assigns the ranks of several hosts to positions of a mesh, so that ranks which communicate most are near each other.

Groups along axes that shard tensors (tensor, expert, context) are formed first, of ranks of one host where hosts have
enough; then groups along the axis ``data``. Pipeline stages, which send least, are what is left between the groups.
Groups are joined over the shortest links: pairs by a matching of least weight; larger groups within the connected parts
of the graph of hosts that remain when slower links are removed, in the order of a spanning tree. The stages follow each
other along the shortest path.

Decision: 0174.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise, permutations
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from whale.ir.mesh import DATA, STAGE, Axis
from whale.ir.topology import Topology

if TYPE_CHECKING:
    import networkx

_MOST_PERMUTED = 7  # up to so many stages, all orders are tried
_MOST_MATCHED = 64  # with more blocks, those of one host are paired first
_FARTHER = 4  # one exchange over a link of the next slower class costs as much as so many over one of this class

_Block = tuple[int, ...]  # ranks, in the order of their coordinates along the axes that are assigned already


def order_ranks(
    topology: Topology | None, axes: Sequence[Axis], between: Sequence[str] = (DATA, STAGE)
) -> tuple[int, ...]:
    """Returns the rank to put at each position of a mesh of several hosts; () if the ranks' own order is as good.

    Without an axis ``stage`` rank 0 is at position 0; with one, at the first position of its stage.

    Args:
      topology: hosts of the ranks and distances between them; None: all ranks are on one host.
      axes: the mesh, outermost axis first.
      between: names of the axes whose groups may span hosts, the last one preferably; groups along other axes stay
        within hosts if possible.
    """
    sizes = [axis.size for axis in axes]
    if topology is None or sum(size > 1 for size in sizes) < 2 or prod(sizes) != len(topology.hosts):
        return ()
    late = {name: number for number, name in enumerate(between, 1)}
    laid = sorted(axes, key=lambda axis: (late.get(axis.name, 0), -axes.index(axis)))
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
    """Prices communication between ranks, and groups ranks that are near each other.

    A block is a tuple of ranks that are assigned to coordinates already, in the order of these coordinates; at first
    each rank is a block. ``order_ranks`` joins blocks axis by axis, until one block is left: the whole mesh.
    """

    def __init__(self, topology: Topology) -> None:
        count = len(topology.names)
        of_hosts = np.zeros((count, count), np.int64)
        for (one, other), distance in topology.distances().items():
            of_hosts[one, other] = of_hosts[other, one] = _FARTHER**distance
        hosts = np.array(topology.hosts)
        self._costs = of_hosts[np.ix_(hosts, hosts)]

    def between(self, blocks: Sequence[_Block]) -> np.ndarray:
        """Returns the cost between each two blocks as a matrix: that of the slowest link between ranks at the same
        position in both.

        These ranks communicate with each other once the two blocks are in one group.
        """
        ranks = np.array(blocks)
        found = np.zeros((len(blocks), len(blocks)), np.int64)
        for column in ranks.T:
            np.maximum(found, self._costs[np.ix_(column, column)], out=found)
        return found

    def cost(self, order: _Block, axes: Sequence[Axis], laid: Sequence[Axis]) -> list[tuple[int, int]]:
        """Returns, for each axis of ``laid``, (the cost of the most expensive group of ranks along it, the sum over all
        its groups).

        All ranks of a group communicate with each other; along ``stage``, each with the next one.

        Args:
          order: the rank at each position of the mesh.
          axes: the mesh, outermost axis first.
          laid: the same axes, in the order in which their costs are compared.
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
        """Joins blocks into groups of ``size`` blocks that are near each other."""
        if size in (1, len(blocks)):
            return [list(blocks)] if size > 1 else [[block] for block in blocks]
        if size == 2:
            return self._match(blocks)
        if size % 2:
            return self._gather(blocks, size)
        pairs = [(*one, *other) for one, other in self._match(blocks)]
        return self.join(sorted(pairs, key=min), size // 2)

    def chain(self, blocks: Sequence[_Block]) -> list[_Block]:
        """Orders the blocks of pipeline stages so that each is near the next: the slowest link between neighbours is as
        fast as possible; among such orders, the sum of all link costs is least.

        Of many blocks, the order of a spanning tree is taken.
        """
        costs = self.between(blocks)
        if len(blocks) > _MOST_PERMUTED:
            return [blocks[i] for i in _walk_tree(costs)]

        def length(order: tuple[int, ...]) -> tuple[int, int]:
            steps = [int(costs[both]) for both in pairwise(order)]
            return max(steps, default=0), sum(steps)

        return [blocks[i] for i in min(permutations(range(len(blocks))), key=length)]

    def _match(self, blocks: Sequence[_Block]) -> list[list[_Block]]:
        """Pairs blocks so that the links within pairs cost least together."""
        import networkx  # takes half a second, and runs on one host never need it

        pairs, left = self._join_within_hosts(blocks, 2) if len(blocks) > _MOST_MATCHED else ([], list(blocks))
        costs = self.between(left) if left else np.zeros((0, 0))
        if len(left) > _MOST_MATCHED:
            walked = _walk_tree(costs)
            matched: Iterable[tuple[int, ...]] = zip(walked[::2], walked[1::2])
        else:
            matched = networkx.min_weight_matching(_make_graph(costs))
        return sorted([*pairs, *(sorted((left[i] for i in pair), key=min) for pair in matched)])

    def _gather(self, blocks: Sequence[_Block], size: int) -> list[list[_Block]]:
        """Forms groups of ``size`` blocks, over the shortest links that still connect enough blocks."""
        import networkx

        groups, left = self._join_within_hosts(blocks, size)
        for cost in np.unique(self._costs) if left else ():
            costs, rest = self.between(left), list[_Block]()
            graph = networkx.Graph(costs <= cost)
            for part in sorted(map(sorted, networkx.connected_components(graph))):
                walked = [left[part[i]] for i in _walk_tree(costs[np.ix_(part, part)])]
                whole = len(walked) // size * size
                groups += [sorted(walked[i : i + size], key=min) for i in range(0, whole, size)]
                rest += walked[whole:]
            left = rest
            if not left:
                break
        return sorted(groups)

    def _join_within_hosts(self, blocks: Sequence[_Block], size: int) -> tuple[list[list[_Block]], list[_Block]]:
        """Groups blocks on the same hosts; returns (groups of ``size`` blocks, the blocks that are left over)."""
        alike: dict[bytes, list[_Block]] = {}  # the key is equal for blocks on the same hosts
        for block in blocks:
            alike.setdefault(self._costs[list(block)].tobytes(), []).append(block)
        groups = [mine[i : i + size] for mine in alike.values() for i in range(0, len(mine) // size * size, size)]
        left = [block for mine in alike.values() for block in mine[len(mine) // size * size :]]
        return groups, left


def _make_graph(costs: np.ndarray) -> networkx.Graph:
    """Returns the complete graph whose edges have the costs in this matrix as weights."""
    import networkx

    graph = networkx.Graph()
    graph.add_nodes_from(range(len(costs)))
    graph.add_weighted_edges_from((i, j, int(costs[i, j])) for i, j in combinations(range(len(costs)), 2))
    return graph


def _walk_tree(costs: np.ndarray) -> list[int]:
    """Returns the nodes in depth-first order of a minimum spanning tree, starting from node 0."""
    import networkx

    return list(networkx.dfs_preorder_nodes(networkx.minimum_spanning_tree(_make_graph(costs)), 0))
