"""The oracle's own parts: a metric that finds differences, a sample that covers, workers that report failure."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from tests.oracle.__main__ import refusal
from tests.oracle.compare import Outcome
from tests.oracle.matrix import Run, Spread, all_runs, draw_runs, pairwise
from tests.oracle.metric import difference, limit
from tests.oracle.pool import ROOT, Pool, WorkerFailure, flavours
from tests.zoo.case import BATCH
from tests.zoo.catalogue import CASES, case_named
from whale.errors import REPORT_FAULT

REFERENCE = {
    "0/loss": np.asarray(2.0),
    "0/gradient/000": np.asarray([4.0, -1.0]),
    "0/gradient/001": np.asarray([1e-17, 0.0]),
    "variable/w": np.asarray([[1.0, -2.0]]),
    "variable/zero": np.zeros(3),
    "variable/none": np.zeros((0, 3)),
    "variable/count": np.asarray(4),
}


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("0/loss", 0.5, 0.25),
        ("variable/w", 0.5, 0.25),
        ("variable/zero", 0.1, 0.25),  # floor: learning rate x steps
        ("0/gradient/001", 1e-3, 0.25e-3),  # relative to all gradients of the step
        ("variable/count", 1, 0.25),
        ("0/loss", np.nan, np.inf),
    ],
)
def test_difference_is_relative_to_size_or_floor(name: str, change: float, error: float) -> None:
    found = REFERENCE | {name: (REFERENCE[name] + np.asarray(change)).astype(REFERENCE[name].dtype)}
    worst = difference(REFERENCE, found, floor=0.4)
    assert worst.error == pytest.approx(error)
    assert worst.where == name


def test_nan_hides_no_other_difference_and_is_not_hidden() -> None:
    found = REFERENCE | {"0/loss": np.asarray(np.nan), "variable/w": REFERENCE["variable/w"] + 1}
    assert difference(REFERENCE, found, floor=0.4).error == np.inf


def test_equal_runs_have_no_difference_and_gradients_may_be_left_out() -> None:
    assert difference(REFERENCE, REFERENCE, floor=0.4).error == 0
    found = {name: value for name, value in REFERENCE.items() if "gradient" not in name}
    assert difference(REFERENCE, found, floor=0.4).error == 0


@pytest.mark.parametrize(
    "found",
    [
        {name: value for name, value in REFERENCE.items() if name != "variable/w"},
        REFERENCE | {"variable/more": np.zeros(1)},
        REFERENCE | {"variable/w": np.asarray([1.0, -2.0])},
        REFERENCE | {"0/loss": np.asarray(2.0, np.float32)},
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_other_names_shapes_and_dtypes_are_refused(found: dict[str, np.ndarray]) -> None:
    with pytest.raises(AssertionError):
        difference(REFERENCE, found, floor=0.4)


def test_float32_limit_follows_noise_and_float64_does_not() -> None:
    assert limit("float32", 0.0) == 1e-5
    assert limit("float32", 1e-4) == pytest.approx(3e-4)
    assert limit("float64", 1e-4) == 1e-10


def test_sample_meets_every_pair_and_is_the_same_each_time() -> None:
    runs = all_runs(CASES, flavours()[0], gradients=(True, False), scopes=("", "replica"))
    sample = pairwise(runs, 1)
    assert sample == pairwise(runs, 1)
    assert len(sample) < len(runs) / 20
    sampled = [run.factors() for run in sample]
    for one, other in itertools.combinations(["dtype", "ranks", "kind", "gradients", "scope"], 2):
        wanted = {(run.factors()[one], run.factors()[other]) for run in runs}
        assert {(factors[one], factors[other]) for factors in sampled} == wanted
    for run in (run for run in runs if not run.case.heavy and run.spread.ranks > 1):
        for other in ("dtype", "optimizer", "ranks", "kind"):
            pair = (run.name, run.factors()[other])
            assert pair in {(factors["case"], factors[other]) for factors in sampled}


def test_outcome_tells_what_is_wrong() -> None:
    case = case_named("mlp")
    run = Run(case, "mlp", "keras3", "float64", "sgd", Spread(2))
    good = Outcome(1e-16, "w", 1e-10, 0.1, 1.0, 100, 64, 0, 1.0)
    assert not good.problems(run)
    bad = Outcome(float("nan"), "w", 1e-10, 0.0, 0.5, 0, 0, 0, 1.0)
    assert len(bad.problems(run)) == 5


def test_zoo_names_are_unique_and_no_file_of_it_names_whale() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for path in (ROOT / "tests" / "zoo").glob("*.py"):
        assert "import whale" not in path.read_text().replace("never import whale", "")
        assert "from whale" not in path.read_text()


def test_reference_code_loads_without_whale() -> None:
    code = "import sys, tests.oracle.reference; sys.exit('whale' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_worker_failures_are_reported_and_the_next_job_runs(pool: Pool) -> None:
    with pytest.raises(WorkerFailure, match="KeyError"):
        pool.reference(flavours()[0], "no such case", "float64", "sgd")
    assert pool.reference(flavours()[0], "module", "float64", "sgd")["moved"] > 0


def test_drawn_runs_are_those_of_their_seed_and_can_be_spread() -> None:
    runs = draw_runs(CASES, flavours(), 400, 5)
    assert runs == draw_runs(CASES, flavours(), 400, 5) != draw_runs(CASES, flavours(), 400, 6)
    assert {run.spread.kind for run in runs} == {"even", "uneven", "empty"}
    for run in runs:
        assert not run.spread.shares or (len(run.spread.shares) == run.spread.ranks and sum(run.spread.shares) == BATCH)
        assert ":2" not in run.scope.partition("+")[0] or run.spread.ranks % 2 == 0


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ("whale.errors.PlanError: nothing can be divided\n  given: a mesh", "nothing can be divided"),
        (f"whale.errors.PlanError: a value is lost\n  action: {REPORT_FAULT}", ""),
        ("ValueError: shapes", ""),
    ],
)
def test_only_what_whale_refuses_is_a_refusal(raised: str, reason: str) -> None:
    first = "Traceback (most recent call last):\nwhale.errors.PlanError: the first\n\nDuring handling ...\n"
    assert refusal(f"{first}Traceback (most recent call last):\n  File ...\n{raised}") == reason
