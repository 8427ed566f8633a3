"""Horovod's API on two processes; the scripts beside this file say what each call means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.draws import one_of
from tests.launcher.helpers import Launcher
from whale.launcher.mpirun import find_mpirun

FOLDER = Path(__file__).parent


def test_exchanges(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", str(FOLDER / "exchanges_on_ranks.py"))
    assert done.returncode == 0 and done.stdout.count("all exchanges") == 2, done.stdout + done.stderr


@pytest.mark.parametrize("keras", one_of(2, ["keras", "tf_keras"]))
def test_optimizers_tapes_and_callbacks(launcher: Launcher, keras: str) -> None:
    done = launcher.run("-np", "2", str(FOLDER / "keras_on_ranks.py"), keras, timeout_s=300)
    assert done.returncode == 0 and done.stdout.count("all of Keras") == 2, done.stdout + done.stderr


@pytest.mark.long
def test_a_plain_mpirun_starts_it_too(launcher: Launcher) -> None:
    code = "import whale.horovod.tensorflow as hvd; hvd.init(); print('mean', float(hvd.allreduce(hvd.rank() * 2.0)))"
    line = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-c", code]
    done = subprocess.run(
        line, cwd=launcher.folder, env=launcher.environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.count("mean 1.0") == 2, done.stdout + done.stderr


def test_a_script_that_exchanges_nothing_says_so(launcher: Launcher) -> None:
    nothing = "import whale.horovod as hvd\nhvd.init()\nprint('rank', hvd.rank())"
    done = launcher.run("-np", "2", launcher.script(nothing))
    assert done.returncode == 0 and done.stderr.count("the script exchanged nothing, so each rank ran alone") == 1
    something = nothing + "\nhvd.broadcast_object(1)"
    done = launcher.run("-np", "2", launcher.script(something))
    assert done.returncode == 0 and "exchanged nothing" not in done.stderr


def test_the_two_ways_to_start_are_not_mixed(launcher: Launcher) -> None:
    both = "import whale as wh\nimport whale.horovod as hvd\nwh.init()\nhvd.init()\nprint('went on')"
    done = launcher.run("-np", "2", launcher.script(both))
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "hvd.init() after wh.init()" in done.stderr and "remove one of the two" in done.stderr
    step = (
        "import tensorflow as tf, whale as wh\nimport whale.horovod as hvd\nhvd.init()\n"
        "wh.function(lambda x: hvd.allreduce(x))(tf.ones([4]))\nprint('went on')"
    )
    done = launcher.run("-np", "2", launcher.script(step))
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "inside a step of wh.function" in done.stderr and "use tf.function" in done.stderr
