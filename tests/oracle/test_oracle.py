"""A seeded sample of the oracle's matrix: each pair of case, dtype, optimizer, ranks and kind of share meets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.draws import one_of
from tests.oracle.compare import compare
from tests.oracle.matrix import Run, Spread, all_runs, pairwise
from tests.oracle.pool import Pool, flavours
from tests.zoo.catalogue import CASES, case_named

SEED = 20240517
# One run of so many decides with every change; the others, and the whole matrix, are long draws.
SHORT = 40

# With the Keras that is not TensorFlow's default, and with the oldest TensorFlow, what differs from the default: other
# optimizers, fused batch norm, recurrent layers as functions, v1 layers.
DIFFERENT = ("mlp", "mlp_metrics", "convnet", "gpt", "lstm", "embedding", "seeded_dropout", "tf1_layers")
CORE_SPREADS = (Spread(2, (5, 3)), Spread(3))


def sample() -> Sequence[object]:
    native, *others = flavours()
    runs = all_runs(CASES, native, gradients=(True, False), scopes=("", "replica", "+zero1"))
    cases = [case_named(name) for name in DIFFERENT]
    core = [
        run
        for index, case in enumerate(cases)
        for run in all_runs([case], native, (CORE_SPREADS[index % 2],))
        if run.dtype == "float64" or run.optimizer == "adam"
    ]
    # The largest case on four ranks takes as long as a dozen other runs.
    runs = pairwise([run for run in runs if run.name != "mobilenet" or run.spread.ranks < 3], SEED, beside=core)
    for flavour in others:
        runs += [run for run in all_runs(cases, flavour, (Spread(2, (5, 3)),)) if run.dtype == "float64"]
    marked = one_of(2, [pytest.param(run, id=str(run), marks=pytest.mark.core) for run in core])
    others_of_sample = [run for run in runs if run not in core]
    return marked + [
        pytest.param(run, id=str(run), marks=[pytest.mark.long] if index % SHORT else [])
        for index, run in enumerate(others_of_sample)
    ]


@pytest.mark.parametrize("run", sample())
def test_runs_as_one_device(pool: Pool, run: Run) -> None:
    outcome = compare(pool, run)
    assert not outcome.problems(run), (run, outcome)
