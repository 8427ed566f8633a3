"""The interval that is printed with predictions: found again in the tables, and as wide as it says."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.analytic.evaluate import likely_s
from cost_model.analytic.job import Job, report
from cost_model.analytic.stacks import stack, stacks
from cost_model.analytic.transformer import Transformer
from cost_model.cluster import cluster_file
from cost_model.cluster.pools import Machines
from cost_model.kernels.interval import ONE_HOST, OWN_RUNS, PART, SEVERAL_HOSTS, UNKNOWN, calibrate
from cost_model.validation.cases import COMMENT, DATA, published_cluster, read
from cost_model.validation.report import results
from whale.errors import ProgramError
from whale.ir.strategy import Degrees

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
        assert len(cases) < 10 or held / len(cases) >= 0.8, name  # of each table alone
    for factors, found in ratios.items():
        assert calibrate(found) == pytest.approx(factors, abs=5e-4)
        assert sum(factors[0] - 5e-4 <= ratio <= factors[1] + 5e-4 for ratio in found) / len(found) >= PART


def test_where_nothing_was_compared_the_interval_is_that_of_tables_before_they_had_a_stack() -> None:
    before = []
    for path in sorted(DATA.glob("*.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith(COMMENT)))
        if "software" not in rows[0]:
            continue
        for row, case in zip(rows, read(path)[1], strict=True):
            assert case.stack != row["software"]
            before.append(case.measured_s / replace(case, stack=row["software"]).predict().step_s)
    assert calibrate(before) == pytest.approx(UNKNOWN, abs=5e-4)
    assert UNKNOWN[0] < min(ONE_HOST[0], SEVERAL_HOSTS[0]) and UNKNOWN[1] > max(ONE_HOST[1], SEVERAL_HOSTS[1])


def test_stacks_say_on_which_devices_they_were_compared() -> None:
    found: dict[str, set[str]] = {name: set() for name in stacks()}
    for path in DATA.glob("*.csv"):
        for case in read(path)[1]:
            found[case.stack].add(published_cluster(case.cluster).hosts[0].devices[0].device.efficiency)
    assert {name: set(one.compared) for name, one in stacks().items()} == found
    small = Transformer(8, 512, 8, 128, 1024)
    widths = []
    for kind in ("h100", "v100-sxm2-32gb"):
        cluster = cluster_file.parse(f"name: c\nhosts: [{{name: a, devices: [{{type: {kind}, count: 2}}]}}]")
        task = Job(small, Degrees(data=2, batch=2), "megatron-2022" if "v" in kind else "megatron-core-bf16")
        ran = task.predict(cluster)
        low_s, high_s = likely_s(stack(task.software), ran.strategy, Machines(cluster), ran.step_s)
        widths.append(high_s / low_s)
        said = "no step under megatron-2022 on v100-sxm2-32gb was compared"
        assert (said in report(task, cluster, ran)) == ("v" in kind)
    assert widths[1] > 1.5 * widths[0]


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
