"""TensorFlow's tutorial of custom training under a strategy, on generated images, with every way that it loops."""

import json
import os

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(1)
train_images = rng.uniform(size=(96, 10, 10)).astype(np.float32)[..., None]
train_labels = rng.integers(10, size=96)
test_images = rng.uniform(size=(40, 10, 10)).astype(np.float32)[..., None]
test_labels = rng.integers(10, size=40)

strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

BUFFER_SIZE = len(train_images)
BATCH_SIZE_PER_REPLICA = 32
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 3

train_dataset = (
    tf.data.Dataset.from_tensor_slices((train_images, train_labels))
    .shuffle(BUFFER_SIZE, seed=3)
    .batch(GLOBAL_BATCH_SIZE)
)
test_dataset = tf.data.Dataset.from_tensor_slices((test_images, test_labels)).batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model():
    regularizer = tf.keras.regularizers.L2(1e-3)
    return tf.keras.Sequential([
        tf.keras.layers.Input((10, 10, 1)),
        tf.keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer=regularizer),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
    ])  # fmt: skip


checkpoint_prefix = os.path.join("./training_checkpoints", "ckpt")

with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss


with strategy.scope():
    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

with strategy.scope():
    tf.keras.utils.set_random_seed(5)
    model = create_model()
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.01, epsilon=1e-5)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    t_loss = loss_object(labels, predictions)
    test_loss.update_state(t_loss)
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


history = []
for epoch in range(EPOCHS):
    total_loss, num_batches = 0.0, 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    train_loss = total_loss / num_batches
    for x in test_dist_dataset:
        distributed_test_step(x)
    if epoch % 2 == 0:
        checkpoint.save(checkpoint_prefix)
    history.append(
        [float(v) for v in (train_loss, train_accuracy.result(), test_loss.result(), test_accuracy.result())]
    )
    for metric in (test_loss, train_accuracy, test_accuracy):
        metric.reset_state()

# The latest checkpoint, on a new model.
eval_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
new_model = create_model()
new_optimizer = tf.keras.optimizers.Adam()


@tf.function
def eval_step(images, labels):
    predictions = new_model(images, training=False)
    eval_accuracy(labels, predictions)


tf.train.Checkpoint(optimizer=new_optimizer, model=new_model).restore(
    tf.train.latest_checkpoint("training_checkpoints")
)
for images, labels in test_dataset:
    eval_step(images, labels)
history.append([float(eval_accuracy.result())])

# An iterator, a fixed number of steps.
for _ in range(2):
    total_loss, num_batches = 0.0, 0
    train_iter = iter(train_dist_dataset)
    for _ in range(2):
        total_loss += distributed_train_step(next(train_iter))
        num_batches += 1
    history.append([float(total_loss / num_batches), float(train_accuracy.result())])
    train_accuracy.reset_state()


# A loop inside of a tf.function.
@tf.function
def distributed_train_epoch(dataset):
    total_loss, num_batches = 0.0, 0
    for x in dataset:
        per_replica_losses = strategy.run(train_step, args=(x,))
        total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
        num_batches += 1
    return total_loss / tf.cast(num_batches, dtype=tf.float32)


for _ in range(2):
    history.append([float(distributed_train_epoch(train_dist_dataset)), float(train_accuracy.result())])
    train_accuracy.reset_state()

weights = [float(np.abs(w).sum()) for w in model.get_weights()]
files = sorted(os.listdir("training_checkpoints"))
print("RESULT", json.dumps({"history": [v for values in history for v in values], "weights": weights}))
assert len(files) == 5, files
