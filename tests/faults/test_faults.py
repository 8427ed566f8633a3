"""A sample of the randomised faults; ``python -m tests.faults`` makes as many as one likes, in TensorFlow steps too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.draws import one_of
from tests.faults.__main__ import trials
from tests.faults.trial import DEVICES, Trial, run

# A rank is killed while devices carry out what the ranks exchange.
_OF_DEVICES = [Trial(work, "kill", 2, 1, 0.3) for work in DEVICES]


@pytest.mark.parametrize(
    "trial",
    [*trials(4, seed=5, steps=0.0), *one_of(6, _OF_DEVICES)],
    ids=lambda trial: f"{trial.work}-{trial.kind}-{trial.size}-{trial.transport}",
)
def test_a_fault_is_an_error_on_every_other_rank(trial: Trial, tmp_path: Path) -> None:
    """Whatever time it takes; ``python -m tests.faults`` holds it against its limits, on a quiet machine."""
    outcome = run(trial, tmp_path, limits_s=None)
    assert outcome.problems == () and outcome.busy == 0


def test_all_kinds_numbers_of_ranks_and_works_are_tried() -> None:
    found = trials(100, seed=1, steps=0.5)
    assert {(t.work, t.kind, t.transport) for t in found} == {
        (work, kind, transport)
        for work in ("steps", "exchange")
        for kind in ("kill", "freeze", "raise", "shape", "dtype", "op")
        for transport in ("memory", "mpi")
    }
    assert {t.size for t in found} == {2, 4}
    assert found == trials(100, seed=1, steps=0.5) != trials(100, seed=2, steps=0.5)
