"""Some of the library's scripts; `python -m tests.epl` runs all of them."""

from __future__ import annotations

import pytest

from tests.epl.compare import LIMIT, difference, results

SAMPLE = ("pipeline", "accumulation", "collections")

pytestmark = pytest.mark.core


def test_scripts_are_as_one_device() -> None:
    alone, spread = results("alone", 2, SAMPLE), results("spread", 2, SAMPLE)
    for name in SAMPLE:
        for rank in range(2):
            error, where = difference(spread[name, rank], alone[name, None])
            assert error <= LIMIT, f"{name} on rank {rank}: {where}"
