"""A Llama backbone of keras_hub as a language model, by fit."""

import keras
import keras_hub
import numpy as np

backbone = keras_hub.models.LlamaBackbone(
    vocabulary_size=40, num_layers=2, num_query_heads=4, num_key_value_heads=2, hidden_dim=16, intermediate_dim=32
)
model = keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))
ids = np.random.default_rng(0).integers(1, 40, (32, 9))
x = {"token_ids": ids[:, :-1], "padding_mask": np.ones((32, 8), "int32")}
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-5), loss)
history = model.fit(x, ids[:, 1:], batch_size=8, epochs=2, verbose=0)
result = {**history.history, "weights": model.get_weights()}
