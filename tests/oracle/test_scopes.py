"""Programs under scopes, in micro-batches and with state that lies split, against one device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.draws import one_of
from tests.oracle.compare import compare
from tests.oracle.matrix import Run, Spread
from tests.oracle.pool import Pool, flavours
from tests.zoo.catalogue import case_named

# Under `wh.split`: dense, convolution (grouped, with batch norm), attention, embedding, experts, classes with a margin,
# recurrent layers, losses over the batch, norms of all gradients and of each weight, a session; over all ranks, and in
# groups of two. One of them with the sequence divided between products.
SPLIT = (
    ("mlp_clipped", "clipped", "split", Spread(3)),
    ("mlp_lamb", "lamb", "split", Spread(2, (5, 3))),
    ("mlp_adafactor", "adafactor", "split", Spread(2)),
    ("mlp_metrics", "adam", "split:2", Spread(4)),
    ("mlp_dense_labels", "sgd", "split", Spread(4)),
    ("convnet", "adam", "split", Spread(3)),
    ("convnet", "sgd", "split:2", Spread(4)),
    ("grouped", "sgd", "split", Spread(2)),
    ("gpt", "adam", "sequence:2", Spread(4)),
    ("embedding", "sgd", "split", Spread(3)),
    ("embedding", "adam", "split:2", Spread(4, (1, 3, 1, 3))),
    ("routed_experts", "adam", "split", Spread(2, (5, 3))),
    ("margin", "sgd", "split", Spread(3)),
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
    ("tf1_mlp", "adam", "+zero3+micro:3", Spread(2, (5, 3))),
    ("gpt", "adam", "+zero1+micro:2", Spread(2)),
    ("embedding", "adam", "split:2+micro:2", Spread(4)),
)


# Activations computed again: a session with uneven rows in micro-batches; batch norm.
RECOMPUTED = (
    ("tf1_mlp", "adam", "+recompute+micro:3", Spread(2, (5, 3))),
    ("convnet", "sgd", "+recompute", Spread(2)),
)

# Steps with `jit_compile=True`: gelu and attention, recurrent layers, dropout, batch norm; also with exchanges in their
# middle, in micro-batches, in stages, and with state that lies split.
BY_XLA = (
    ("gpt", "adam", "+xla", Spread(3, (1, 3, 4))),
    ("mlp_metrics", "adam", "split:2+xla", Spread(4)),
    ("lstm", "sgd", "+xla", Spread(2, (5, 3))),
    ("seeded_dropout", "sgd", "+xla", Spread(2)),
    ("convnet", "adam", "+zero3+xla", Spread(2, (0, 8))),
    ("gpt", "sgd", "+micro:2+xla", Spread(2)),
    ("mlp", "adam", "stage:2+xla", Spread(2)),
    ("mlp_ftrl", "ftrl", "stage:2", Spread(2)),  # an update's arithmetic goes to the other stage and comes back
    ("convnet", "sgd", "+recompute+xla", Spread(2)),
)

# State that lies split, of optimizers of Keras 2, which look up rows of it whose number only a step knows.
LOOKED_UP = (
    ("embedding", "adagrad", "+zero3", Spread(2, (5, 3))),
    ("embedding", "adam", "+zero1", Spread(3)),
)

# Scopes by the names of layers and variables: stages, splits, both; a session, a module's variables, Keras 2.
NAMED = (
    ("mlp", "adam", "named:stages", Spread(2)),
    ("mlp", "sgd", "named:columns", Spread(3)),
    ("mlp", "sgd", "named:both+micro:2", Spread(2)),
    ("gpt", "adam", "named:attention", Spread(2)),
    ("tf1_mlp", "sgd", "named:session", Spread(2)),
    ("module", "sgd", "named:modules", Spread(2, (5, 3))),
)


def scopes() -> Sequence[object]:
    native, legacy = flavours()[0], flavours()[-1]
    found = []
    for name, optimizer, scope, spread in (*SPLIT, *MICRO, *RECOMPUTED, *BY_XLA, *NAMED, *LOOKED_UP):
        flavour = legacy if (name, optimizer, scope, spread) in LOOKED_UP else native
        run = Run(case_named(name), name, flavour, "float64", optimizer, spread, scope=scope)
        core = name in ("mlp_metrics", "embedding", "tf1_mlp")
        if scope == "named:stages" and legacy != native:
            other = Run(run.case, name, legacy, "float64", optimizer, spread, scope=scope)
            found.append(pytest.param(other, id=str(other)))
        found.append(pytest.param(run, id=str(run), marks=[pytest.mark.core] if core else []))
    return found


@pytest.mark.parametrize("run", one_of(4, scopes()))
def test_runs_as_one_device(pool: Pool, run: Run) -> None:
    outcome = compare(pool, run)
    assert not outcome.problems(run), (run, outcome)


def test_updates_whose_arithmetic_goes_to_another_stage_and_back(pool: Pool) -> None:
    """Fuses no update that waits for its own result through another rank with what that rank waits for."""
    run = Run(case_named("mlp_ftrl"), "mlp_ftrl", flavours()[0], "float64", "ftrl", Spread(2), scope="stage:2")
    outcome = compare(pool, run)
    assert not outcome.problems(run), (run, outcome)
