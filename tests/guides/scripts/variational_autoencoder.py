"""An encoder, a sampling layer with a seed generator, a decoder, and a loss of two parts in train_step."""

import keras
import numpy as np
import tensorflow as tf

layers, ops = keras.layers, keras.ops


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        epsilon = keras.random.normal(shape=ops.shape(mean), dtype=mean.dtype, seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * epsilon


encoder_inputs = keras.Input((8, 8, 1))
h = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(encoder_inputs)
h = layers.Dense(8, activation="relu")(layers.Flatten()(h))
mean, log_var = layers.Dense(2)(h), layers.Dense(2)(h)
encoder = keras.Model(encoder_inputs, [mean, log_var, Sampling()([mean, log_var])])
latent = keras.Input((2,))
h = layers.Reshape((4, 4, 2))(layers.Dense(32, activation="relu")(latent))
h = layers.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same")(h)
decoder = keras.Model(latent, layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(h))


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        names = ("total", "reconstruction", "kl")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            made = self.decoder(z)
            reconstruction = ops.mean(ops.sum(keras.losses.binary_crossentropy(data, made), axis=(1, 2)))
            kl = ops.mean(ops.sum(-0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var)), axis=1))
            total = reconstruction + kl
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights))
        for tracker, value in zip(self.trackers, (total, reconstruction, kl)):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


images = np.random.default_rng(0).uniform(size=(48, 8, 8, 1))
vae = VAE()
vae.compile(optimizer=keras.optimizers.Adam(0.001, epsilon=1e-5))
history = vae.fit(images, epochs=2, batch_size=16, verbose=0)
result = {**history.history, "weights": vae.get_weights()}
