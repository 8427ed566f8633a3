"""Trains with checkpoints, so that a run which loses a process goes on where it was.

    whale run -np 2 --max-restarts 3 examples/restart.py --folder checkpoints --kill-at 220

The last rank is killed after step 220, as `kill -9` from another terminal would: the run starts again from the last
checkpoint, and ends with the weights that it would have had anyway. Stop it with SIGTERM: it saves, and ends with code
0. Every rank makes the same calls.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import whale as wh

BATCH, FEATURES, CLASSES, SEED = 32, 20, 5, 1


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch of a step: the same whenever, and on whichever rank, it is asked for."""
    generator = np.random.default_rng([SEED, step])
    x = generator.normal(size=(BATCH, FEATURES))
    return x, x[:, :CLASSES].argmax(axis=1).astype(np.int32)


def train(folder: str, steps: int, save_every: int, after_step: Callable[[int], None] = lambda step: None) -> tf.Module:
    """Trains up to step number ``steps``, from the last checkpoint in ``folder`` if there is one. Returns the model."""
    wh.init({"fault.notice_s": 30.0})  # from SIGTERM to the end, as a queue or a cloud gives it
    tf.keras.utils.set_random_seed(SEED)
    with wh.replica():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((FEATURES,)),
                tf.keras.layers.Dense(64, activation="tanh", dtype="float64"),
                tf.keras.layers.Dense(CLASSES, dtype="float64"),
            ]
        )
    optimizer = tf.keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)
    done = tf.Variable(0, dtype=tf.int64, trainable=False, name="done")

    @wh.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x)))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    # All that a later step depends on: weights, the optimizer's state, and how far the run has come.
    manager = wh.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer, done=done), folder, 2)
    path = manager.restore_or_initialize()
    if wh.rank() == 0:
        print(f"attempt {wh.restarts() + 1}: {f'on from {path}' if path else 'from the start'}", flush=True)
    while (number := int(done)) < steps:
        loss = step(*batch(number))
        done.assign_add(1)
        told_to_end = wh.preempted()
        if told_to_end or (number + 1) % save_every == 0:
            manager.save(checkpoint_number=number + 1)
            if wh.rank() == 0:
                print(f"step {number + 1:4d}  loss {float(loss):.4f}  saved", flush=True)
        after_step(number)
        if told_to_end:
            sys.exit(0)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", required=True, help="of the checkpoints; every rank must see it")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill the last rank behind this step, once")
    options = parser.parse_args()

    def after_step(number: int) -> None:
        if number + 1 == options.kill_at and wh.rank() == wh.size() - 1 > 0 == wh.restarts():
            os.kill(os.getpid(), signal.SIGKILL)

    train(options.folder, options.steps, options.save_every, after_step)


if __name__ == "__main__":
    main()
