"""TensorFlow's tutorial of custom loops on several workers, on generated digits."""

import json
import os
import sys

import numpy as np
import tensorflow as tf

sys.path.append(os.getcwd())
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
per_worker_batch_size = 16
global_batch_size = per_worker_batch_size * num_workers
num_epochs, num_steps_per_epoch = 3, 5
checkpoint_dir = os.path.join(os.getcwd(), "ckpt")


def dataset_fn(global_batch_size, input_context):
    rng = np.random.default_rng(2)
    x = rng.uniform(size=(128, 10, 10)).astype(np.float32)
    y = rng.integers(10, size=128)
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(128, seed=1).repeat()
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.batch(batch_size)


def build_cnn_model():
    regularizer = tf.keras.regularizers.L2(1e-4)
    return tf.keras.Sequential([
        tf.keras.Input(shape=(10, 10)),
        tf.keras.layers.Reshape(target_shape=(10, 10, 1)),
        tf.keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer=regularizer),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
    ])  # fmt: skip


with strategy.scope():
    tf.keras.utils.set_random_seed(4)
    multi_worker_dataset = strategy.distribute_datasets_from_function(
        lambda input_context: dataset_fn(global_batch_size, input_context)
    )
    multi_worker_model = build_cnn_model()
    optimizer = tf.keras.optimizers.RMSprop(learning_rate=0.001, epsilon=1e-4)
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function
def train_step(iterator):
    """A step, whose batch it takes itself."""

    def step_fn(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = multi_worker_model(x, training=True)
            loss_batch = loss_fn(y, predictions)
            loss = tf.nn.compute_average_loss(loss_batch)
            if multi_worker_model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(multi_worker_model.losses))
        grads = tape.gradient(loss, multi_worker_model.trainable_variables)
        optimizer.apply_gradients(zip(grads, multi_worker_model.trainable_variables))
        train_accuracy.update_state(y, predictions)
        return loss

    per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


resolver = strategy.cluster_resolver
epoch = tf.Variable(initial_value=tf.constant(0, dtype=tf.dtypes.int64), name="epoch")
step_in_epoch = tf.Variable(initial_value=tf.constant(0, dtype=tf.dtypes.int64), name="step_in_epoch")
task_type, task_id = (resolver.task_type, resolver.task_id) if resolver else (None, None)
cluster_spec = resolver.cluster_spec() if resolver else tf.train.ClusterSpec({})


def _is_chief(task_type, task_id, cluster_spec):
    return (
        task_type is None
        or task_type == "chief"
        or (task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict())
    )


def write_filepath(filepath, task_type, task_id, cluster_spec):
    if _is_chief(task_type, task_id, cluster_spec):
        return filepath
    temporary = os.path.join(os.path.dirname(filepath), "workertemp_" + str(task_id))
    tf.io.gfile.makedirs(temporary)
    return os.path.join(temporary, os.path.basename(filepath))


checkpoint = tf.train.Checkpoint(model=multi_worker_model, epoch=epoch, step_in_epoch=step_in_epoch)
write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id, cluster_spec)
checkpoint_manager = tf.train.CheckpointManager(checkpoint, directory=write_checkpoint_dir, max_to_keep=1)

history = []
while epoch.numpy() < num_epochs:
    iterator = iter(multi_worker_dataset)
    total_loss, num_batches = 0.0, 0
    while step_in_epoch.numpy() < num_steps_per_epoch:
        total_loss += train_step(iterator)
        num_batches += 1
        step_in_epoch.assign_add(1)
    history += [float(total_loss / num_batches), float(train_accuracy.result())]
    train_accuracy.reset_state()
    checkpoint_manager.save()
    if not _is_chief(task_type, task_id, cluster_spec):
        tf.io.gfile.rmtree(write_checkpoint_dir)
    epoch.assign_add(1)
    step_in_epoch.assign(0)

weights = [float(np.abs(w).sum()) for w in multi_worker_model.get_weights()]
print("RESULT", json.dumps({"history": history, "weights": weights}))
