"""A sample of the faults of ``python -m tests.attack --faults``, in runs without TensorFlow."""

from __future__ import annotations

import pytest

from tests.attack.faults import KINDS, PHASES, PLANS, Fault, Faults, Outcome, faults, table


@pytest.mark.parametrize(
    ("kind", "phase", "restarts"),
    [("mpirun killed", "start", 0), ("rank leaves", "start", 0), ("rank exits", "training", 1)],
)
def test_a_fault_is_an_error_in_time_or_a_run_with_the_right_result(kind: str, phase: str, restarts: int) -> None:
    outcome = Faults().make(Fault(kind, phase, 1, 0.01, 2, "exchange", False, restarts))
    assert outcome.problems == [] and outcome.restarted == bool(restarts)


def test_all_kinds_moments_and_plans_are_tried() -> None:
    found = faults(400, seed=1)
    assert {(f.kind, f.phase) for f in found} == {(kind, phase) for kind in KINDS for phase in PHASES}
    assert {f.plan for f in found} == {*PLANS, "exchange"} and {f.size for f in found} == {2, 4, 8}
    assert found == faults(400, seed=1) != faults(400, seed=2)
    assert (
        table([(found[0], Outcome(0.5, 1.5))]).splitlines()[2]
        == "| rank killed | 1 | 0 | 0 | 0.50, 0.50 | 1.50, 1.50 |"
    )
