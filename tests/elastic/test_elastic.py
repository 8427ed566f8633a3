"""A sample of the cases of ``python -m tests.elastic``."""

from __future__ import annotations

import pytest

from tests.elastic.cases import Case, Reference, run


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("one_device"))


@pytest.mark.parametrize(
    "case",
    [
        Case("shard", 3, "3:0:late,8:1:kill"),
        Case("save", 3, "4:0:stop,109:2:kill"),
    ],
    ids=str,
)
def test_ranks_that_are_left_end_with_what_one_device_computes(case: Case, reference: Reference) -> None:
    outcome = run(case, reference)
    assert not outcome.problem, outcome.problem
