"""Users and films as embeddings with biases, a dot product of a batch's rows, regularised."""

import keras
import numpy as np

layers, ops = keras.layers, keras.ops
rng = np.random.default_rng(0)
pairs = np.stack([rng.integers(0, 30, 200), rng.integers(0, 40, 200)], axis=1)
ratings = rng.uniform(size=200)


class Recommender(keras.Model):
    def __init__(self, users, films, width):
        super().__init__()
        options = {"embeddings_initializer": "he_normal", "embeddings_regularizer": keras.regularizers.l2(1e-3)}
        self.user, self.film = layers.Embedding(users, width, **options), layers.Embedding(films, width, **options)
        self.user_bias, self.film_bias = layers.Embedding(users, 1), layers.Embedding(films, 1)

    def call(self, inputs):
        user, film = inputs[:, 0], inputs[:, 1]
        dots = ops.sum(self.user(user) * self.film(film), axis=1, keepdims=True)
        return ops.nn.sigmoid(dots + self.user_bias(user) + self.film_bias(film))


model = Recommender(30, 40, 6)
model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(0.001, epsilon=1e-5))
history = model.fit(pairs[:160], ratings[:160], batch_size=32, epochs=2, validation_data=(pairs[160:], ratings[160:]),
                    verbose=0)  # fmt: skip
result = {**history.history, "weights": model.get_weights()}
