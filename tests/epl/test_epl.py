"""Some of the library's scripts; `python -m tests.epl` runs all of them."""

from __future__ import annotations

import pytest

from tests.epl.cases import CASES
from tests.epl.compare import difference, results

SAMPLE = ("pipeline", "split_layer", "collections", "zero_v1")

pytestmark = pytest.mark.core


def test_scripts_are_as_one_device() -> None:
    alone, spread = results("alone", 2, SAMPLE), results("spread", 2, SAMPLE)
    limits = {case.function: case.limit for case in CASES}
    for name in SAMPLE:
        for rank in range(2):
            error, where = difference(spread[name, rank], alone[name, None])
            assert error <= limits[name], f"{name} on rank {rank}: {where}"
