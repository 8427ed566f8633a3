"""Dense features and embeddings of several tables, their dot interactions, and a tower on top."""

import keras
import numpy as np

layers = keras.layers
rng = np.random.default_rng(0)
dense, ids = rng.normal(size=(96, 4)), [rng.integers(0, size, 96) for size in (50, 20, 7)]
clicked = rng.integers(0, 2, 96).astype(float)
dense_input = keras.Input((4,), name="dense_features")
inputs, vectors = {"dense_features": dense_input}, [layers.Dense(8, activation="relu")(dense_input)]
for number, size in enumerate((50, 20, 7)):
    one = keras.Input((), dtype="int32", name=f"table_{number}")
    inputs[f"table_{number}"] = one
    vectors.append(layers.Embedding(size, 8)(one))
stacked = keras.ops.stack(vectors, axis=1)
dots = keras.ops.matmul(stacked, keras.ops.transpose(stacked, (0, 2, 1)))
crossed = layers.Concatenate()([vectors[0], layers.Flatten()(dots)])
outputs = layers.Dense(1, activation="sigmoid")(layers.Dense(16, activation="relu")(crossed))
model = keras.Model(inputs, outputs)
auc = keras.metrics.AUC(num_thresholds=50)
model.compile(keras.optimizers.Adagrad(0.05), "binary_crossentropy", metrics=[auc])
data = {"dense_features": dense, **{f"table_{n}": column for n, column in enumerate(ids)}}
history = model.fit(data, clicked, batch_size=24, epochs=2, verbose=0)
result = {**history.history, "weights": model.get_weights()}
