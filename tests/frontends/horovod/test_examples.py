"""Horovod's examples with one import changed: what two processes compute is what one process does with all rows."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.draws import one_of
from tests.forkserver import plain_python
from tests.launcher.helpers import Launcher

FOLDER = Path(__file__).parent
IMPORT = re.compile(r"^import horovod\.(\S+) as hvd$", re.M)


def result(said: str) -> dict[str, list[float]]:
    found = re.search(r"RESULT (\{.*\})", said)
    assert found, said
    return json.loads(found[1])


def changed(name: str, replacement: str) -> str:
    text, times = IMPORT.subn(replacement, (FOLDER / name).read_text())
    assert times == 1
    return text


def alone(launcher: Launcher, name: str, *arguments: str) -> dict[str, list[float]]:
    """In a process that never loads Whale."""
    text = changed(name, "import tests.frontends.horovod.no_horovod as hvd")
    script = launcher.script(text + "\nimport sys\nassert 'whale' not in sys.modules\n", "alone.py")
    folder = launcher.folder / "alone"  # where its checkpoints are
    folder.mkdir()
    done = subprocess.run(
        [plain_python(), script, *arguments], cwd=folder, env=launcher.environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return result(done.stdout)


def spread(launcher: Launcher, name: str, *arguments: str) -> dict[str, list[float]]:
    script = launcher.script(changed(name, r"import whale.horovod.\1 as hvd"))
    done = launcher.run("-np", "2", script, *arguments, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return result(done.stdout)


@pytest.mark.parametrize("name", one_of(3, ["synthetic_benchmark.py", "keras_mnist.py", "tf1_mnist.py"]))
def test_example(launcher: Launcher, name: str) -> None:
    expected = alone(launcher, name)
    found = spread(launcher, name)
    assert found.keys() == expected.keys()
    for what, values in expected.items():
        assert len(set(values)) > 1  # something was trained
        np.testing.assert_allclose(found[what], values, rtol=2e-5, err_msg=what)
