"""Ranks inside the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import whale as wh


@pytest.fixture
def ranks() -> Iterator[Callable[..., None]]:
    """``ranks(3, **{"batch.shares": [5, 3, 0]})`` starts that many ranks in this process."""

    def start(count: int, **config: Any) -> None:
        wh.init({"communication.in_process_ranks": count, **config})

    yield start
    wh.shutdown()
