"""Augmentation layers in the input pipeline, a network of residual blocks, dropout."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
rng = np.random.default_rng(0)
images, labels = rng.uniform(size=(48, 12, 12, 3)), rng.integers(0, 2, 48).astype(float)
flip = layers.RandomFlip("horizontal", seed=1)
data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(12)
data = data.map(lambda x, y: (flip(x, training=False), y)).prefetch(2)
inputs = keras.Input((12, 12, 3))
h = layers.Rescaling(1.0 / 2)(inputs)
h = layers.Conv2D(8, 3, padding="same", activation="relu")(h)
skip = h
h = layers.Conv2D(8, 3, padding="same", activation="relu")(h)
h = layers.Conv2D(8, 3, padding="same", activation="relu")(h)
h = layers.GlobalAveragePooling2D()(layers.add([h, skip]))
h = layers.Dropout(0.5, seed=7)(h)
model = keras.Model(inputs, layers.Dense(1, activation=None)(h))
loss = keras.losses.BinaryCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3, epsilon=1e-5), loss, metrics=[keras.metrics.BinaryAccuracy(name="acc")])
history = model.fit(data, epochs=2, validation_data=data.take(2), verbose=0)
result = {**history.history, "weights": model.get_weights()}
