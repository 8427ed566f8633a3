"""Chooses one option for each node of split scopes so that work and resharding together cost least.

The producer's option decides a tensor's placement (one of its *forms*), and its readers' options the forms that they
want. A change from one form to another is paid once, however many readers want it. A form that can be sliced from the
replicated tensor costs nothing if the replicated tensor is made anyway. The cheapest choice is found exactly:

* By eliminating one node after the other, which is fast for the chains and blocks that models consist of. All costs
  that depend on a node are added into one table over the node and its neighbours; for every combination of the
  neighbours' options the node's best option is recorded, and the table of these best costs takes the node's place
  (Bertele and Brioschi, "Nonserial Dynamic Programming", 1972).
* By an integer program, solved by HiGHS, where a graph is too wide for elimination. With ``x`` for "node takes option",
  ``f`` for "produced as p, wanted by this reader as q" (tied to both by flow conservation) and ``e`` for "changed from
  p to q":

      minimise    sum cost x + sum price e
      such that   sum_option x = 1
                  sum_q f[p,q] = produced as p,  sum_p f[p,q] = wanted as q,  e[p,q] + e[p,B] >= f[p,q]

  Only ``x`` is integral.

Decisions: 0035, 0071.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from whale.errors import PlanError
from whale.ir.layout import B, Placement

_LARGEST_TABLE = 30_000_000  # entries, of eight bytes
_FEW_ENTRIES = 10_000  # table entries per node below which searching for a better order takes longer than it saves
_MOST_TRIES = 12  # orders of elimination that are tried
_SWAY = 0.3  # by how much a seed may raise a node's priority, relatively
_OF_A_BIT = 1 << 20  # logarithms of sizes are integers, in units of this part of a bit

# A cost table: the nodes that it depends on, ascending, and the costs, with one dimension for each node's options.
_Table = tuple[tuple[int, ...], np.ndarray]
_TIME_LIMIT_S = 120.0  # for HiGHS
_GAP = 1e-4  # HiGHS stops when the cost is proved to be this close to the optimum, relatively


def choose(costs: Sequence[Sequence[float]], tensors: Sequence[TensorForms]) -> list[int]:
    """Returns the number of the chosen option of every node, so that the total cost is least.

    Args:
      costs: for each node, the cost of each of its options by itself.
      tensors: the tensors between the nodes, with the prices of changing their placement.

    Raises:
      PlanError: no assignment is possible, or the solver found none in its time limit.
    """
    # Blocks that a model repeats have tensors with equal forms and prices: their prices are looked at once.
    matters: dict[Hashable, dict[tuple[Placement, ...], int]] = {}
    needed = []
    for tensor in tensors:
        if (found := matters.get(shape := tensor.shape)) is None:
            found = matters[shape] = _forms_that_matter(tensor)
        if (simple := _simplify(tensor, found)) is not None:
            needed.append(simple)
    chosen = eliminate_nodes(costs, needed)
    if chosen is None:
        chosen = solve_integer_program(costs, needed)
    if math.isinf(total_cost(costs, tensors, chosen)):
        raise PlanError(
            "no layouts were found for a split scope",
            given="operations whose candidate layouts exclude each other",
            expected="a layout for every operation",
            action="put fewer operations under the wh.split scope, or name the dimension to split: wh.split(dim=..)",
        )
    return chosen


def _simplify(tensor: TensorForms, matters: Mapping[tuple[Placement, ...], int]) -> TensorForms | None:
    """Removes what does not matter to the choice from a tensor, to make the problem smaller; returns None if no reader
    is left.

    Readers that never cost anything are dropped. The producer, or a reader, becomes fixed if the tensor has the same
    form under all its options.

    Args:
      matters: as returned by ``_forms_that_matter``.
    """
    readers: dict[tuple[int | None, tuple[Placement, ...]], None] = {}
    for reader, forms in tensor.readers:
        if count := matters[forms]:
            readers[(reader, forms) if count > 1 else (None, forms[:1])] = None
    if not readers:
        return None
    several = len(set(tensor.forms)) > 1
    producer, made = (tensor.producer, tensor.forms) if several else (None, tensor.forms[:1])
    return replace(tensor, forms=made, producer=producer, readers=tuple(readers))


def _forms_that_matter(tensor: TensorForms) -> dict[tuple[Placement, ...], int]:
    """Returns, for each reader of a tensor, in how many different forms the reader may want it; 0 if no change to any
    of these ever costs anything.

    The key of a reader is the tuple of forms that it wants, one for each of its options; readers with equal tuples
    share an entry.
    """
    sources = dict.fromkeys(tensor.forms)
    found = {}
    for _, forms in tensor.readers:
        wanted = dict.fromkeys(forms)
        found[forms] = len(wanted) if any(tensor.price(p, q) for p in sources for q in wanted) else 0
    return found


def total_cost(costs: Sequence[Sequence[float]], tensors: Sequence[TensorForms], chosen: Sequence[int]) -> float:
    """Returns the cost of an assignment, computed without tables or solver; infinite if the assignment is impossible.

    Args:
      costs, tensors: as of ``choose``.
      chosen: for each node, the number of its option.
    """
    total = sum(options[i] for options, i in zip(costs, chosen))
    for tensor in tensors:
        source = tensor.forms[0 if tensor.producer is None else chosen[tensor.producer]]
        wanted = {forms[0 if reader is None else chosen[reader]] for reader, forms in tensor.readers}
        apart = sum(tensor.price(source, q) for q in wanted)
        whole = tensor.price(source, B) if any(B in forms for _, forms in tensor.readers) else math.inf
        total += min(apart, whole) if 0 < whole < math.inf and apart < math.inf else apart
    return total


@dataclass(frozen=True, slots=True)
class TensorForms:
    """Represents one tensor in the choice: the placements that it may have (its forms), and the costs of changes
    between them.

    Attributes:
      forms: its placement for each option of the producer; a single one if the producer is fixed.
      producer: number of the node that produces it; None if the producer is fixed.
      readers: for each reader, the number of the node (None if fixed) and the form that it wants for each of its
        options.
      price: returns the cost of a change from one form to another; infinite if it is impossible.
      kind: key that is equal for tensors with the same prices, so that results can be shared.
    """

    forms: tuple[Placement, ...]
    producer: int | None
    readers: tuple[tuple[int | None, tuple[Placement, ...]], ...]
    price: Callable[[Placement, Placement], float]
    kind: Hashable

    @property
    def shape(self) -> Hashable:
        """Returns a key that is equal for corresponding tensors of repeated blocks: all but the nodes' numbers."""
        return self.kind, self.forms, tuple([forms for _, forms in self.readers])

    @property
    def nodes(self) -> tuple[int | None, ...]:
        """Returns the numbers of the producer and of the readers; None for a node whose strategy is fixed."""
        return self.producer, *[reader for reader, _ in self.readers]


def eliminate_nodes(costs: Sequence[Sequence[float]], tensors: Sequence[TensorForms]) -> list[int] | None:
    """Returns the option of every node, found by elimination; None if a table would become too large.

    Args:
      costs, tensors: as of ``choose``.
    """
    tables: list[_Table] = [((i,), np.array(options, float)) for i, options in enumerate(costs)]
    known: dict[Hashable, np.ndarray] = {}  # tables that repeated blocks share
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
    """Adds up the cost tables that contain ``node``.

    Returns:
      The other nodes of the tables, ascending, and the sum, whose first dimension is the options of ``node``.
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
    """Returns the minimum along the first dimension, and the index of its first occurrence; faster than NumPy's own
    reductions here.
    """
    least = np.array(total[0])
    where = np.zeros(least.shape, np.uint16)
    for i in range(1, len(total)):
        where[total[i] < least] = i
        np.minimum(least, total[i], out=least)
    return least, where


def _order(sizes: Sequence[int], groups: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Returns the nodes in the order of elimination; None if a table on the way would be too large.

    Args:
      sizes: number of options of each node.
      groups: the nodes of each table.
    """
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
    """Represents an order of elimination, which ``_Elimination.run`` has found, with the size of its tables.

    Attributes:
      order: the nodes, in the order in which they are eliminated.
      entries: number of entries of all tables together; the order with fewest is the best one.
      largest: number of entries of the largest table.
    """

    order: list[int]
    entries: int
    largest: int


class _Elimination:
    """Simulates elimination on the graph of nodes that share a table, to find an order with small tables.

    The next node is the one with the smallest table or, ``by_fill``, the one whose elimination adds the least weight of
    new edges (weighted min-fill: Kjaerulff, "Triangulation of graphs - algorithms giving small total state space",
    1990). The latter takes longer to find and leaves far smaller tables where several chains run side by side, as the
    forward and backward pass of a model do. The seed breaks ties at random: the best of some orders is several times
    better than the first one.

    Attributes:
      fill: for each node, the weight of the pairs of its neighbours that have no edge, updated edge by edge. It is an
        integer, so that the order of additions does not matter.
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
        """Eliminates all nodes and returns the order; None as soon as its tables have ``most`` entries or more."""
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
        """Adds an edge between the nodes ``a`` and ``b``. Returns their common neighbours, whose ``fill`` becomes
        smaller since this edge is no longer missing; none unless ``by_fill``.
        """
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
        """Returns the weight of the pairs of the nodes ``around`` that have no edge between them."""
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
    """Returns the resharding cost of a tensor for every combination of options of the nodes around it, with one
    dimension per node.
    """
    place = {n: i for i, n in enumerate(nodes)}

    def along(node: int | None, flags: Sequence[bool]) -> np.ndarray:
        """Returns a boolean array with one dimension per node, all of size 1 but that of ``node``; it broadcasts over
        the other nodes' options.

        Args:
          node: number of the node; None if it is fixed and so has no dimension.
          flags: for each option of the node, the value of its element.
        """
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


@dataclass
class _Columns:
    """Collects the columns (variables) and rows (constraints) of the linear program, the rows in sparse form."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    row_start: list[int] = field(default_factory=list)
    row_index: list[int] = field(default_factory=list)
    row_value: list[float] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)

    def column(self, cost: float, upper: float = 1.0) -> int:
        """Adds a variable between 0 and ``upper`` with the given cost, and returns its number."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        """Adds a constraint: ``lower`` <= the sum over (column, factor) of ``terms`` <= ``upper``."""
        self.row_start.append(len(self.row_index))
        self.row_index += [i for i, _ in terms]
        self.row_value += [v for _, v in terms]
        self.row_lower.append(lower)
        self.row_upper.append(upper)


def solve_integer_program(costs: Sequence[Sequence[float]], tensors: Sequence[TensorForms]) -> list[int]:
    """Returns the option of every node, found by the integer program (see the module's text).

    Args:
      costs, tensors: as of ``choose``.

    Raises:
      PlanError: no assignment is possible, or none was found in the time limit.
    """
    table = _Columns()
    taken = [[table.column(c) for c in options] for options in costs]
    count = len(table.cost)
    for options in taken:
        table.row([(x, 1.0) for x in options], 1.0, 1.0)
    for tensor in tensors:
        _add_tensor(table, taken, tensor)
    solution = _run_solver(table, count)
    return [max(range(len(options)), key=lambda i: solution[options[i]]) for options in taken]


def _distinct(forms: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(dict.fromkeys(forms))


def _add_tensor(table: _Columns, taken: Sequence[Sequence[int]], tensor: TensorForms) -> None:
    """Adds the variables and constraints of one tensor to the linear program.

    Args:
      taken: for each node, the variables of its options.
    """
    sources = _distinct(tensor.forms)
    flows: list[dict[tuple[Placement, Placement], list[tuple[int, float]]]] = []
    for reader, forms in tensor.readers:
        wanted = _distinct(forms)
        prices = {(p, q): tensor.price(p, q) for p in sources for q in wanted}
        if any(prices.values()):
            flows.append(_flow(table, taken, tensor, sources, reader, forms, prices))
    for p in sources:
        targets = dict.fromkeys(q for flow in flows for a, q in flow if a == p)
        paid = {q: tensor.price(p, q) for q in targets}
        changes = {q: table.column(price) for q, price in paid.items() if 0 < price < math.inf}
        for flow in flows:
            for (a, q), terms in flow.items():
                if a == p and q in changes:
                    whole = [(changes[B], 1.0)] if q != B and B in changes else []
                    table.row([(changes[q], 1.0), *whole, *((i, -v) for i, v in terms)], 0.0, math.inf)


def _flow(
    table: _Columns,
    taken: Sequence[Sequence[int]],
    tensor: TensorForms,
    sources: Sequence[Placement],
    reader: int | None,
    forms: Sequence[Placement],
    prices: dict[tuple[Placement, Placement], float],
) -> dict[tuple[Placement, Placement], list[tuple[int, float]]]:
    """Adds flow variables between a tensor's producer and one reader: one for each pair of a produced and a wanted
    form.

    Args:
      taken: for each node, the variables of its options.
      sources: the different forms in which the tensor may be produced.
      reader: number of the node that reads it; None if the reader is fixed.
      forms: the form that the reader wants for each of its options.
      prices: (produced form, wanted form) -> cost of the change; infinite if it is impossible.

    Returns:
      For each pair (produced as p, wanted as q), the terms whose sum is 1 if the pair is chosen.
    """
    one = table.column(0.0, 1.0)
    table.row([(one, 1.0)], 1.0, 1.0)
    produced = {
        p: [(one, 1.0)]
        if tensor.producer is None
        else [(x, 1.0) for x, form in zip(taken[tensor.producer], tensor.forms) if form == p]
        for p in sources
    }
    wanted = _distinct(forms)
    asked = {
        q: [(one, 1.0)] if reader is None else [(x, 1.0) for x, form in zip(taken[reader], forms) if form == q]
        for q in wanted
    }
    if len(sources) == 1 or len(wanted) == 1:
        found = {(p, q): asked[q] if len(sources) == 1 else produced[p] for p in sources for q in wanted}
    else:
        found = {pair: [(table.column(0.0), 1.0)] for pair in prices}
        for p in sources:
            terms = [t for q in wanted for t in found[p, q]]
            table.row([*terms, *((i, -v) for i, v in produced[p])], 0.0, 0.0)
        for q in wanted:
            terms = [t for p in sources for t in found[p, q]]
            table.row([*terms, *((i, -v) for i, v in asked[q])], 0.0, 0.0)
    for pair, price in prices.items():
        if price == math.inf:
            table.row(found[pair], 0.0, 0.0)
    return found


def _run_solver(table: _Columns, integral: int) -> np.ndarray:
    """Solves the linear program with HiGHS and returns the values of the columns; the first ``integral`` of them are 0
    or 1.

    Raises:
      PlanError: no assignment is possible, or none was found in the time limit.
    """
    import highspy  # takes a fifth of a second to load, and only wide split scopes need it

    count, rows = len(table.cost), len(table.row_lower)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count, rows
    lp.col_cost_ = np.array(table.cost)
    lp.col_lower_, lp.col_upper_ = np.zeros(count), np.array(table.upper)
    lp.row_lower_, lp.row_upper_ = np.array(table.row_lower), np.array(table.row_upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array([*table.row_start, len(table.row_index)], np.int32)
    lp.a_matrix_.index_ = np.array(table.row_index, np.int32)
    lp.a_matrix_.value_ = np.array(table.row_value)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * integral + [highspy.HighsVarType.kContinuous] * (
        count - integral
    )

    class Silent(highspy.Highs):
        """Represents HiGHS without output: from 1.16 on its constructor enables callbacks, and prints its version while
        doing so.
        """

        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    highs = Silent()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("mip_rel_gap", _GAP)
    highs.setOptionValue("time_limit", _TIME_LIMIT_S)
    highs.passModel(lp)
    highs.run()
    late = highs.getModelStatus() == highspy.HighsModelStatus.kTimeLimit
    found = late and highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if not found and highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise PlanError(
            "no layouts were found for a split scope",
            given=f"solver status {highs.modelStatusToString(highs.getModelStatus())!r} (limit {_TIME_LIMIT_S:g} s)",
            expected="a layout for every operation",
            action="put fewer operations under the wh.split scope, or name the dimension to split: wh.split(dim=..)",
        )
    return np.array(highs.getSolution().col_value)
