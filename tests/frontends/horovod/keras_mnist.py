"""Horovod's example for Keras, on generated digits: `fit` with the distributed optimizer and all callbacks."""

import json
import sys

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()

gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

rng = np.random.default_rng(7)
images = rng.uniform(size=(256, 12, 12)).astype(np.float32)
labels = rng.integers(10, size=256)
dataset = tf.data.Dataset.from_tensor_slices((images[..., np.newaxis], labels)).repeat().batch(32 // hvd.size())
dataset = dataset.shard(hvd.size(), hvd.rank())  # of each 32 rows, the rank's own

tf.keras.utils.set_random_seed(11)
model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
    tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(16, activation="relu"),
    tf.keras.layers.Dense(10, activation="softmax"),
])  # fmt: skip

# The rate that the example would have for two workers, in one process as well.
scaled_lr = 0.001 * 2
opt = tf.keras.optimizers.Adam(scaled_lr, epsilon=1e-6)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
if "--warmup" in sys.argv:
    callbacks.append(hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1))
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.keras"))

history = model.fit(
    dataset, steps_per_epoch=8, callbacks=callbacks, epochs=3, verbose=2 if hvd.rank() == 0 else 0
).history
if hvd.rank() == 0:
    weights = [float(np.abs(w).sum()) for w in model.get_weights()]
    print("RESULT", json.dumps({"loss": history["loss"], "accuracy": history["accuracy"], "weights": weights}))
