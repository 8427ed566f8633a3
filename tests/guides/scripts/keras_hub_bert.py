"""A BERT backbone of keras_hub with a head, by fit."""

import keras
import keras_hub
import numpy as np

backbone = keras_hub.models.BertBackbone(
    vocabulary_size=50, num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=32, max_sequence_length=12,
    dropout=0.0,
)  # fmt: skip
outputs = keras.layers.Dense(3, activation="softmax")(backbone.output["pooled_output"])
model = keras.Model(backbone.input, outputs)
rng = np.random.default_rng(0)
x = {
    "token_ids": rng.integers(0, 50, (32, 8)),
    "segment_ids": np.zeros((32, 8), "int32"),
    "padding_mask": np.ones((32, 8), "int32"),
}
model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-5), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, rng.integers(0, 3, 32), batch_size=8, epochs=2, verbose=0)
result = {**history.history, "weights": model.get_weights()}
