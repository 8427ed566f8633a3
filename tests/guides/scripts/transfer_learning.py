"""A frozen convolutional base with a new head, and then all of it at a lower rate."""

import keras
import numpy as np

layers = keras.layers
x = np.random.default_rng(0).uniform(size=(60, 16, 16, 3))
y = np.random.default_rng(1).integers(0, 2, 60).astype(float)


def base_model():
    inputs = keras.Input((16, 16, 3))
    h = inputs
    for width in (4, 8):
        h = layers.Conv2D(width, 3, strides=2, padding="same", use_bias=False)(h)
        h = layers.BatchNormalization()(h)
        h = layers.ReLU()(h)
    return keras.Model(inputs, h)


base = base_model()
base.trainable = False
inputs = keras.Input((16, 16, 3))
h = layers.Rescaling(2.0, offset=-1.0)(inputs)
h = base(h, training=False)
h = layers.GlobalAveragePooling2D()(h)
model = keras.Model(inputs, layers.Dense(1)(h))
loss = keras.losses.BinaryCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01, epsilon=1e-5), loss, metrics=[keras.metrics.BinaryAccuracy()])
first = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
base.trainable = True
model.compile(keras.optimizers.Adam(1e-4, epsilon=1e-5), loss, metrics=[keras.metrics.BinaryAccuracy()])
second = model.fit(x, y, batch_size=16, epochs=1, validation_data=(x[:30], y[:30]), verbose=0)
result = {"first": first.history["loss"], **second.history, "weights": model.get_weights()}
