"""Windows of a series by timeseries_dataset_from_array, forecast by an LSTM; checkpoint and early stopping."""

import os
import tempfile

import keras
import numpy as np

t = np.arange(300.0)
series = np.stack([np.sin(t / 9), np.cos(t / 5), t / 300], axis=1)
mean, std = series[:200].mean(0), series[:200].std(0)
series = (series - mean) / std


def windows(begin, end):
    return keras.utils.timeseries_dataset_from_array(
        series[begin:end], series[begin + 24 : end, 1], sequence_length=20, sampling_rate=1, batch_size=32
    )


train, valid = windows(0, 200), windows(200, 300)
inputs = keras.layers.Input((20, 3))
outputs = keras.layers.Dense(1)(keras.layers.LSTM(8)(inputs))
model = keras.Model(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(0.01, epsilon=1e-5), loss="mse")
path = os.path.join(os.environ.get("PROGRAM_FOLDER", tempfile.mkdtemp()), "best.weights.h5")
stop = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=2)
keep = keras.callbacks.ModelCheckpoint(path, monitor="val_loss", save_weights_only=True, save_best_only=True)
history = model.fit(train, epochs=3, validation_data=valid, callbacks=[stop, keep], verbose=0)
model.load_weights(path)
result = {**history.history, "predicted": model.predict(valid, verbose=0), "weights": model.get_weights()}
