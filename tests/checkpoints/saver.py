"""A rank that trains and saves, again and again, until one of them is killed: started by ``tests.checkpoints.kill``.

    whale run -np 2 tests/checkpoints/saver.py PLACE SEED SAID

PLACE is a folder, or a URI of the store of `tests.checkpoints.store`; the file SAID gets the number of each step that
is saved. Every step adds the same to all elements, so that each checkpoint can be checked on its own.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import tensorflow as tf

import whale as wh

ROWS, COLUMNS = 1024, 1024  # 8 MB each, of weight and momentum


def main(place: str, seed: int, said: str) -> None:
    if library := os.environ.get("OBJECT_LIBRARY"):
        tf.experimental.register_filesystem_plugin(library)
    wh.init({"memory.zero": 1, "memory.zero_min_bytes": 0})
    weight = tf.Variable(tf.zeros((ROWS, COLUMNS), tf.float64), name="weight")
    momentum = tf.Variable(tf.zeros((ROWS, COLUMNS), tf.float64), trainable=False, name="momentum")
    done = tf.Variable(0, dtype=tf.int64, trainable=False, name="done")

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(x, weight))
        momentum.assign(momentum + tape.gradient(loss, weight))
        weight.assign_sub(momentum)
        done.assign_add(1)
        return loss

    generator = random.Random(seed)
    checkpoint = tf.train.Checkpoint(weight=weight, momentum=momentum, done=done)
    manager = wh.CheckpointManager(checkpoint, place, 2, asynchronous=generator.random() < 0.5)
    manager.restore_or_initialize()
    victim, fatal, moment = generator.randrange(wh.size()), generator.randrange(2, 5), generator.random()
    x = tf.concat([tf.ones((1, ROWS), tf.float64), tf.zeros((3, ROWS), tf.float64)], 0)
    took_s = 0.1
    for number in range(1, 1000):
        step(x)
        if number == fatal and wh.rank() == victim:
            delay_s = moment * 1.2 * took_s
            threading.Timer(delay_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        start = time.monotonic()
        manager.save(int(done))
        manager.wait()
        took_s = time.monotonic() - start
        if wh.rank() == 0:
            with open(said, "a") as file:
                file.write(f"{int(done)}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
