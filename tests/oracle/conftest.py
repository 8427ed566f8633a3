from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.oracle.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The workers of this session."""
    with Pool() as workers:
        yield workers
