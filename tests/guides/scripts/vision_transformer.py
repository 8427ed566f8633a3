"""Patches, their positions, two blocks of attention, and a head over all of them."""

import keras
import numpy as np

layers, ops = keras.layers, keras.ops
rng = np.random.default_rng(0)
x, y = rng.uniform(size=(40, 12, 12, 3)), rng.integers(0, 5, (40, 1))


class Patches(layers.Layer):
    def call(self, images):
        shape = ops.shape(images)
        patches = ops.image.extract_patches(images, size=4)
        return ops.reshape(patches, (shape[0], 9, 48))


class Encoder(layers.Layer):
    def __init__(self, count, width):
        super().__init__()
        self.count, self.projection = count, layers.Dense(width)
        self.positions = layers.Embedding(count, width)

    def call(self, patches):
        return self.projection(patches) + self.positions(ops.expand_dims(ops.arange(self.count), 0))


inputs = keras.Input((12, 12, 3))
h = Encoder(9, 8)(Patches()(inputs))
for _ in range(2):
    a = layers.LayerNormalization(epsilon=1e-6)(h)
    h = layers.Add()([layers.MultiHeadAttention(2, 8, dropout=0.0)(a, a), h])
    f = layers.LayerNormalization(epsilon=1e-6)(h)
    f = layers.Dense(16, activation=keras.activations.gelu)(f)
    h = layers.Add()([layers.Dense(8)(f), h])
h = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(h))
model = keras.Model(inputs, layers.Dense(5)(layers.Dense(16, activation="gelu")(h)))
model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=0.001, weight_decay=0.0001, epsilon=1e-5),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(x=x, y=y, batch_size=10, epochs=2, validation_split=0.2, verbose=0)
result = {**history.history, "weights": model.get_weights()}
