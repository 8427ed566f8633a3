"""The trace and the counters of a run of two processes."""

from __future__ import annotations

import json

from tests.launcher.helpers import Launcher
from tests.traces import only, pieces

SCRIPT = """
import tensorflow as tf, whale as wh
wh.init()
w = tf.Variable(tf.ones([3, 2]))

@wh.function
def train(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - 1))
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss

for _ in range(3):
    train(tf.ones([8, 3]))
"""


def test_all_ranks_are_in_one_file_and_in_one_time(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "-v", "--trace", "out.json", launcher.script(SCRIPT), timeout_s=120)
    assert done.returncode == 0, done.stderr
    events = json.loads((launcher.folder / "out.json").read_text())
    both = [pieces(events, rank) for rank in range(2)]
    assert {event["pid"] for event in events} == {0, 1}
    operations = []
    for found in both:
        assert only(found, "plan").within(only(found, "compile train"))
        steps = [piece for piece in found if piece.category == "step"]
        assert [step.name for step in steps] == ["train 0", "train 1", "train 2"]
        inside = [
            {(p.arguments["key"], p.arguments["call"]): p for p in found if "key" in p.arguments and p.within(step)}
            for step in steps
        ]
        assert all(any(p.category == "AllReduce" for p in of.values()) for of in inside)
        operations.append(inside)
    for here, there in zip(*operations, strict=True):
        assert here.keys() == there.keys()
        for key, operation in here.items():  # nobody is through before the other has begun
            assert operation.end > there[key].start and there[key].end > operation.start
    lines = done.stderr.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("communication, sums over ranks"))
    calls = {line.split()[0]: line.split()[1] for line in lines[start + 2 : start + 5] if line[0].isupper()}
    assert int(calls["AllReduce"]) == sum(p.category == "AllReduce" for found in both for p in found) >= 6
