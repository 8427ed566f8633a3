"""The scripts as cases: on how many ranks each runs, and what the library takes for a batch there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

UPDATES = 3
LIMIT = 1e-10
HALF = 5e-3  # half precision computes, or travels


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes:
      module, function: where it is.
      per_replica: ranks of one replica of the whole model; 0: all of them.
      turns: batches of each replica for one update.
      across_runs: each run of a session takes one of them; else one run takes all.
      ranks: numbers of ranks on which it runs.
      limit: how far values may be from one device's, by the largest of their kind.
    """

    module: str
    function: str
    per_replica: int = 1
    turns: int = 1
    across_runs: bool = False
    ranks: tuple[int, ...] = (2,)
    limit: float = LIMIT

    def replicas(self, ranks: int) -> int:
        return ranks // (self.per_replica or ranks)


CASES = (
    Case("tutorials", "quick_start"),
    Case("tutorials", "data_parallelism", ranks=(2, 4)),
    Case("tutorials", "pipeline", per_replica=2, turns=4),
    Case("tutorials", "mixture_of_experts", per_replica=0),
    Case("tutorials", "api_data_parallelism"),
    Case("tutorials", "api_pipeline", per_replica=2, turns=4, ranks=(2, 4)),
    Case("tutorials", "api_classification", per_replica=0),
    Case("tutorials", "api_experts", ranks=(2, 4)),
    Case("library", "accumulation", turns=2, across_runs=True),
    Case("library", "collections"),
    Case("library", "sum_of_gradients"),
    Case("library", "clip"),
    Case("library", "split_layer", per_replica=0),
    Case("library", "saver"),
    Case("library", "custom_optimizer", turns=2, across_runs=True),
    Case("library", "summaries", per_replica=2),
    Case("library", "sliced_files"),
    *([Case("library", "estimator")] if find_spec("tensorflow_estimator") else []),  # up to TensorFlow 2.15
    Case("library", "twice"),
    Case("library", "specific_cluster", per_replica=2, turns=2),
    Case("library", "auto_pipeline", per_replica=2, turns=2, ranks=(2, 4)),
    *(
        Case("settings", name, ranks=(2, 4))
        for name in ("zero_v0", "zero_v1", "zero_v2", "offload", "recompute_auto", "recompute_collection")
    ),
    Case("settings", "without_effect"),
    Case("names", "names"),
    *(Case("settings", name, limit=HALF) for name in ("wire_of_halves", "amp_dynamic", "amp_fixed")),
)


def result_of(case: Case, epl: Any, ranks: int, rank: int | None) -> dict[str, list[float]]:
    """What the script gives; ``rank`` None: on one device, without the library."""
    import importlib

    import tensorflow.compat.v1 as tf

    from tests.epl.model import Rows

    script: Callable[..., Any] = getattr(importlib.import_module(f"tests.epl.{case.module}"), case.function)
    replicas = case.replicas(ranks)
    mine = None if rank is None else rank // (ranks // replicas)
    rows = Rows(replicas, case.turns, UPDATES, mine)
    runs = UPDATES * (case.turns if case.across_runs else 1)
    if rank is None and case.across_runs:
        runs = UPDATES
    with tf.Graph().as_default():
        found: dict[str, list[float]] = script(epl, rows, runs)
        return found
