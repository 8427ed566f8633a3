"""Random streams go on as on one device, whichever sizes batches have and whatever runs in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.helpers import Launcher
from tests.streams.compare import check


@pytest.mark.core
def test_streams_go_on_with_batches_of_other_sizes(launcher: Launcher, tmp_path: Path) -> None:
    """`fit`, functions of unknown or relaxed shapes, sessions."""
    check(launcher, "draws", "2", tmp_path, [-9, -6, -4, -3, -2, -1], timeout_s=600)
