"""All that iterates over a dataset, or over what is made of it, goes on in one sequence of orders, as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.helpers import Launcher
from tests.streams.compare import check
from tests.streams.orders import CASES


@pytest.mark.core
def test_iterations_go_on_in_one_sequence_of_orders(launcher: Launcher, tmp_path: Path) -> None:
    """Fitting twice, validation on a part, loops of the script between, a restart, caches."""
    check(launcher, "orders", "ranks", tmp_path, range(-len(CASES), 0), timeout_s=600)
