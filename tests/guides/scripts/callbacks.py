"""Callbacks: early stopping, checkpoints, two that set rates, a log, and one of its own; then the best weights."""

import csv
import os
import tempfile

import keras
import numpy as np

FOLDER = os.environ.get("PROGRAM_FOLDER", tempfile.mkdtemp())
BEST = os.path.join(FOLDER, "best.weights.h5")
LOG = os.path.join(FOLDER, "log.csv")

rng = np.random.default_rng(3)
x = rng.normal(size=(140, 6))
y = np.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]


class Collected(keras.callbacks.Callback):
    """What a callback sees: batches' losses, rates, and a stop once the loss is low."""

    def on_train_begin(self, logs=None):
        self.batches, self.rates = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))
        if logs["loss"] < 1e-3:
            self.model.stop_training = True


def schedule(epoch, rate):
    return rate if epoch < 2 else rate * 0.9


def network():
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.3), "mse", metrics=["mae"])
    return model


model = network()
collected = Collected()
stopping = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
history = model.fit(
    x,
    y,
    batch_size=24,
    epochs=20,
    validation_split=0.2,
    verbose=0,
    callbacks=[
        stopping,
        keras.callbacks.ModelCheckpoint(BEST, monitor="val_loss", save_best_only=True, save_weights_only=True),
        keras.callbacks.LearningRateScheduler(schedule),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1),
        keras.callbacks.CSVLogger(LOG),
        keras.callbacks.TerminateOnNaN(),
        collected,
    ],
)

best = network()
best.load_weights(BEST)
errors = best.evaluate(x, y, batch_size=24, verbose=0)
predictions = best.predict(x, batch_size=24, verbose=0)
with open(LOG) as file:
    logged = [float(row["val_loss"]) for row in csv.DictReader(file)]

result = {
    **{f"history {key}": values for key, values in history.history.items()},
    "stopped after": stopping.stopped_epoch,
    "batches": collected.batches,
    "rates": collected.rates,
    "logged": logged,
    "best": errors,
    "predictions": predictions,
    "weights": model.get_weights(),
}
