"""TensorFlow's tutorials of strategies with one line changed: two processes do what one does without a strategy."""

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
LINE = re.compile(r"^strategy = tf\.distribute\.\w+\(.*\)$", re.M)
WORKERS = json.dumps({"cluster": {"worker": ["host1:12345", "host2:23456"]}})


def changed(name: str, line: str) -> str:
    text, times = LINE.subn(line, (FOLDER / name).read_text())
    assert times == 1
    return text


def result(said: str) -> dict[str, list[float]]:
    found = re.search(r"RESULT (\{.*\})", said)
    assert found, said
    return json.loads(found[1])


@pytest.mark.parametrize(
    "name", one_of(3, ["multi_worker_with_ctl.py", "custom_training.py", "multi_worker_with_keras.py"])
)
def test_tutorial(launcher: Launcher, name: str) -> None:
    launcher.environment["TF_CONFIG"] = WORKERS
    alone = changed(name, "from tests.frontends.tf_distribute.one_device import Strategy\nstrategy = Strategy()")
    script = launcher.script(alone + "\nimport sys\nassert 'whale' not in sys.modules\n", "alone.py")
    folder = launcher.folder / "alone"  # where its checkpoints are
    folder.mkdir()
    done = subprocess.run(
        [plain_python(), script], cwd=folder, env=launcher.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = result(done.stdout)

    script = launcher.script(changed(name, "import whale as wh; strategy = wh.Strategy()"))
    done = launcher.run("-np", "2", "-v", script, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        found = result("".join(line for line in done.stdout.splitlines(True) if line.startswith(f"[{rank}]")))
        assert found.keys() == expected.keys()
        for what, values in expected.items():
            assert len(set(values)) > 1
            np.testing.assert_allclose(found[what], values, rtol=2e-5, err_msg=f"{what} on rank {rank}")
    # Every step's gradients were summed over the ranks.
    reduced = re.search(r"^AllReduce +(\d+) ", done.stdout + done.stderr, re.M)
    assert reduced and int(reduced[1]) >= 30, done.stdout + done.stderr
