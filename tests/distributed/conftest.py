from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forkserver import warm_python
from tests.launcher.helpers import Launcher
from tests.oracle.pool import Pool


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Runs scripts that use TensorFlow under `whale run`, in forked processes; afterwards no process may be left."""
    found = Launcher(tmp_path, warm_python())
    found.environment |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    yield found
    assert not found.left_behind()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Reference results."""
    with Pool() as workers:
        yield workers
