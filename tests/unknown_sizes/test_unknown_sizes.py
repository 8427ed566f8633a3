"""Programs whose sizes only the run knows compute what one device computes, under every plan."""

from __future__ import annotations

import pytest

from tests.draws import one_of
from tests.unknown_sizes.compare import compare


@pytest.mark.core
@pytest.mark.parametrize("number", one_of(10, [51, *(n for n in range(100) if n != 51)]))
def test_a_drawn_program_is_that_of_one_device(number: int) -> None:
    compare(number)
