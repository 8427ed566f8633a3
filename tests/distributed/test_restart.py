"""A run that loses a rank and starts again ends where an undisturbed one does."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from tests.launcher.helpers import ROOT, Launcher

STEPS, SAVE_EVERY = 10, 3
SCRIPT = """
import os, signal, sys
import numpy as np, whale as wh
sys.path.insert(0, {examples!r})
import restart

def fault(step):
    if {fatal} and wh.restarts() == 0 and (wh.rank(), step) == {fatal}:
        os.kill(os.getpid(), signal.SIGKILL)

model = restart.train({folder!r}, {steps}, {save_every}, fault)
if wh.rank() == 1:
    np.savez({result!r}, *[v.numpy() for v in model.trainable_variables])
"""


def weights(launcher: Launcher, name: str, fatal: tuple[int, int] | None) -> tuple[list[np.ndarray], str]:
    """The weights after a run in which, if ``fatal``, that rank is killed after that step; and what was printed."""
    result = launcher.folder / f"{name}.npz"
    text = SCRIPT.format(
        examples=str(ROOT / "examples"),
        folder=str(launcher.folder / name),
        steps=STEPS,
        save_every=SAVE_EVERY,
        result=str(result),
        fatal=fatal,
    )
    done = launcher.run("-np", "2", "--max-restarts", "1", launcher.script(text), timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(result) as arrays:
        return [arrays[key] for key in arrays], done.stdout + done.stderr


@pytest.mark.slow
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(launcher: Launcher) -> None:
    generator = random.Random()
    fatal = generator.randrange(2), generator.randrange(SAVE_EVERY, STEPS - 1)
    expected, said = weights(launcher, "undisturbed", None)
    assert "attempt 2" not in said
    found, said = weights(launcher, "disturbed", fatal)
    assert f"whale run: rank {fatal[0]} was killed by SIGKILL" in said, (fatal, said)
    assert "whale run: starting again (restart 1 of 1)" in said
    saved = (fatal[1] + 1) // SAVE_EVERY * SAVE_EVERY
    assert re.search(rf"attempt 2: on from \S+-{saved}\b", said), (fatal, said)
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == np.float64
        np.testing.assert_array_equal(a, b, err_msg=f"rank and step of the fault: {fatal}")
