"""The search of `auto_parallel` where ranks are on several hosts: groups within hosts, exchanges priced by links."""

from __future__ import annotations

import pytest

from cost_model.graph.machine import Rates
from tests.programs import mlp
from whale.ir.ops import COLLECTIVES
from whale.ir.topology import Link, Topology
from whale.passes.normalize.inline import inline
from whale.passes.pass_manager import normalise
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.environment import SearchEnvironment
from whale.planner.graph_search.pipelines import groups_of
from whale.planner.graph_search.predict import Plans, predict
from whale.planner.graph_search.strategies import choices

IN_TURN = Topology((0, 1, 0, 1), ("a", "b"), {(0, 1): Link(1e-3, 1e6)}, Link(1e-5, 1e10))
RATES = [Rates(1e10, 1e10, 1e-6, 1e-3, 1e6, "for the test")] * 4


@pytest.mark.parametrize("rows, within", [(64, "rows"), (65536, "tensors")])
def test_what_exchanges_most_is_within_hosts(rows: int, within: str) -> None:
    settings = PlanSettings(size=4, hosts=IN_TURN.hosts)
    program = normalise(mlp(rows=rows, features=512, hidden=1024, classes=512, dtype="float32"), settings)
    tensors, by_rows = [one for one in choices(program, 4, IN_TURN) if one.split and one.tensor == 2][:2]
    assert tensors.stages[0].bound_ranks == (0, 2, 1, 3) and by_rows.stages[0].bound_ranks == ()
    plans = Plans(program, settings, SearchEnvironment(RATES, None, [1e12] * 4, topology=IN_TURN))
    made = plans.make(tensors)
    assert made.plan.rank_order == (0, 2, 1, 3)
    (first,) = plans.lower(made, (0,))
    groups = {node.attrs["ranks"] for node in inline(first).nodes if node.op in COLLECTIVES}
    assert (0, 2) in groups and groups <= {(0, 2), (0, 1), (0, 2, 1, 3)}
    faster = min((tensors, by_rows), key=lambda one: predict(plans, one).seconds)
    assert faster is (tensors if within == "tensors" else by_rows)


def test_replicas_of_a_stage_are_on_one_host() -> None:
    assert groups_of([1.0] * 4, 2) == ((0, 2), (1, 3))
    assert groups_of([1.0] * 4, 2, (0, 0, 1, 1)) == ((0, 1), (2, 3))
    assert groups_of([1.0, 1.0, 0.5, 0.5], 2, (0, 1, 0, 1)) == ((0, 1), (2, 3))  # speed counts more
