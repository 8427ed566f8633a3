"""Solves the choice of whale.passes.autoshard.choose as an integer program, for graphs too wide to be eliminated.

With ``x`` for "node takes option", ``f`` for "produced as p, wanted by this reader as q" (tied to both by flow
conservation) and ``e`` for "changed from p to q":

    minimise    sum cost x + sum price e
    such that   sum_option x = 1
                sum_q f[p,q] = produced as p,  sum_p f[p,q] = wanted as q,  e[p,q] + e[p,B] >= f[p,q]

Only ``x`` is integral. Solved by HiGHS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from whale.errors import PlanError
from whale.ir.layout import B, Placement
from whale.passes.autoshard.tensor_forms import TensorForms

_TIME_LIMIT_S = 120.0
_GAP = 1e-4  # the gap to the optimum that is proved, relative to it


@dataclass
class _Columns:
    """The columns and rows of the linear program while they are collected."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    row_start: list[int] = field(default_factory=list)
    row_index: list[int] = field(default_factory=list)
    row_value: list[float] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)

    def column(self, cost: float, upper: float = 1.0) -> int:
        """Adds a column, which is between 0 and ``upper``, and returns its number."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        """Adds a row: ``lower`` <= the sum over (column, factor) of ``terms`` <= ``upper``."""
        self.row_start.append(len(self.row_index))
        self.row_index += [i for i, _ in terms]
        self.row_value += [v for _, v in terms]
        self.row_lower.append(lower)
        self.row_upper.append(upper)


def solve(costs: Sequence[Sequence[float]], tensors: Sequence[TensorForms]) -> list[int]:
    """Returns the option of every node; see ``whale.passes.autoshard.choose.choose``.

    Raises:
      PlanError: no assignment is possible, or none was found in the time.
    """
    table = _Columns()
    taken = [[table.column(c) for c in options] for options in costs]
    count = len(table.cost)
    for options in taken:
        table.row([(x, 1.0) for x in options], 1.0, 1.0)
    for tensor in tensors:
        _add_tensor(table, taken, tensor)
    solution = _solve(table, count)
    return [max(range(len(options)), key=lambda i: solution[options[i]]) for options in taken]


def _distinct(forms: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(dict.fromkeys(forms))


def _add_tensor(table: _Columns, taken: Sequence[Sequence[int]], tensor: TensorForms) -> None:
    """Adds the columns and rows of one tensor."""
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
    """Adds flow variables for each pair (produced as p, wanted as q); returns the columns whose sum says whether it is
    chosen.
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


def _solve(table: _Columns, integral: int) -> np.ndarray:
    """Solves the program and returns the values of the columns; the first ``integral`` are 0 or 1."""
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
        """HiGHS without output: from 1.16 on its constructor enables callbacks, and prints its version when it does."""

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
            given=f"{highs.modelStatusToString(highs.getModelStatus())} after at most {_TIME_LIMIT_S:g} s",
            expected="a layout for every operation",
            action="put fewer operations under the scope, or name the dimension (`dim=`)",
        )
    return np.array(highs.getSolution().col_value)
