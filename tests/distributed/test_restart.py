"""A run that loses a rank and starts again ends where an undisturbed one does."""

from __future__ import annotations

import random
import re
import signal

import numpy as np

from tests.launcher.helpers import PATIENCE_S, ROOT, Launcher, wait_for_line

STEPS, SAVE_EVERY = 10, 3
SCRIPT = """
import os, signal, sys
import numpy as np, whale as wh
sys.path.insert(0, {examples!r})
import restart

def fault(step):
    if {fatal} and wh.restarts() == 0 and (wh.rank(), step) == {fatal}:
        os.kill(os.getpid(), signal.{kind})

model = restart.train({folder!r}, {steps}, {save_every}, fault)
if wh.rank() == 1:
    np.savez({result!r}, *[v.numpy() for v in model.trainable_variables])
"""


def run(launcher: Launcher, name: str, fatal: tuple[int, int] | None, kind: str = "SIGKILL") -> str:
    """What was printed by a run in which, if ``fatal``, that rank gets that signal after that step."""
    text = SCRIPT.format(
        examples=str(ROOT / "examples"),
        folder=str(launcher.folder / name),
        steps=STEPS,
        save_every=SAVE_EVERY,
        result=str(launcher.folder / f"{name}.npz"),
        fatal=fatal,
        kind=kind,
    )
    done = launcher.run("-np", "2", "--max-restarts", "1", launcher.script(text), timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(launcher: Launcher, name: str) -> list[np.ndarray]:
    """Those of a run that came to its end."""
    with np.load(launcher.folder / f"{name}.npz") as arrays:
        return [arrays[key] for key in arrays]


def test_a_run_that_is_killed_or_told_to_end_ends_with_the_weights_of_an_undisturbed_one(launcher: Launcher) -> None:
    generator = random.Random()
    fatal = generator.randrange(2), generator.randrange(SAVE_EVERY, STEPS - 1)
    said = run(launcher, "undisturbed", None)
    expected = weights(launcher, "undisturbed")
    assert "attempt 2" not in said
    said = run(launcher, "killed", fatal)
    assert f"whale run: rank {fatal[0]} was killed by SIGKILL" in said, (fatal, said)
    assert "whale run: starting again (restart 1 of 1)" in said
    saved = (fatal[1] + 1) // SAVE_EVERY * SAVE_EVERY
    assert re.search(rf"attempt 2: on from \S+-{saved}\b", said), (fatal, said)
    # Told by SIGTERM to one rank, all save after the next step and end; the next run goes on from there.
    said = run(launcher, "told", (fatal[0], SAVE_EVERY), "SIGTERM")
    assert f"step {SAVE_EVERY + 2:4d}" in said and "attempt 2" not in said, said
    assert not (launcher.folder / "told.npz").exists()
    assert re.search(rf"attempt 1: on from \S+-{SAVE_EVERY + 2}\b", run(launcher, "told", None))
    for name in ("killed", "told"):
        for a, b in zip(expected, weights(launcher, name), strict=True):
            assert a.dtype == np.float64
            np.testing.assert_array_equal(a, b, err_msg=f"{name}, rank and step of the fault: {fatal}")


def test_a_lone_rank_has_the_time_to_save_too(launcher: Launcher) -> None:
    """Longer than the three seconds that ranks have which do not save."""
    script = launcher.script(
        "import time, whale as wh\nwh.init({'fault.notice_s': 20.0})\nprint('up', flush=True)\n"
        "while not wh.preempted(): time.sleep(0.05)\ntime.sleep(3.5)\nprint('saved', flush=True)"
    )
    with launcher.start("-np", "1", script) as process:
        wait_for_line(process, "up")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and "saved" in output, errors
    assert errors.splitlines()[-1] == "whale run: stopped by SIGTERM; every rank has ended by itself with code 0"


def test_an_elastic_run_that_loses_a_rank_after_its_last_step_has_failed(launcher: Launcher) -> None:
    """Nobody goes on without it any more: what it alone would have saved is missing."""
    script = launcher.script(
        "import os, signal, time, tensorflow as tf, whale as wh\nwh.init(elastic=True)\n"
        "with wh.replica():\n    total = wh.function(lambda x: tf.reduce_sum(x))(tf.ones((4, 2)))\n"
        "if wh.rank() == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(2)\nprint('ends', float(total))"
    )
    done = launcher.run("-np", "2", script)
    assert "[1] ends 8.0" in done.stdout, done.stderr
    assert "the others go on without it" in done.stderr
    assert done.returncode == 137
    expected = (
        "whale run: rank 0 was killed by SIGKILL after the last step of the run: what it was still to do, such as"
    )
    assert done.stderr.splitlines()[-1].startswith(expected), done.stderr
