"""Chooses where partial sums are reduced, by a minimum cut of each region of linear ops.

Propagation keeps a sum partial through every linear op. Reducing only at the readers may then reduce one sum on every
branch; reducing at the producer loses where two sums are added. So each node of a region is put on one of two sides: it
computes on partial values (P side) or on replicated ones (B side). A tensor whose producer is on the P side and with a
reader on the B side is reduced once, at the cost of its all-reduce, or of its reduce-scatter where shards are wanted.
An elementwise op on sharded operands may also be put on the B side by gathering the operands; matrix products stay
sharded. The cheapest assignment is a minimum s-t cut. Among equal ones the cut nearest to the producers is taken, since
communication then starts earliest.

``Network`` finds the cut with code of its own: a step has many small networks, and importing a graph library would take
longer than cutting all of them.

Decision: 0101.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from whale.errors import REPORT_FAULT, PlanError
from whale.ir.layout import B, Partial, PerRank, Placement, Replicate, Shard, Strategy
from whale.ir.ops import HAS_BODIES
from whale.ir.program import Node, Program, Ref
from whale.ir.values import UNMOVABLE
from whale.passes.analysis.resharding_cost import compute_cost, count_matmul_flops, move_cost
from whale.passes.propagation.graph_layout import GraphLayout
from whale.sharding_rules.graph import is_recreatable

_SOURCE, _SINK = "source", "sink"
_NEVER = 1e30  # the cost of what cannot be done
UNBOUNDED = float("inf")
_LEAST = 1e-6  # relative to a capacity, or to 1: with less than this left it counts as used up


def reduce_partial_sums(program: Program, layout: GraphLayout, parts: int) -> GraphLayout:
    """Returns ``layout`` with the nodes of each linear region on their cheapest side: partial or replicated (see the
    module's text).

    Args:
      parts: size of the mesh axis.
    """
    flexible = {
        n.name
        for n in program.nodes
        if n.op not in HAS_BODIES and n.inputs and Partial in map(type, layout.strategies[n.name].outputs)
    }
    if not flexible:
        return layout
    network = _network(program, layout, parts, flexible)
    strategies, produced = dict(layout.strategies), dict(layout.produced)
    # The regions of many gradients are alike. Of each kind one is cut.
    cuts: dict[Hashable, list[int]] = {}
    for members in network.parts((_SOURCE, _SINK)):
        place = {member: i for i, member in enumerate(members)}
        kind = _describe_region(network, members, place)
        if kind not in cuts:
            cuts[kind] = [place[name] for name in _broadcast_side(network, members)]
        for i in cuts[kind]:
            name = str(members[i])
            node = program.by_name[name]
            strategies[name] = Strategy((B,) * len(node.inputs), (B,) * len(node.outputs), "reduced before")
            produced.update((ref, B) for ref in node.list_refs())
    return GraphLayout(strategies, produced, layout.preferred, layout.outputs, layout.unruled)


def _network(program: Program, layout: GraphLayout, parts: int, flexible: set[str]) -> Network:
    """Builds the flow network whose minimum cut says where to reduce.

    Edges go from a node to its partial results, with the cost of reducing the result as capacity, and from a result to
    its readers.

    Args:
      flexible: names of the nodes with partial results, which may be on either side.
    """
    network = Network()
    wanted_whole = {r for r, p in zip(program.outputs, layout.outputs) if type(p) is not Partial}
    forced: set[str] = set()
    contributions = _contributions(program, layout)
    forced |= contributions & flexible
    returned_partial = {r for r, p in zip(program.outputs, layout.outputs) if type(p) is Partial}
    for node in program.nodes:
        strategy = layout.strategies[node.name]
        for i, placement in enumerate(strategy.outputs) if Partial in map(type, strategy.outputs) else ():
            if type(placement) is not Partial:
                continue
            ref = Ref(node.name, i)
            origin = node.name if node.name in flexible else _SOURCE
            # Lists and optionals cannot be reduced: if a reader takes one partial, its producer must be partial too.
            fixed = program.find_type(ref).dtype in UNMOVABLE and not is_recreatable(program, ref)
            target = B if ref in wanted_whole else _target(program, layout, ref)
            price = _NEVER if fixed else move_cost(placement, target, max(1, program.find_type(ref).bytes), parts)
            network.add(origin, ref, price)
            fixed = fixed and origin != _SOURCE
            if fixed and ref in returned_partial:
                forced.add(origin)
            for reader, operand in program.consumers.get(ref, ()):
                wanted = layout.strategies[reader.name].inputs[operand]
                if type(wanted) is PerRank:
                    continue
                if type(wanted) is not Partial:
                    network.add(ref, _SINK)
                elif reader.name in flexible:
                    network.add(ref, reader.name)
                    if fixed:
                        network.add(reader.name, origin)
                elif fixed:
                    forced.add(origin)
            if ref in wanted_whole:
                network.add(ref, _SINK)
        if node.name in flexible:
            if _widens(program, node):
                forced.add(node.name)  # cast before the reduction, so that the sum is taken in the wider dtype
            gathering = _price_of_whole(program, layout, parts, node.name)
            if gathering is None:
                network.add(_SOURCE, node.name)
            elif gathering > 0:
                network.add(_SOURCE, node.name, gathering)
    for name in forced:
        network.add(_SOURCE, name, UNBOUNDED)
    return network


def _target(program: Program, layout: GraphLayout, ref: Ref) -> Placement:
    """Returns the placement to which a partial tensor is reduced: a split if all readers that do not take it partial
    want that split (reduce-scatter); else ``B`` (all-reduce).
    """
    wanted = {layout.strategies[reader.name].inputs[i] for reader, i in program.consumers.get(ref, ())}
    finished = [p for p in wanted if type(p) not in (Partial, PerRank)]
    return finished[0] if len(finished) == 1 and type(finished[0]) is Shard else B


def _widens(program: Program, node: Node) -> bool:
    return node.op == "Cast" and program.find_type(node.inputs[0]).dtype in ("bfloat16", "float16") and (
        node.outputs[0].dtype in ("float32", "float64")
    )  # fmt: skip


def _contributions(program: Program, layout: GraphLayout) -> set[str]:
    """Returns the nodes whose partial sums must not be reduced early: the sums are combined with, or become, per-rank
    values, which stand for each rank's own contribution.
    """
    stack: list[str] = []
    for node in program.nodes:
        strategy = layout.strategies[node.name]
        for ref, placement in zip(node.inputs, strategy.inputs) if PerRank in map(type, strategy.inputs) else ():
            if type(placement) is PerRank:
                stack += [ref.node] if type(layout.produced[ref]) is Partial else []
                stack += [node.name] if any(type(p) is Partial for p in strategy.outputs) else []
    found: set[str] = set()
    while stack:
        name = stack.pop()
        if name in found:
            continue
        found.add(name)
        node = program.by_name[name]
        for ref, placement in zip(node.inputs, layout.strategies[name].inputs):
            if type(placement) is Partial and type(layout.produced[ref]) is Partial:
                stack.append(ref.node)
    return found


def _price_of_whole(program: Program, layout: GraphLayout, parts: int, name: str) -> float | None:
    """Returns the cost of computing a node on replicated operands: of gathering the sharded ones, and of doing all work
    on each rank.

    Returns 0 if no operand is sharded, None if the node must not be replicated: matrix products, and operands of
    unknown size.
    """
    node = program.by_name[name]
    strategy = layout.strategies[name]
    price, gathered = 0.0, False
    for ref, placement in zip(node.inputs, strategy.inputs):
        source = layout.produced[ref]
        tensor = program.find_type(ref)
        if type(placement) is Shard:
            gathered = True
            if type(source) is not Replicate:
                if not tensor.bytes:
                    return None
                price += move_cost(source, B, tensor.bytes, parts)
        elif not tensor.bytes and type(placement) is not Replicate and 0 not in (tensor.shape or ()):
            return None
    if gathered:
        types = [program.find_type(r) for r in node.inputs]
        if count_matmul_flops(node, types):
            return None  # matrix products stay divided
        touched = sum(t.bytes for t in types) + sum(t.bytes for t in node.outputs)
        whole = Strategy((B,) * len(types), (B,) * len(node.outputs), "")
        price += compute_cost(whole, touched, 0) - compute_cost(strategy, touched, 0)
    return max(price, 1e-9) if gathered else 0.0


def _describe_region(network: Network, members: Sequence[Hashable], place: Mapping[Hashable, int]) -> Hashable:
    """Returns a key that is equal for regions of equal edges and capacities, whose nodes end on the same sides.

    Args:
      members: points of one connected component of the network.
      place: the position of each in ``members``.
    """
    made = network.after.get(_SOURCE, {})
    return tuple(
        [
            (type(one), made.get(one), *[(place.get(other), cost) for other, cost in network.after[one].items()])
            for one in members
        ]
    )


def _broadcast_side(network: Network, members: Sequence[Hashable]) -> list[str]:
    """Returns the names of a region's nodes that end on the B side, computed on replicated values.

    Args:
      members: points of one connected component of the network.
    """
    ops = [m for m in members if isinstance(m, str)]
    made = network.after.get(_SOURCE, {})
    if len(ops) == 1 and len(network.before[ops[0]]) == 1:
        # A single node without linear readers: compare gathering its operands with reducing its results.
        after = network.after[ops[0]]
        reduced = sum(price for ref, price in after.items() if _SINK in network.after[ref])
        return ops if made.get(ops[0], 0) < reduced else []
    if not ops:
        return []
    if not any(_SINK in network.after[m] for m in members) or not any(m in made for m in members):
        return [] if any(m in made for m in members) else ops
    reached = network.find_reachable(members, _SOURCE, _SINK)
    return [name for name in ops if name not in reached]


class Network:
    """Represents a flow network: points, and capacities from one to another.

    Attributes:
      after: point -> its successors, with capacities.
      before: point -> its predecessors (the values mean nothing; a dict keeps order).
    """

    def __init__(self) -> None:
        self.after: dict[Hashable, dict[Hashable, float]] = {}
        self.before: dict[Hashable, dict[Hashable, None]] = {}

    def add(self, point: Hashable, other: Hashable, capacity: float = UNBOUNDED) -> None:
        """Sets the capacity of the edge from ``point`` to ``other``; adds points that are new."""
        for one in (point, other):
            if one not in self.after:
                self.after[one], self.before[one] = {}, {}
        self.after[point][other] = capacity
        self.before[other][point] = None

    def parts(self, ends: Iterable[Hashable]) -> Iterator[list[Hashable]]:
        """Yields the connected components that remain when the points ``ends`` are removed."""
        seen = set(ends)
        for first in self.after:
            if first in seen:
                continue
            seen.add(first)
            found = [first]
            for point in found:  # ``found`` grows meanwhile
                for other in (*self.after[point], *self.before[point]):
                    if other not in seen:
                        seen.add(other)
                        found.append(other)
            yield found

    def find_reachable(self, members: Iterable[Hashable], source: Hashable, sink: Hashable) -> set[Hashable]:
        """Returns the source side of a minimum cut among ``members``; of several minimum cuts, the nearest to
        ``source``.

        Uses E. A. Dinic's algorithm: augments flow along shortest paths as long as there are any.

        Raises:
          PlanError: unbounded flow goes from source to sink.
        """
        inside = dict.fromkeys([*members, sink])
        full = {p: {o: c for o, c in self.after.get(p, {}).items() if o in inside} for p in inside}
        made = self.after.get(source, {})  # only its edges to ``members`` count
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
                            "no legal plan: a sum would have to be both replicated and partial",
                            op=next((str(p) for p in way[1:-1]), ""),
                            given="a partial sum that one reader must have reduced and another one must not",
                            expected="a place where the sum can be reduced for each of its readers",
                            action=REPORT_FAULT,
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
