"""Ranks that read or bring their own rows compute what one device computes on the whole batches."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.distributed import data_on_ranks as script
from tests.launcher.helpers import Launcher
from tests.oracle.execute import load
from tests.oracle.metric import difference, limit
from whale.ir.plan import load_plan
from whale.tools import dry_run

RATE_AND_STEPS = 0.1 * 8


def run(launcher: Launcher, folder: Path, size: int, mode: str, shares: str = "even") -> dict[str, np.ndarray]:
    """The results of the first rank, to which those of the others must be equal."""
    done = launcher.run("-np", str(size), script.__file__, mode, shares, str(folder), timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *others = [load(folder / f"{rank}.npz") for rank in range(size)]
    for rank, other in enumerate(others, 1):
        assert other.keys() == first.keys()
        for name, value in other.items():
            assert np.array_equal(value, first[name]), f"rank {rank} has another {name} than rank 0"
    return first


def as_one_device(wanted: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    worst = difference(wanted, found, RATE_AND_STEPS)
    assert worst.error <= limit("float64", 0.0), worst


@pytest.mark.core
def test_each_rank_reads_its_rows(launcher: Launcher, tmp_path: Path) -> None:
    plain = script.train(tf.function, [script.batches()] * script.EPOCHS)
    epochs = [[(x.numpy(), y.numpy()) for x, y in epoch] for epoch in script.kept(script.batches())]
    fed = script.train_session(tf.compat.v1.Session, epochs)
    plain |= {f"session/{name}": value for name, value in fed.items()}
    as_one_device(plain, run(launcher, tmp_path, 3, "rows", "4,0,2"))


@pytest.mark.core
def test_each_rank_brings_a_batch_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    found = run(launcher, tmp_path, 2, "own")
    plain = {
        "function": script.train(tf.function, script.whole()),
        "session": script.train_session(tf.compat.v1.Session, script.whole()),
    }
    as_one_device({f"{kind}/{name}": value for kind, values in plain.items() for name, value in values.items()}, found)


def test_each_rank_reads_its_files(launcher: Launcher, tmp_path: Path) -> None:
    """Other batches than one device would make, of the same rows; each is what its step computes with."""
    rows = np.concatenate(script.samples(), 1)
    for i, part in enumerate(np.split(rows, [7, 9])):
        np.savetxt(tmp_path / f"{i}.csv", part, delimiter=",", fmt="%.17g")
    found = run(launcher, tmp_path, 2, "files")
    epochs = []
    for epoch in range(script.EPOCHS):
        seen = [v for k, v in found.items() if k.startswith(f"{epoch}/") and k.endswith("seen")]
        every = np.concatenate(seen)
        assert np.array_equal(every[np.lexsort(every.T)], rows[np.lexsort(rows.T)])
        epochs.append([(s[:, :3], s[:, 3:]) for s in seen])
    # Rank 0 has the first and the third file, 17 rows; rank 1 has 2. Their shares of a batch are 3 rows.
    assert [len(x) for x, _ in epochs[0]] == [5, 3, 3, 3, 3, 2]
    as_one_device(script.train(tf.function, epochs), found)


UNDER_A_PLAN = """
import numpy as np
import tensorflow as tf
import whale as wh
wh.init({"mesh": wh.Mesh(data=2, tensor=2)})
w = [tf.Variable(np.random.default_rng(i).normal(size=s) * 0.4) for i, s in enumerate([(6, 8), (8, 4)])]
@wh.function
def step(x, y):
    with tf.GradientTape() as tape, wh.split():
        loss = tf.reduce_mean((tf.tanh(x @ w[0]) @ w[1] - y) ** 2)
    for v, slope in zip(w, tape.gradient(loss, w)):
        v.assign_sub(0.3 * slope)
    return loss
draw = np.random.default_rng(7)
rows = draw.normal(size=(16, 6)), draw.normal(size=(16, 4))
for x, y in wh.shard(tf.data.Dataset.from_tensor_slices(rows).batch(8)):
    loss = step(x, y)
print("found", float(loss), *(float(tf.reduce_sum(v.numpy() ** 2)) for v in w), flush=True)
"""


def test_a_saved_plan_of_two_axes_takes_the_rows_that_ranks_read(launcher: Launcher, tmp_path: Path) -> None:
    """It was made of whole batches, of which two ranks have the same rows; each reads a quarter."""
    path = launcher.script(UNDER_A_PLAN)
    dry_run.main(path, (), 4, str(tmp_path / "plan.json"))
    assert load_plan(tmp_path / "plan.json").inner is not None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        alone = UNDER_A_PLAN.replace("{", '{"communication.in_process_ranks": 1, ', 1)
        exec(compile(alone.replace('"mesh": wh.Mesh(data=2, tensor=2)', ""), "alone", "exec"), {})
        wh.shutdown()
    done = launcher.run("-np", "4", "--plan", str(tmp_path / "plan.json"), path)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = np.array(said.getvalue().split()[1:], float)
    for line in [text for text in done.stdout.splitlines() if "found" in text]:
        np.testing.assert_allclose(np.array(line.partition("found")[2].split(), float), wanted, rtol=1e-12)
    assert done.stdout.count("found") == 4 and "no step of this run" not in done.stdout + done.stderr
