"""What a pipeline's ranks hold, as TensorFlow's allocator counts it: the micro-batches that the schedule lets live."""

from __future__ import annotations

from tests.launcher.helpers import Launcher

SCRIPT = """
import gc
import tensorflow as tf
import whale as wh
from whale_ops.memory import memory, reset_peak

ROWS, WIDTH, LAYERS, PARTS = 4096, 64, 6, 8
ONE = LAYERS * ROWS // PARTS * WIDTH * 4  # activations that a stage holds for the backward pass of a micro-batch

def run(schedule, recompute=""):
    wh.init({"pipeline.num_micro_batch": PARTS, "pipeline.schedule": schedule, "gradient_checkpoint.type": recompute})
    start = tf.random.stateless_normal((2 * LAYERS, WIDTH, WIDTH), (1, 2)) / 8
    weights = [tf.Variable(start[i]) for i in range(2 * LAYERS)]

    @wh.function
    def step(x):
        with tf.GradientTape() as tape:
            for half in range(2):
                with wh.stage():
                    for weight in weights[half * LAYERS : (half + 1) * LAYERS]:
                        x = tf.tanh(x @ weight)
            loss = tf.reduce_mean(tf.square(x))
        for weight, slope in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.1 * slope)
        return loss

    x = tf.random.stateless_normal((ROWS, WIDTH), (3, 4))
    losses = [float(step(x))]
    gc.collect()
    before = memory().live_bytes
    reset_peak()
    losses += [float(step(x)) for _ in range(2)]
    peak = memory().peak_bytes - before
    predicted = wh.memory_report().predicted["step"]
    predicted = sum(predicted.values()) - predicted["parameters"] - predicted["buffers"]
    print(f"{schedule} {recompute}: rank {wh.rank()} holds {peak / ONE:.2f} of a micro-batch's activations, "
          f"predicted {predicted / ONE:.2f}", losses, flush=True)
    wh.shutdown()
    return peak / ONE, predicted / ONE, losses

rank = int(__import__("os").environ["OMPI_COMM_WORLD_RANK"])
found = {name: run(*name.split()) for name in ("1f1b", "gpipe", "gpipe stage")}
for name, (measured, predicted, losses) in found.items():
    assert losses == found["1f1b"][2], found
assert 8 <= found["gpipe"][0] < 10, found
assert found["gpipe stage"][0] < 4 or rank == 1, found
assert 2 - rank <= found["1f1b"][0] < 4 - rank, found
print("done")
"""


def test_1f1b_holds_as_many_micro_batches_as_stages_follow_and_gpipe_all(launcher: Launcher) -> None:
    (launcher.folder / "script.py").write_text(SCRIPT)
    done = launcher.run("-np", "2", "script.py")
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stdout + done.stderr
