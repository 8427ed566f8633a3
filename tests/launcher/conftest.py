from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.helpers import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher in an empty folder; whatever the test did, no process may be left."""
    started = Launcher(tmp_path)
    yield started
    assert started.left_behind() == []
