"""The search takes the fastest candidate that fits, by what was predicted of each."""

from __future__ import annotations

import math

import pytest

from whale.planner.graph_search.predict import Candidate
from whale.planner.graph_search.search import LEAST_GAIN, Search
from whale.planner.graph_search.strategies import divide_over_all

NO_ROOM = 1.0  # bytes that a rank lacks


@pytest.mark.parametrize(
    ("ways", "best"),
    [
        ({"first": (1.0, 0)}, "first"),
        ({"first": (1.0, 0), "slow": (3.0, 0), "fast": (0.5, 0), "middle": (0.7, 0)}, "fast"),
        ({"first": (1.0, 0), "hardly faster": (1.0 - LEAST_GAIN / 2, 0)}, "first"),
        ({"first": (1.0, 0), "faster": (0.5, NO_ROOM), "fits": (0.8, 0)}, "fits"),
        ({"first": (1.0, NO_ROOM), "slow": (9.0, 0), "less so": (8.0, 0)}, "less so"),
        ({"first": (1.0, NO_ROOM)}, None),
    ],
)
def test_the_fastest_way_that_fits_is_taken_if_it_gains_something(
    ways: dict[str, tuple[float, float]], best: str | None
) -> None:
    search = Search(math.inf)
    search.found = [Candidate(divide_over_all(name, 2), seconds, lacking) for name, (seconds, lacking) in ways.items()]
    found = search.best()
    assert (found and found.strategy.name) == best
