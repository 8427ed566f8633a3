"""GPT2's language model by fit with the loss that it computes itself."""

import numpy as np
import tensorflow as tf
import tf_keras as keras
from transformers import GPT2Config, TFGPT2LMHeadModel

config = GPT2Config(
    vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = TFGPT2LMHeadModel(config)
ids = np.random.default_rng(0).integers(0, 40, (32, 8))
data = tf.data.Dataset.from_tensor_slices({"input_ids": ids, "labels": ids}).batch(8)
model.compile(optimizer=keras.optimizers.Adam(1e-3, epsilon=1e-5))
history = model.fit(data, epochs=2, verbose=0)
result = {**history.history, "weights": model.get_weights()}
