"""Ranks that start differently end up the same."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.launcher.helpers import Launcher

SCRIPT = """
import json, os
import numpy as np, tensorflow as tf
own = int(os.environ["WHALE_RANK"])
np.random.seed(own)
tf.random.set_seed(own)
w = tf.Variable(np.random.normal(size=(3, 2)), name="w")
counter = tf.Variable(10 * own, name="counter")
first = w.numpy()
import whale as wh
with open(f"wrong{own}.json", "w") as file:
    file.write('{"a": {"replica": {"devices": [7]}}}')
try:  # after the ranks are connected
    wh.init({"mesh.annotations": f"wrong{own}.json"})
except wh.WhaleError:
    wh.init()
else:
    raise AssertionError("a device 7 of 3 was taken")
x = np.arange(24.0).reshape(8, 3) / 24

@wh.function
def step(x):
    with tf.GradientTape() as tape:
        hidden = tf.nn.dropout(tf.matmul(x, w), rate=0.5)
        loss = tf.reduce_mean(tf.square(hidden - 1))
    w.assign_sub(0.1 * tape.gradient(loss, w))
    counter.assign_add(1)
    return loss, hidden

results = [step(x) for _ in range(3)]
print(json.dumps({
    "rank": wh.rank(), "first": first.tolist(), "w": w.numpy().tolist(), "counter": int(counter),
    "losses": [float(loss) for loss, _ in results], "hidden": [hidden.numpy().tolist() for _, hidden in results],
}))
wh.shutdown()
"""


@pytest.mark.core
def test_variables_start_as_rank_0_has_them_and_unseeded_dropout_is_one_stream(launcher: Launcher) -> None:
    done = launcher.run("-np", "3", launcher.script(SCRIPT), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if '"rank"' in line]
    found = sorted((json.loads(line) for line in lines), key=lambda result: result["rank"])
    assert [result["rank"] for result in found] == [0, 1, 2]
    assert found[1]["first"] != found[0]["first"] != found[2]["first"], "the ranks did not start differently"
    for result in found[1:]:
        for name in ("w", "counter", "losses", "hidden"):
            assert result[name] == found[0][name], f"rank {result['rank']} has another {name} than rank 0"
    assert found[0]["counter"] == 3

    # The three steps again in NumPy, from rank 0's start and with the masks that the fetched values show.
    w, x = np.asarray(found[0]["first"]), np.arange(24.0).reshape(8, 3) / 24
    masks = []
    for loss, hidden in zip(found[0]["losses"], np.asarray(found[0]["hidden"]), strict=True):
        mask = 2.0 * (hidden != 0)
        masks.append(mask)
        np.testing.assert_allclose(hidden, x @ w * mask, rtol=1e-12)
        np.testing.assert_allclose(loss, np.mean((hidden - 1) ** 2), rtol=1e-12)
        w = w - 0.1 * x.T @ (2 * (hidden - 1) * mask / hidden.size)
    np.testing.assert_allclose(found[0]["w"], w, rtol=1e-12)
    assert any(not np.array_equal(mask, masks[0]) for mask in masks[1:]), "the dropout mask never changed"
    assert {0.0, 2.0} == set(np.unique(masks)), "nothing was dropped"
