"""BERT for sequence classification by fit, from a configuration."""

import numpy as np
import tensorflow as tf
import tf_keras as keras
from transformers import BertConfig, TFBertForSequenceClassification

config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
)  # fmt: skip
model = TFBertForSequenceClassification(config)
rng = np.random.default_rng(0)
x = {"input_ids": rng.integers(0, 50, (32, 8)), "attention_mask": np.ones((32, 8), "int64")}
data = tf.data.Dataset.from_tensor_slices((x, rng.integers(0, 3, 32))).batch(8)
model.compile(
    optimizer=keras.optimizers.Adam(1e-3, epsilon=1e-5),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(data, epochs=2, verbose=0)
result = {**history.history, "weights": model.get_weights()}
