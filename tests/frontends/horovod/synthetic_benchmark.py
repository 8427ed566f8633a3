"""Horovod's synthetic benchmark for TensorFlow 2, of a small model: a tf.function with the distributed tape."""

import json
import sys
import timeit

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()

inputs = tf.keras.Input([16, 16, 3])
found = tf.keras.layers.Conv2D(8, 3, activation="relu")(inputs)
found = tf.keras.layers.GlobalAveragePooling2D()(found)
model = tf.keras.Model(inputs, tf.keras.layers.Dense(10, activation="softmax")(found))
opt = tf.keras.optimizers.SGD(0.01)
# Other weights on each rank, until they are broadcast; rank 0's are those of one process.
rng = np.random.default_rng(3 + hvd.rank())
model.set_weights([rng.normal(size=w.shape) * 0.3 for w in model.get_weights()])

rng = np.random.default_rng(5)
batch = 32 // hvd.size()
data = rng.uniform(size=(32, 16, 16, 3)).astype(np.float32)[hvd.rank() * batch :][:batch]
target = rng.integers(10, size=(32, 1))[hvd.rank() * batch :][:batch]
data, target = tf.constant(data), tf.constant(target)


@tf.function
def benchmark_step():
    compression = hvd.Compression.fp16 if "--fp16-allreduce" in sys.argv else hvd.Compression.none
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(target, probs))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables))
    return hvd.allreduce(loss, name="loss")


opt.build(model.trainable_variables)
hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(opt.variables, root_rank=0)
losses = [float(benchmark_step()) for _ in range(12)]
seconds = timeit.timeit(benchmark_step, number=3)
if hvd.rank() == 0:
    print(f"Img/sec per CPU: {batch * 3 / seconds:.1f}")
    print("RESULT", json.dumps({"loss": losses}))
