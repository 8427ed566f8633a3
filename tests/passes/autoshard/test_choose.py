"""The choice behind split scopes, against enumeration: by elimination, and as an integer program."""

from __future__ import annotations

import itertools
import random

import pytest

from whale.errors import PlanError
from whale.ir.layout import P_SUM, B, Partial, shard
from whale.passes.autoshard.choose import (
    TensorForms,
    _Elimination,
    choose,
    eliminate_nodes,
    solve_integer_program,
    total_cost,
)

FORMS = (B, P_SUM, shard(0, (2, 2)), shard(1, (2, 2)))


@pytest.mark.parametrize("seed", range(40))
def test_the_solver_finds_what_enumeration_finds(seed: int) -> None:
    draw = random.Random(seed)

    def node() -> int | None:
        return draw.choice([None, *range(len(costs))])

    costs = [[draw.random() * 3 for _ in range(draw.randint(1, 4))] for _ in range(draw.randint(2, 5))]

    def forms(number: int | None) -> tuple:
        return tuple(draw.choice(FORMS) for _ in (costs[number] if number is not None else [0]))

    tensors = []
    for _ in range(draw.randint(1, 5)):
        prices = {(p, q): 0.0 if p == q else draw.choice([0.0, 1.0, draw.random() * 4]) for p in FORMS for q in FORMS}
        producer = node()
        readers = tuple((r, forms(r)) for r in [node() for _ in range(draw.randint(1, 3))])
        tensors.append(
            TensorForms(forms(producer), producer, readers, lambda p, q, prices=prices: prices[p, q], len(tensors))
        )
    every = itertools.product(*[range(len(options)) for options in costs])
    best = min(total_cost(costs, tensors, chosen) for chosen in every)
    for solve in (choose, eliminate_nodes, solve_integer_program):
        assert total_cost(costs, tensors, solve(costs, tensors)) == pytest.approx(best, rel=1e-4)


def test_what_cannot_be_changed_is_not_chosen(capfd: pytest.CaptureFixture[str]) -> None:
    tensor = TensorForms((P_SUM, B), 0, ((1, (Partial("max"), B)),), lambda p, q: 0.0 if p == q else float("inf"), 0)
    only = TensorForms((P_SUM,), 0, ((1, (Partial("max"),)),), tensor.price, 0)
    for solve in (choose, eliminate_nodes, solve_integer_program):
        assert solve([[0.0, 5.0], [0.0, 5.0]], [tensor]) == [1, 1]
    for solve in (choose, solve_integer_program):
        with pytest.raises(PlanError, match="no layouts were found"):
            solve([[0.0], [0.0]], [only])
    assert capfd.readouterr() == ("", "")  # the solver would say who it is


@pytest.mark.parametrize("seed", range(10))
def test_what_a_nodes_going_would_link_is_kept_up_to_date(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 6) for _ in range(30)]
    groups = [tuple(draw.sample(range(30), draw.randint(2, 4))) for _ in range(40)]
    graph = _Elimination(sizes, groups, by_fill=True, seed=seed)
    left = set(range(30))
    while left:
        for n in left:
            apart = [(a, b) for a, b in itertools.combinations(graph.near[n], 2) if b not in graph.near[a]]
            assert graph.fill[n] == sum(graph.bits[a] * graph.bits[b] for a, b in apart)
        gone = draw.choice(sorted(left))
        left.discard(gone)
        before = list(graph.fill)
        changed = graph._take_out(gone)
        assert {n for n in left if graph.fill[n] != before[n]} <= changed


@pytest.mark.parametrize("seed", range(10))
def test_the_best_of_several_orders_finds_what_the_first_one_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    costs = [[draw.random() for _ in range(draw.randint(2, 3))] for _ in range(12)]
    tensors = []
    for _ in range(16):
        prices = {(p, q): 0.0 if p == q else draw.random() for p in FORMS for q in FORMS}
        made, read = draw.sample(range(12), 2)
        forms, wanted = (tuple(draw.choice(FORMS) for _ in costs[n]) for n in (made, read))
        tensors.append(
            TensorForms(forms, made, ((read, wanted),), lambda p, q, prices=prices: prices[p, q], len(tensors))
        )
    first = total_cost(costs, tensors, eliminate_nodes(costs, tensors))
    monkeypatch.setattr("whale.passes.autoshard.choose._FEW_ENTRIES", 0)
    assert total_cost(costs, tensors, eliminate_nodes(costs, tensors)) == pytest.approx(first)
