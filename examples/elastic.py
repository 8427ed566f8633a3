"""Keras' fit that goes on when a process dies: the ranks that are left take the same step again, in their processes.

    whale run -np 3 examples/elastic.py --kill-at 100

The last rank is killed behind its 100th batch, as `kill -9` from another terminal would. The losses are those of one
process all the same, since batches are of all ranks together: `python examples/elastic.py` prints them.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import keras
import numpy as np

import whale as wh


class Killed(keras.callbacks.Callback):
    """Kills the process of the last rank behind a batch, once."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left, self.last = at, wh.rank() == wh.size() - 1 > 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0 and self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kill-at", type=int, default=0, metavar="BATCH", help="kill the last rank behind this batch")
    options = parser.parse_args()

    wh.init(elastic=True)
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(1).normal(size=(4096, 16)).astype("float32")
    y = x[:, :4].argmax(axis=1)
    model = keras.Sequential([keras.layers.Dense(128, activation="relu"), keras.layers.Dense(4)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=options.epochs, verbose=2, callbacks=[Killed(options.kill_at)])
    if wh.rank() == 0:
        print(f"ranks at the end: {wh.size()}")


if __name__ == "__main__":
    main()
