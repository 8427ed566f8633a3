"""A seeded sample of the oracle's matrix: each pair of case, dtype, optimizer, ranks and kind of share meets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.oracle.compare import compare
from tests.oracle.matrix import Run, Spread, all_runs, pairwise
from tests.oracle.pool import Pool, flavours
from tests.zoo.catalogue import CASES, case_named

SEED = 20240517

# With the Keras that is not TensorFlow's default, and with the oldest TensorFlow, what differs from the default: other
# optimizers, fused batch norm, recurrent layers as functions, v1 layers.
DIFFERENT = ("mlp", "mlp_metrics", "convnet", "gpt", "lstm", "embedding", "seeded_dropout", "tf1_layers")
CORE_SPREADS = (Spread(2, (5, 3)), Spread(3))


def sample() -> Sequence[object]:
    native, *others = flavours()
    runs = pairwise(all_runs(CASES, native, gradients=(True, False), scopes=("", "replica", "+zero1")), SEED)
    cases = [case_named(name) for name in DIFFERENT]
    core = [
        run
        for index, case in enumerate(cases)
        for run in all_runs([case], native, (CORE_SPREADS[index % 2],))
        if run.dtype == "float64" or run.optimizer == "adam"
    ]
    for flavour in others:
        runs += [run for run in all_runs(cases, flavour, (Spread(2, (5, 3)),)) if run.dtype == "float64"]
    marked = [pytest.param(run, id=str(run), marks=pytest.mark.core) for run in core]
    return marked + [pytest.param(run, id=str(run)) for run in runs if run not in core]


# Under `wh.split`: dense, convolution (grouped, with batch norm), attention, embedding, recurrent layers, losses over
# the batch, norms of all gradients and of each weight, a session; over all ranks, and over groups of two.
SPLIT = (
    ("mlp_clipped", "clipped", "split", Spread(3)),
    ("mlp_lamb", "lamb", "split", Spread(2, (5, 3))),
    ("mlp_adafactor", "adafactor", "split", Spread(2)),
    ("mlp_metrics", "adam", "split:2", Spread(4)),
    ("mlp_dense_labels", "sgd", "split", Spread(4)),
    ("convnet", "adam", "split", Spread(3)),
    ("convnet", "sgd", "split:2", Spread(4)),
    ("grouped", "sgd", "split", Spread(2)),
    ("gpt", "adam", "split:2", Spread(4)),
    ("embedding", "sgd", "split", Spread(3)),
    ("embedding", "adam", "split:2", Spread(4, (1, 3, 1, 3))),
    ("lstm", "sgd", "split", Spread(2)),
    ("contrastive", "sgd", "split", Spread(2, (5, 3))),
    ("seeded_dropout", "sgd", "split:2", Spread(4)),
    ("tf1_mlp", "adam", "split", Spread(2)),
)

# In micro-batches: as many as fit, more than there are rows, uneven ones; clipped gradients, metrics of the whole
# batch, counts of a mask, loops, a session; with state that lies split, and under `wh.split`.
MICRO = (
    ("mlp_clipped", "clipped", "+micro:4", Spread(2, (5, 3))),
    ("mlp_metrics", "adam", "+micro:7", Spread(3)),
    ("weighted", "sgd", "+micro:3", Spread(2)),
    ("lstm", "sgd", "+micro:3", Spread(1)),
    ("tf1_mlp", "adam", "+micro:3", Spread(2, (5, 3))),
    ("gpt", "adam", "+zero1+micro:2", Spread(2)),
    ("embedding", "adam", "split:2+micro:2", Spread(4)),
)


def split_sample() -> Sequence[object]:
    native = flavours()[0]
    found = []
    for name, optimizer, scope, spread in (*SPLIT, *MICRO):
        run = Run(case_named(name), name, native, "float64", optimizer, spread, scope=scope)
        core = name in ("mlp_metrics", "embedding", "tf1_mlp")
        found.append(pytest.param(run, id=str(run), marks=[pytest.mark.core] if core else []))
    return found


@pytest.mark.parametrize("run", split_sample())
def test_split_scopes_and_micro_batches_run_as_one_device(pool: Pool, run: Run) -> None:
    outcome = compare(pool, run)
    assert not outcome.problems(run), (run, outcome)


@pytest.mark.parametrize("run", sample())
def test_runs_as_one_device(pool: Pool, run: Run) -> None:
    outcome = compare(pool, run)
    assert not outcome.problems(run), (run, outcome)
