"""The interval that is printed with predictions: found again in the tables, and as wide as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cost_model.kernels.interval import ONE_HOST, OWN_RUNS, PART, SEVERAL_HOSTS, calibrate
from cost_model.validation.cases import DATA, published_cluster, read
from cost_model.validation.report import results
from whale.errors import ProgramError

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_nine_of_ten_published_steps_lie_in_the_interval() -> None:
    ratios: dict[tuple[float, float], list[float]] = {ONE_HOST: [], SEVERAL_HOSTS: []}
    for path in sorted(DATA.glob("*.csv")):
        name, cases = read(path)
        held = 0
        for one in results(cases):
            each = published_cluster(one.case.cluster).hosts[0].devices[0].count
            factors = ONE_HOST if one.case.parallel.ranks <= each else SEVERAL_HOSTS
            ratio = one.case.measured_s / one.predicted_s
            ratios[factors].append(ratio)
            held += factors[0] - 5e-4 <= ratio <= factors[1] + 5e-4
        assert len(cases) < 10 or held / len(cases) >= 0.85, name  # of each table alone
    for factors, found in ratios.items():
        assert calibrate(found) == pytest.approx(factors, abs=5e-4)
        assert sum(factors[0] - 5e-4 <= ratio <= factors[1] + 5e-4 for ratio in found) / len(found) >= PART


def test_own_runs_have_an_interval_of_their_own() -> None:
    rows = re.findall(r"^\w+ +\S.*? {2,}([\d.]+) +([\d.]+) +[+-]", (DOCS / "predictions.md").read_text(), re.M)
    assert calibrate([float(measured) / float(predicted) for predicted, measured in rows]) == pytest.approx(
        OWN_RUNS, abs=5e-4
    )


def test_the_fastest_division_completes_a_row_and_what_cannot_be_completed_is_an_error(tmp_path: Path) -> None:
    text = (DATA / "korthikanti_table5_visible.csv").read_text()
    path = tmp_path / "blank.csv"
    path.write_text(text.replace(",8,35,1,3,280,280,1,selective", ",8,,,,280,280,,selective"))
    last = read(path)[1][-1]
    assert last.label == "530B t8 p35 d1 v3 b1x280 selective (assumed: p35 d1 v3 b1)"  # as it was published
    path.write_text(text.replace(",8,35,1,3,280,280,1,selective", ",8,,,,8,280,,selective"))
    with pytest.raises(ProgramError, match="line 5 of"):
        read(path)
