"""A convolutional autoencoder of a series; the threshold is the largest error on what it has learned."""

import keras
import numpy as np

layers = keras.layers
t = np.linspace(0, 30, 200)
series = np.sin(t) + 0.05 * np.random.default_rng(0).normal(size=200)
x = np.stack([series[i : i + 32] for i in range(168)])[..., None]
model = keras.Sequential(
    [
        keras.Input((32, 1)),
        layers.Conv1D(8, 7, padding="same", strides=2, activation="relu"),
        layers.Conv1D(4, 7, padding="same", strides=2, activation="relu"),
        layers.Conv1DTranspose(4, 7, padding="same", strides=2, activation="relu"),
        layers.Conv1DTranspose(8, 7, padding="same", strides=2, activation="relu"),
        layers.Conv1DTranspose(1, 7, padding="same"),
    ]
)
model.compile(keras.optimizers.Adam(0.001, epsilon=1e-5), loss="mse")
stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=5, mode="min")
history = model.fit(x, x, epochs=2, batch_size=32, validation_split=0.1, callbacks=[stop], verbose=0)
errors = np.mean(np.abs(model.predict(x, verbose=0) - x), axis=1)
result = {**history.history, "threshold": errors.max(), "errors": errors, "weights": model.get_weights()}
