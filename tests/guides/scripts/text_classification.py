"""Raw strings through tf.data and TextVectorization to a one-dimensional convolution; then end to end from strings."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
words = np.array("good bad fine poor great awful film book actor plot".split())
rng = np.random.default_rng(0)
texts = np.array([" ".join(rng.choice(words, 6)) for _ in range(64)])
labels = np.array([float(("good" in t) or ("great" in t)) for t in texts])
raw = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(16)
vectorize = layers.TextVectorization(max_tokens=20, output_sequence_length=8)
vectorize.adapt(raw.map(lambda text, label: text))
train = raw.map(lambda text, label: (vectorize(tf.expand_dims(text, -1)), label)).cache().prefetch(2)

inputs = keras.Input((None,), dtype="int64")
h = layers.Embedding(20, 8)(inputs)
h = layers.Conv1D(8, 3, padding="valid", activation="relu")(h)
h = layers.GlobalMaxPooling1D()(h)
outputs = layers.Dense(1, activation="sigmoid")(layers.Dense(8, activation="relu")(h))
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(0.01, epsilon=1e-5), "binary_crossentropy", metrics=["accuracy"])
history = model.fit(train, epochs=3, validation_data=train.take(2), verbose=0)

strings = keras.Input((1,), dtype="string")
end_to_end = keras.Model(strings, model(vectorize(strings)))
end_to_end.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
result = {**history.history, "test": end_to_end.evaluate(raw, verbose=0), "weights": model.get_weights()}
