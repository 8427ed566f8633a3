"""A Keras model, trained by as many processes as are started; the losses are those of one.

python examples/hello.py                 one process
whale run -np 2 examples/hello.py        two
"""

import keras
import numpy as np

import whale as wh

wh.init()
keras.utils.set_random_seed(1)
x = np.random.default_rng(1).normal(size=(4096, 16)).astype("float32")
y = x[:, :4].argmax(axis=1)  # which of the first four numbers is the largest

model = keras.Sequential([keras.layers.Dense(128, activation="relu"), keras.layers.Dense(4)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
found = model.fit(x, y, batch_size=64, epochs=3, verbose=2)  # 64 rows: of all ranks together

if wh.rank() == 0:
    print(f"{wh.size()} processes: accuracy {found.history['accuracy'][-1]:.1%}")
