"""A few of the runs of ``python -m tests.combinations``, the same each time."""

from __future__ import annotations

import pytest

from tests.combinations.features import BY_NAME
from tests.combinations.run import outcome

SAMPLE = [
    ("tensor", "2 stages", "zb-h1"),
    ("tensor", "second tensor axis", "loop"),
    ("unequal stages", "micro-batches", "recompute marked"),
    ("2 stages", "zb-h1", "branch", "session"),
    ("second tensor axis", "session"),
    ("sequence", "zero 3"),
    ("tensor", "unequal shares"),
    ("lstm", "zero 3"),
    ("second tensor axis", "saved"),
    ("session", "accumulation"),
    ("scan", "amp"),
]


@pytest.mark.parametrize("names", SAMPLE, ids=" + ".join)
def test_features_together_are_as_one_device(names: tuple[str, ...]) -> None:
    kind, what = outcome([BY_NAME[name] for name in names])
    assert kind == "equal", what


def test_what_stages_cannot_share_is_refused() -> None:
    kind, what = outcome([BY_NAME["2 stages"], BY_NAME["unequal shares"]])
    assert kind == "refused" and what.startswith("the batch cannot be split as `replica.shares` asks")
