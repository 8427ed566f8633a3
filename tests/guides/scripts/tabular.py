"""Columns of strings, integers and floats through preprocessing layers in the pipeline, then a wide and deep model."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
rng = np.random.default_rng(0)
columns = {
    "age": rng.integers(20, 80, 96).astype(float),
    "kind": rng.choice(["a", "b", "c"], 96),
    "rooms": rng.integers(0, 5, 96),
}
target = rng.integers(0, 2, 96).astype(float)
raw = tf.data.Dataset.from_tensor_slices((columns, target)).batch(16)
scale = layers.Normalization(axis=None)
scale.adapt(columns["age"])
look_up = layers.StringLookup(output_mode="one_hot")
look_up.adapt(columns["kind"])
encode = layers.CategoryEncoding(num_tokens=5, output_mode="one_hot")


def prepared(x, y):
    age = tf.expand_dims(scale(x["age"]), -1)
    return {"age": age, "kind": look_up(x["kind"]), "rooms": encode(tf.expand_dims(x["rooms"], -1))}, y


inputs = {"age": keras.Input((1,)), "kind": keras.Input((4,)), "rooms": keras.Input((5,))}
joined = layers.concatenate(list(inputs.values()))
deep = layers.Dense(8, activation="relu")(joined)
outputs = layers.Dense(1, activation="sigmoid")(layers.concatenate([joined, deep]))
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(0.01, epsilon=1e-5), "binary_crossentropy", metrics=["accuracy"])
history = model.fit(raw.map(prepared), epochs=3, verbose=0)
result = {**history.history, "weights": model.get_weights()}
