"""A few of the runs of ``python -m tests.pipelines``, the same each time."""

from __future__ import annotations

import random

import pytest

from tests.pipelines.compare import LIMIT, difference
from tests.pipelines.matrix import Run, all_runs

SAMPLE = random.Random(7).sample(list(all_runs()), 5)
# A weight that several stages read, in a graph whose gradients were built outside all scopes.
SAMPLE += [run for run in all_runs() if str(run) == "tied embeddings, 4 micro-batches, 1f1b, adam, tf1"]


@pytest.mark.parametrize("run", SAMPLE, ids=str)
def test_a_pipeline_is_as_one_device(run: Run) -> None:
    error, where = difference(run)
    assert error <= LIMIT, where
