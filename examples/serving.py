"""Trains on all ranks, exports one SavedModel, and answers with it in a process that does not have Whale.

whale run -np 2 examples/serving.py --folder exported
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import keras
import numpy as np

import whale as wh

ASK = """
import sys
import numpy as np, tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
x = np.random.default_rng(2).normal(size=(256, 16)).astype("float32")
right = np.argmax(model.serve(x), axis=1) == x[:, :4].argmax(axis=1)
assert "whale" not in sys.modules
print(f"served without Whale: {right.mean():.1%} of 256 right")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", required=True, help="of the SavedModel; every rank must see it")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    wh.init()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(1).normal(size=(4096, 16)).astype("float32")
    y = x[:, :4].argmax(axis=1)  # which of the first four numbers is the largest
    model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(128, activation="relu")])
    with wh.split():
        model.add(keras.layers.Dense(4))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=options.epochs, verbose=2)

    wh.export(model, options.folder)  # every rank calls it, one writes
    if wh.rank() == 0:
        line = [sys.executable, "-c", ASK, options.folder]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        print(done.stdout, end="", flush=True)


if __name__ == "__main__":
    main()
