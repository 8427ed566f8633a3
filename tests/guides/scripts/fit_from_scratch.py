"""A model with a train_step, a test_step and metrics of its own; a dense network with dropout-free layers."""

import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(0).normal(size=(90, 12))
y = x @ np.random.default_rng(1).normal(size=(12, 1))


class Custom(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_seen = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y, weight = data if len(data) == 3 else (*data, None)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.loss_fn(y, predicted, sample_weight=weight)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.loss_seen.update_state(loss)
        self.mae.update_state(y, predicted, sample_weight=weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, y = data
        predicted = self(x, training=False)
        self.loss_seen.update_state(self.loss_fn(y, predicted))
        self.mae.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}

    @property
    def metrics(self):
        return [self.loss_seen, self.mae]


inputs = keras.Input((12,))
model = Custom(inputs, keras.layers.Dense(1)(keras.layers.Dense(16, activation="relu")(inputs)))
model.compile(optimizer=keras.optimizers.Adam(0.01, epsilon=1e-5))
history = model.fit(x, y, sample_weight=np.linspace(0.5, 1.5, 90), batch_size=20, epochs=3, verbose=0)
result = {**history.history, "test": model.evaluate(x[:50], y[:50], verbose=0), "weights": model.get_weights()}
