"""The published rows of the package, predicted once for all tests of the cost model."""

from __future__ import annotations

import pytest

from cost_model.validation import report
from cost_model.validation.cases import DATA, Published, read
from cost_model.validation.report import Result


@pytest.fixture(scope="session")
def tables() -> list[tuple[Published, list[Result]]]:
    found = (read(path) for path in sorted(DATA.glob("*.csv")))
    return [(table, report.results(cases)) for table, cases in found]


@pytest.fixture(scope="session")
def left_out(tables: list[tuple[Published, list[Result]]]) -> list[list[bool]]:
    from cost_model.validation import intervals

    return intervals.each_left_out([rows for _, rows in tables])
