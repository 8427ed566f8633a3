"""Retrieval with TensorFlow Recommenders: two towers and its task, whose negatives are the batch's other films."""

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras as keras

rng = np.random.default_rng(0)
users, films = rng.integers(0, 20, 96), rng.integers(0, 30, 96)


class TwoTowers(tfrs.Model):
    def __init__(self):
        super().__init__()
        self.user = keras.Sequential([keras.layers.Embedding(20, 8), keras.layers.Dense(4)])
        # A bias of all films would change no ranking: its gradient is nothing but rounding, which Adagrad makes large.
        self.film = keras.Sequential([keras.layers.Embedding(30, 8), keras.layers.Dense(4, use_bias=False)])
        self.task = tfrs.tasks.Retrieval()

    def compute_loss(self, features, training=False):
        return self.task(self.user(features["user"]), self.film(features["film"]), compute_metrics=not training)


model = TwoTowers()
model.compile(optimizer=keras.optimizers.Adagrad(0.1))
data = tf.data.Dataset.from_tensor_slices({"user": users, "film": films}).batch(24)
history = model.fit(data, epochs=3, verbose=0)
result = {"loss": history.history["loss"], "weights": model.get_weights()}
