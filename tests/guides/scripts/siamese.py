"""An embedding shared by three inputs, a layer of distances, and a triplet loss in train_step."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
rng = np.random.default_rng(0)
anchor = rng.normal(size=(48, 8, 8, 3))
positive, negative = anchor + 0.1 * rng.normal(size=anchor.shape), rng.normal(size=anchor.shape)

embedding = keras.Sequential(
    [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(6)]
)


class Distance(layers.Layer):
    def call(self, anchor, positive, negative):
        return (
            tf.reduce_sum(tf.square(anchor - positive), -1),
            tf.reduce_sum(tf.square(anchor - negative), -1),
        )


inputs = [keras.Input((8, 8, 3), name=name) for name in ("anchor", "positive", "negative")]
network = keras.Model(inputs, Distance()(*(embedding(one) for one in inputs)))


class Siamese(keras.Model):
    def __init__(self, network, margin=50.0):
        super().__init__()
        self.network, self.margin = network, margin
        self.seen = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.network(inputs)

    def _loss(self, data):
        near, far = self.network(data)
        return tf.reduce_mean(tf.maximum(near - far + self.margin, 0.0))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.seen.update_state(loss)
        return {"loss": self.seen.result()}

    def test_step(self, data):
        self.seen.update_state(self._loss(data))
        return {"loss": self.seen.result()}

    @property
    def metrics(self):
        return [self.seen]


data = tf.data.Dataset.from_tensor_slices((anchor, positive, negative)).batch(12)
model = Siamese(network)
model.compile(optimizer=keras.optimizers.Adam(0.001, epsilon=1e-5))
history = model.fit(data, epochs=2, validation_data=data.take(2), verbose=0)
result = {**history.history, "weights": embedding.get_weights()}
