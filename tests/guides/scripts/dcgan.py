"""A generator and a discriminator of convolutions in one train_step."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
images = np.random.default_rng(0).uniform(size=(48, 8, 8, 1))
noise = np.random.default_rng(1).normal(size=(48, 6))

judge = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(4, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Flatten(),
        layers.Dense(1, activation="sigmoid"),
    ]
)
maker = keras.Sequential(
    [
        keras.Input((6,)),
        layers.Dense(4 * 4 * 4),
        layers.Reshape((4, 4, 4)),
        layers.Conv2DTranspose(4, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(1, 5, padding="same", activation="sigmoid"),
    ]
)


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.judge, self.maker = judge, maker
        self.judged, self.made = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.judged, self.made]

    def train_step(self, data):
        real, noise = data
        both = tf.concat([self.maker(noise), real], axis=0)
        labels = tf.concat([tf.ones((tf.shape(real)[0], 1)), tf.zeros((tf.shape(real)[0], 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.judge(both))
        weights = self.judge.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((tf.shape(real)[0], 1)), self.judge(self.maker(noise)))
        weights = self.maker.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        self.judged.update_state(d_loss)
        self.made.update_state(g_loss)
        return {"d_loss": self.judged.result(), "g_loss": self.made.result()}


gan = GAN()
adam = keras.optimizers.Adam
gan.compile(adam(1e-3, epsilon=1e-5), adam(1e-3, epsilon=1e-5), keras.losses.BinaryCrossentropy())
history = gan.fit(images, noise, batch_size=16, epochs=2, verbose=0)
result = {**history.history, "weights": judge.get_weights() + maker.get_weights()}
