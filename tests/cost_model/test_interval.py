"""The interval that is printed with predictions: found again in the tables, and as wide as it says."""

from __future__ import annotations

import csv
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.analytic.evaluate import likely_s
from cost_model.analytic.job import Job, report
from cost_model.analytic.stacks import FOLDER, stack, stacks
from cost_model.analytic.transformer import Transformer
from cost_model.cluster import cluster_file
from cost_model.cluster.pools import Machines
from cost_model.kernels.interval import OWN_RUNS, UNKNOWN, calibrate
from cost_model.validation import intervals
from cost_model.validation.cases import COMMENT, DATA, read
from whale.errors import PlanError
from whale.ir.strategy import Degrees

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_nine_of_ten_rows_lie_in_the_interval_that_the_others_give(tables, left_out) -> None:
    every = [inside for rows in left_out for inside in rows]
    assert 0.86 <= sum(every) / len(every) <= 0.94
    for (table, rows), inside in zip(tables, left_out):
        if len(rows) >= 10:  # of fewer, one row is more than ten per cent
            assert 0.86 <= sum(inside) / len(rows) <= 0.94, table.name


def test_the_stacks_files_have_the_intervals_of_the_rows(tables) -> None:
    """After a change: python -m cost_model.validation --intervals."""
    groups = intervals.grouped([one for _, rows in tables for one in rows])
    found = intervals.calibrate(groups)
    scale, reach = intervals.find_common(groups)
    assert scale == pytest.approx(intervals.COMMON_SCALE, abs=2e-3)
    assert reach == pytest.approx(intervals.COMMON_REACH, abs=2e-3)
    assert reach[0] > reach[1]  # of fewer rows less is known
    said = {(name, curve): one for name, stack_ in stacks().items() for curve, one in stack_.compared.items()}
    assert said == found
    text = (FOLDER / "megatron-core-fp8.yaml").read_text()
    assert intervals.written(text, stack("megatron-core-fp8").compared) == text
    assert "compared" not in intervals.written(text, {})


def test_groups_that_are_far_off_or_spread_have_their_own_interval() -> None:
    draw = random.Random(1)
    rows = {(f"s{i}", "curve"): [draw.gauss(0.0, 0.04) for _ in range(12)] for i in range(8)}
    rows["late", "curve"] = [draw.gauss(0.3, 0.04) for _ in range(12)]
    rows["wild", "curve"] = [draw.gauss(0.0, 0.3) for _ in range(12)]
    found = intervals.calibrate(rows)
    plain, late, wild = (found[name, "curve"] for name in ("s0", "late", "wild"))
    assert late.low > plain.low and late.high > 1.3 > plain.high
    assert wild.high - wild.low > 2 * (plain.high - plain.low)
    fresh = [draw.gauss(0.0, 0.04) for _ in range(2000)]
    assert 0.84 <= sum(plain.low <= math.exp(e) <= plain.high for e in fresh) / len(fresh) <= 0.99
    # Few rows say little: the fewer, the wider.
    few = intervals.calibrate({**rows, ("few", "curve"): rows["s0", "curve"][:1]})["few", "curve"]
    assert few.high - few.low > plain.high - plain.low


def test_rows_on_which_a_constant_was_fitted_count_as_if_it_had_not_been(tables) -> None:
    found = next(rows for table, rows in tables if table.name == "tf_bert_large_nvidia")
    seen = [math.log(one.case.measured_s / one.predicted_s) for one in found]
    unseen = intervals.unseen_residuals(found)
    tf32 = [i for i, one in enumerate(found) if one.case.stack == "tensorflow-xla-tf32"]
    assert len(tf32) == 2  # on which one constant was fitted: the other row alone sets it
    assert max(abs(unseen[i]) for i in tf32) > 1.5 * max(abs(seen[i]) for i in tf32)
    assert [seen[i] for i in range(2)] != [unseen[i] for i in range(2)]


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
    each = [one for found in stacks().values() for one in found.compared.values()]
    assert UNKNOWN[0] < min(one.low for one in each) and UNKNOWN[1] > max(one.high for one in each)


def test_stacks_say_on_which_devices_they_were_compared(tables) -> None:
    found: dict[str, set[str]] = {name: set() for name in stacks()}
    for _, rows in tables:
        for one in rows:
            software, curve = intervals.group_of(one.case)
            found[software].add(curve)
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
    path.write_text(text.replace(",8,35,1,3,280,280,1,selective", ",8,,,,7,280,,selective"))
    last = read(path)[1][-1]
    assert last.label == "line 5"
    with pytest.raises(PlanError, match="no parallel degrees for the row"):
        last.predict()
