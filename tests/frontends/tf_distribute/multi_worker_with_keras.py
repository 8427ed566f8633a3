"""TensorFlow's tutorial of `fit` on several workers, on generated digits."""

import json
import os

import numpy as np
import tensorflow as tf

per_worker_batch_size = 16
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])

strategy = tf.distribute.MultiWorkerMirroredStrategy()
global_batch_size = per_worker_batch_size * num_workers


def mnist_dataset(batch_size):
    rng = np.random.default_rng(6)
    x = rng.uniform(size=(160, 8, 8)).astype(np.float32)
    y = rng.integers(10, size=160)
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(160, seed=2).repeat().batch(batch_size)


def build_and_compile_cnn_model():
    model = tf.keras.Sequential([
        tf.keras.layers.InputLayer(shape=(8, 8)),
        tf.keras.layers.Reshape(target_shape=(8, 8, 1)),
        tf.keras.layers.Conv2D(4, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(16, activation="relu"),
        tf.keras.layers.Dense(10),
    ])  # fmt: skip
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )
    return model


tf.keras.utils.set_random_seed(9)
multi_worker_dataset = mnist_dataset(global_batch_size)
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()

callbacks = [tf.keras.callbacks.BackupAndRestore(backup_dir="backup")]
history = multi_worker_model.fit(
    multi_worker_dataset, epochs=3, steps_per_epoch=5, callbacks=callbacks, verbose=0
).history
multi_worker_model.save("keras-model.keras")
loaded = tf.keras.models.load_model("keras-model.keras")
weights = [float(np.abs(w).sum()) for w in loaded.get_weights()]
print("RESULT", json.dumps({"loss": history["loss"], "accuracy": history["accuracy"], "weights": weights}))
