"""Spectra of windows made in the pipeline by signal processing, and one-dimensional residual blocks."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
rng = np.random.default_rng(0)
waves, speakers = rng.normal(size=(48, 128)).astype("float32"), rng.integers(0, 3, 48)
data = tf.data.Dataset.from_tensor_slices((waves, speakers)).shuffle(48, seed=9).batch(12)


def spectrum(wave, speaker):
    transformed = tf.signal.fft(tf.cast(tf.complex(real=wave, imag=tf.zeros_like(wave)), tf.complex64))
    return tf.math.abs(transformed[:, :64])[..., tf.newaxis], speaker


data = data.map(spectrum, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
inputs = keras.Input((64, 1))
h = inputs
for width in (4, 8):
    skip = layers.Conv1D(width, 1, padding="same")(h)
    h = layers.Conv1D(width, 3, padding="same", activation="relu")(h)
    h = layers.Conv1D(width, 3, padding="same")(h)
    h = layers.MaxPool1D(pool_size=2, strides=2)(layers.Activation("relu")(layers.Add()([h, skip])))
h = layers.Flatten()(layers.AveragePooling1D(pool_size=3, strides=3)(h))
model = keras.Model(inputs, layers.Dense(3, activation="softmax")(layers.Dense(16, activation="relu")(h)))
model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-5), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(data, epochs=2, validation_data=data.take(1), verbose=0)
result = {**history.history, "weights": model.get_weights()}
