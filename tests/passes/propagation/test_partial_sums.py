"""Where partial sums are reduced: the minimum cut against every assignment there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.partition.compare import assert_equal_runs
from tests.programs import Builder, plan_of
from whale.ir.layout import P_SUM, B, Partial, Replicate, Shard, Strategy, divide_evenly, shard
from whale.ir.program import Program, Ref
from whale.passes.analysis.resharding_cost import compute_cost, move_cost
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.partial_sums import reduce_partial_sums
from whale.passes.resharding.reshards import explicit_reshards

ROWS = 8


class _Region:
    """A region of linear ops under sums over the batch, all nodes on partial values."""

    def __init__(self, parts: int):
        self.b, self.parts = Builder("region"), parts
        self.layout = GraphLayout()
        self.cut = shard(0, divide_evenly(ROWS, parts))

    def _record(self, ref: Ref, strategy: Strategy) -> Ref:
        for node in self.b.nodes:
            if node.name not in self.layout.strategies:
                constant = Strategy((B,) * len(node.inputs), (B,) * len(node.outputs), "test")
                chosen = strategy if node.name == ref.node else constant
                self.layout.strategies[node.name] = chosen
                self.layout.produced.update(zip(node.list_refs(), chosen.outputs))
        return ref

    def contraction(self, width: int, fixed: bool) -> Ref:
        """A sum over the rows of an input of its own; ``fixed``: a matrix product, which must stay divided."""
        name = f"in{len(self.b.inputs)}"
        rows = self._record(self.b.input(name, (ROWS, width)), Strategy((), (B,), "input"))
        if fixed:
            ones = self._record(self.b.const(np.ones((ROWS, 1))), Strategy((), (B,), "test"))
            product = self.b.matmul(ones, rows, a=True)
            return self._record(product, Strategy((self.cut, self.cut), (P_SUM,), "test"))
        # Through an op that is not free: rows that are whole on every rank would cost nothing to gather.
        spread = self._record(self.b.op("Tanh", rows), Strategy((self.cut,), (self.cut,), "test"))
        return self._record(self.b.reduce("Sum", spread, 0, keep=True), Strategy((self.cut, B), (P_SUM,), "test"))

    def linear(self, op: str, *operands: Ref) -> Ref:
        return self._record(self.b.op(op, *operands), Strategy((P_SUM,) * len(operands), (P_SUM,), "test"))

    def scaled(self, x: Ref) -> Ref:
        factor = self._record(self.b.const(3.0), Strategy((), (B,), "test"))
        return self._record(self.b.op("Mul", x, factor), Strategy((P_SUM, B), (P_SUM,), "test"))

    def narrowed(self, x: Ref) -> Ref:
        return self._record(self.b.reduce("Sum", x, 1, keep=True), Strategy((P_SUM, B), (P_SUM,), "test"))

    def bent(self, x: Ref) -> Ref:
        return self._record(self.b.op("Tanh", x), Strategy((B,), (B,), "test"))

    def finish(self, outputs: list[Ref]) -> tuple[Program, GraphLayout]:
        self.layout.outputs = (B,) * len(outputs)
        return self.b.build(outputs), self.layout


def _flexible(program: Program, layout: GraphLayout) -> list[str]:
    return [n.name for n in program.nodes if P_SUM in layout.strategies[n.name].outputs]


def _assigned(program: Program, layout: GraphLayout, whole: Iterable[str]) -> GraphLayout:
    """``layout`` with these nodes computed on whole operands."""
    strategies, produced = dict(layout.strategies), dict(layout.produced)
    for name in whole:
        node = program.by_name[name]
        strategies[name] = Strategy((B,) * len(node.inputs), (B,) * len(node.outputs), "whole")
        produced.update((r, B) for r in node.list_refs())
    return GraphLayout(strategies, produced, layout.preferred, layout.outputs, layout.unruled)


def _cost(program: Program, layout: GraphLayout, parts: int) -> float:
    """What the run pays: every reshard that the plan would list, and the work of sums computed on every rank."""
    moved = sum(
        move_cost(r.source, r.target, max(1, program.find_type(r.ref).bytes), parts)
        for r in explicit_reshards(program, {"": layout}, parts)
    )
    worked = 0.0
    for node in program.nodes:
        if node.op == "Sum" and type(layout.produced[node.inputs[0]]) is Shard:
            touched = sum(program.find_type(r).bytes for r in node.inputs) + node.outputs[0].bytes
            worked += compute_cost(layout.strategies[node.name], touched, 0)
    return moved + worked


def _legal(program: Program, whole: Iterable[str]) -> bool:
    return not any(program.by_name[name].op == "MatMul" for name in whole)


@st.composite
def regions(draw) -> tuple[Program, GraphLayout, int]:
    """Up to nine ops over sums of several widths; their results bent, added, narrowed, fetched."""
    parts = draw(st.integers(2, 4))
    region = _Region(parts)
    width = draw(st.sampled_from([2, 500, 5000]))
    pool = [region.contraction(width, draw(st.booleans())) for _ in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["add", "add", "many", "negate", "scale", "narrow", "bend"]))
        x, y = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        partial = [r for r in pool if region.layout.produced[r] == P_SUM]
        if kind == "bend":
            region.bent(x)
        elif region.layout.produced[x] != P_SUM or region.layout.produced[y] != P_SUM:
            continue
        elif kind == "add":
            pool.append(region.linear(draw(st.sampled_from(["AddV2", "Sub"])), x, y))
        elif kind == "many":
            alike = [r for r in partial if region.b.types[r] == region.b.types[x]]
            pool.append(region.linear("AddN", *alike[:4]))
        else:
            pool.append({"negate": lambda v: region.linear("Neg", v), "scale": region.scaled,
                         "narrow": region.narrowed}[kind](x))  # fmt: skip
    outputs = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique=True))
    program, layout = region.finish(outputs)
    return program, layout, parts


@settings(max_examples=150)
@given(regions())
def test_no_assignment_is_cheaper(example: tuple[Program, GraphLayout, int]) -> None:
    program, layout, parts = example
    names = _flexible(program, layout)
    assume(len(names) <= 9)
    choices = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))
    best = min(_cost(program, _assigned(program, layout, w), parts) for w in choices if _legal(program, w))
    placed = reduce_partial_sums(program, layout, parts)
    assert _cost(program, placed, parts) == pytest.approx(best, rel=1e-9)
    for name in names:
        assert {type(p) for p in placed.strategies[name].outputs} <= {Replicate, Partial}


@settings(max_examples=40)
@given(regions())
def test_the_result_computes_the_same(example: tuple[Program, GraphLayout, int]) -> None:
    program, layout, parts = example
    assert_equal_runs(program, plan_of(program, {"": reduce_partial_sums(program, layout, parts)}, parts, {}))


def _placed(region: _Region, *outputs: Ref) -> tuple[GraphLayout, list[str]]:
    program, layout = region.finish(list(outputs))
    placed = reduce_partial_sums(program, layout, region.parts)
    return placed, [str(r.ref) for r in explicit_reshards(program, {"": placed}, region.parts) if r.bytes]


def test_one_sum_on_many_branches_is_reduced_once() -> None:
    region = _Region(2)
    total = region.contraction(500, fixed=True)
    branches = [region.bent(region.scaled(total)) for _ in range(4)]
    placed, moved = _placed(region, *branches)
    assert moved == [str(total)]
    assert placed.strategies[branches[0].node].inputs == (B,)


def test_sums_that_are_added_are_reduced_together() -> None:
    region = _Region(2)
    added = region.linear("AddN", *(region.contraction(500, fixed=True) for _ in range(4)))
    _, moved = _placed(region, region.bent(added))
    assert moved == [str(added)]


def test_what_gets_smaller_is_reduced_behind() -> None:
    region = _Region(2)
    small = region.narrowed(region.contraction(5000, fixed=True))
    _, moved = _placed(region, region.bent(small))
    assert moved == [str(small)]


def test_equal_costs_are_cut_at_the_producers() -> None:
    region = _Region(2)
    total = region.contraction(500, fixed=True)
    chain = region.linear("Neg", region.linear("Neg", total))
    _, moved = _placed(region, region.bent(chain))
    assert moved == [str(total)]


def test_products_stay_divided() -> None:
    region = _Region(2)
    product = region.contraction(2, fixed=True)
    placed, _ = _placed(region, region.bent(product))
    assert placed.strategies[product.node].outputs == (P_SUM,)


def test_a_program_without_partial_sums_is_left_alone() -> None:
    b = Builder()
    program = b.build([b.op("Relu", b.input("x", (4,)))])
    layout = GraphLayout({n.name: Strategy((B,) * len(n.inputs), (B,), "") for n in program.nodes},
                         {r: B for n in program.nodes for r in n.list_refs()}, outputs=(B,))  # fmt: skip
    assert reduce_partial_sums(program, layout, 2) is layout
