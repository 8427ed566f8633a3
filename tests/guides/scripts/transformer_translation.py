"""An encoder and a decoder with cross attention and causal masks, teacher forced, on pairs of token sequences."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
rng = np.random.default_rng(0)
source = rng.integers(1, 20, (48, 7))
target = np.concatenate([np.ones((48, 1), int), (source + 1) % 20], axis=1)


class Positional(layers.Layer):
    def __init__(self, length, vocabulary, width):
        super().__init__()
        self.tokens, self.positions = layers.Embedding(vocabulary, width), layers.Embedding(length, width)
        self.length = length

    def call(self, inputs):
        return self.tokens(inputs) + self.positions(tf.range(self.length))

    def compute_output_shape(self, shape):
        return (*shape, self.tokens.output_dim)


def feed_forward(h, width):
    inner = layers.Dense(width)(layers.Dense(2 * width, activation="relu")(h))
    return layers.LayerNormalization()(h + inner)


encoder_inputs = keras.Input((7,), dtype="int64")
h = Positional(7, 20, 8)(encoder_inputs)
h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h))
encoded = feed_forward(h, 8)
decoder_inputs = keras.Input((7,), dtype="int64")
h = Positional(7, 20, 8)(decoder_inputs)
h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True))
h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, encoded))
outputs = layers.Dense(20)(feed_forward(h, 8))
model = keras.Model({"encoder_inputs": encoder_inputs, "decoder_inputs": decoder_inputs}, outputs)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
model.compile(keras.optimizers.RMSprop(0.01, epsilon=1e-5), loss=loss, metrics=["accuracy"])
pairs = tf.data.Dataset.from_tensor_slices(
    ({"encoder_inputs": source, "decoder_inputs": target[:, :-1]}, target[:, 1:])
)
history = model.fit(pairs.shuffle(48, seed=3).batch(16).prefetch(2), epochs=2, verbose=0)
result = {**history.history, "weights": model.get_weights()}
