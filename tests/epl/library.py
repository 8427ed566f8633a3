"""Eleven of the library's own tests as scripts: what they look at, with values that one device can be compared with."""

from __future__ import annotations

import importlib
import os
import tempfile
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tests.epl.model import BATCH, CLASSES, WIDTH, Rows, cross_entropy, dense, train

Result = dict[str, list[float]]


def accumulation(epl: Any, rows: Rows, runs: int) -> Result:
    """One task graph and several micro-batches: an update for every so many runs, and the step counts updates."""
    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    epl.set_default_strategy(epl.replicate(1))
    x, labels = rows.next()
    loss = cross_entropy(labels, dense(x, CLASSES, "logits"))
    step = tf.train.get_or_create_global_step()
    train_op = tf.train.MomentumOptimizer(0.2, 0.9).minimize(loss, step)
    hook = tf.train.StopAtStepHook(last_step=rows.updates + 1)
    found = train(loss, train_op, runs, hooks=[hook])
    means = np.reshape(found["loss"], [rows.updates, -1]).mean(1)
    return {**found, "loss": means.tolist()}


def collections(epl: Any, rows: Rows, runs: int) -> Result:
    """Values of replicas merged by concatenation, mean and sum."""
    epl.init()
    with epl.Cluster(worker_hosts="127.0.0.1:8001", worker_index=0), epl.replicate(device_count=1):
        x, labels = rows.next()
        epl.add_to_collection([x, labels], epl.GraphKeys.GLOBAL_CONCAT_OBJECTS)
        logits = dense(x, CLASSES, "logits")
        loss = cross_entropy(labels, logits)
        epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
        right = tf.cast(tf.equal(tf.argmax(logits, 1), tf.cast(labels, tf.int64)), tf.float64)
        _, accuracy = tf.metrics.accuracy(tf.cast(labels, tf.int64), tf.argmax(logits, 1))
        epl.add_to_collection(accuracy, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
        count, mean = tf.reduce_sum(right), tf.reduce_mean(right)
        epl.add_to_collection(count, epl.GraphKeys.GLOBAL_SUM_OBJECTS)
        sum_of_means, mean_of_counts = mean * 1.0, count * 1.0
        epl.add_to_collection(sum_of_means, epl.GraphKeys.GLOBAL_SUM_OBJECTS)
        epl.add_to_collection(mean_of_counts, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
        if rows.mine is None:
            sum_of_means, mean_of_counts = mean * rows.replicas, count / rows.replicas
        train_op = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    return train(loss, train_op, runs, [x, labels, accuracy, count, sum_of_means, mean_of_counts])


def sum_of_gradients(epl: Any, rows: Rows, runs: int) -> Result:
    """gradients_reduce_method: as many times the mean as there are replicas."""
    epl.init(epl.Config({"communication.gradients_reduce_method": "SUM"}))
    epl.set_default_strategy(epl.replicate(1))
    x, labels = rows.next()
    loss = cross_entropy(labels, dense(x, CLASSES, "logits"))
    rate = 0.1 * rows.replicas if rows.mine is None else 0.1
    return train(loss, tf.train.GradientDescentOptimizer(rate).minimize(loss), runs)


def clip(epl: Any, rows: Rows, runs: int) -> Result:
    """Gradients that are clipped by their norm and scaled by hand before they are applied."""
    conf = epl.Config()
    conf.communication.clip_after_allreduce = True
    epl.init(conf)
    epl.set_default_strategy(epl.replicate(1))
    x, labels = rows.next()
    loss = cross_entropy(labels, dense(dense(x, 10, "first", tf.tanh), CLASSES, "logits"))
    variables = tf.trainable_variables()
    slopes, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), clip_norm=0.05)
    slopes = [slope * 0.5 for slope in slopes]
    train_op = tf.train.AdamOptimizer(learning_rate=0.01).apply_gradients(list(zip(slopes, variables)))
    return train(loss, train_op, runs)


def split_layer(epl: Any, rows: Rows, runs: int) -> Result:
    """A layer of experts: made in one split scope, used in another, with shapes that the script sets."""
    config = epl.Config()
    config.optimizer.num_apply_group = 3
    config.cluster.colocate_split_and_replicate = True
    epl.init(config)
    workers = epl.Env.get().cluster.worker_num
    epl.set_default_strategy(epl.replicate(workers))
    x, labels = rows.next()
    x.set_shape([BATCH if rows.mine is not None else None, WIDTH])
    with epl.split(workers):
        start = np.random.default_rng(5).normal(size=(4, WIDTH, 6)) / 4
        inner = tf.get_variable("in_weights", start.shape, tf.float64, tf.constant_initializer(start))
        outer = tf.get_variable("out_weights", [4, 6, WIDTH], tf.float64, tf.constant_initializer(start.swapaxes(1, 2)))
    with epl.split():
        hidden = tf.nn.relu(tf.einsum("GM,EMH->EGH", x, inner, name="inter_outputs"))
        outputs = tf.einsum("EGH,EHM->EGM", hidden, outer, name="outputs")
        outputs = tf.einsum("GE,EGM->GM", tf.nn.softmax(x[:, :4]), outputs, name="combined_outputs")
    loss = cross_entropy(labels, dense(outputs, CLASSES, "logits"))
    return train(loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss), runs)


def saver(epl: Any, rows: Rows, runs: int) -> Result:
    """A first model is saved; a second one with three layers begins with its one, under other names."""
    loader = getattr(epl, "ShardingLoader", None)
    if loader is None:
        loader = importlib.import_module("whale.epl.runtime.saver").ShardingLoader
    epl.init()
    epl.set_default_strategy(epl.replicate(1))
    folder = tempfile.mkdtemp(dir=os.environ["EPL_TEST_FOLDER"])
    x, labels = rows.next()
    loss = cross_entropy(labels, dense(dense(x, WIDTH, "layer_0", tf.tanh), CLASSES, "logits"))
    train_op = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    keeper = tf.train.Saver(tf.trainable_variables())
    with tf.train.MonitoredTrainingSession() as session:
        for _ in range(runs):
            session.run(train_op)
        raw = session
        while hasattr(raw, "_sess"):
            raw = raw._sess
        path = keeper.save(raw, f"{folder}/model.ckpt")
    epl.init()
    with tf.Graph().as_default():
        epl.set_default_strategy(epl.replicate(1))
        x, labels = rows.next()
        h = x
        for number in range(3):
            h = dense(h, WIDTH, f"layer_{number}", tf.tanh)
        loss = cross_entropy(labels, dense(h, CLASSES, "logits"))
        names = {v.op.name: v.op.name.replace("layer_1", "layer_0").replace("layer_2", "layer_0")
                 for v in tf.trainable_variables()}  # fmt: skip
        loader(path, tf.trainable_variables(), names).restore()
        return train(loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss), runs)


def custom_optimizer(epl: Any, rows: Rows, runs: int) -> Result:
    """An optimizer with an apply_gradients of its own, and gradients that are accumulated."""

    class Own(tf.train.AdamOptimizer):
        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
            updates = [v.assign(v - self._lr * g) for g, v in grads_and_vars if g is not None]
            return tf.group(*updates, name=name)

    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    epl.set_default_strategy(epl.replicate(1))
    x, labels = rows.next()
    loss = cross_entropy(labels, dense(x, CLASSES, "logits"))
    found = train(loss, Own(0.3).minimize(loss), runs)
    return {**found, "loss": np.reshape(found["loss"], [rows.updates, -1]).mean(1).tolist()}


def summaries(epl: Any, rows: Rows, runs: int) -> Result:
    """Summaries of two stages show merged values."""
    epl.init(epl.Config({"pipeline.num_micro_batch": 1}))
    with epl.replicate(device_count=1):
        x, labels = rows.next()
        h = dense(x, 10, "first", tf.tanh)
    with epl.replicate(device_count=1):
        logits = dense(h, CLASSES, "logits")
        loss = cross_entropy(labels, logits)
        total = tf.reduce_sum(logits * logits)
        mean = total * 1.0
        epl.add_to_collection(mean, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
        shown = mean / rows.replicas if rows.mine is None else mean
        tf.summary.scalar("mean_of_sums", shown)
        written = tf.summary.merge_all()
    found = train(loss, tf.train.GradientDescentOptimizer(0.2).minimize(loss), runs, [shown, loss])
    assert written is not None
    return found


def sliced_files(epl: Any, rows: Rows, runs: int) -> Result:
    """Each replica reads files of its own."""
    config = epl.Config()
    config.io.slicing = True
    epl.init(config)
    epl.set_default_strategy(epl.replicate(1))
    folder, count = tempfile.mkdtemp(dir=os.environ["EPL_TEST_FOLDER"]), rows.replicas * rows.updates
    files = [f"{folder}/part-{k}" for k in range(count)]
    for k, name in enumerate(files):
        with open(name, "w") as file:
            file.writelines(f"{row}\n" for row in range(k * BATCH, (k + 1) * BATCH))

    def row(line: Any) -> Any:
        number = tf.strings.to_number(line, tf.int64)
        return tf.gather(tf.constant(rows.x), number), tf.gather(tf.constant(rows.y), number)

    each = BATCH * (rows.replicas if rows.mine is None else 1)
    iterator = tf.data.make_initializable_iterator(tf.data.TextLineDataset(files).map(row).batch(each))
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    x, labels = iterator.get_next()
    loss = cross_entropy(labels, dense(x, CLASSES, "logits"))
    return train(loss, tf.train.GradientDescentOptimizer(0.3).minimize(loss), runs)


def estimator(epl: Any, rows: Rows, runs: int) -> Result:
    """An Estimator trains, and evaluates the checkpoint that the first rank has written."""
    epl.init()
    epl.set_default_strategy(epl.replicate(1))

    def input_fn() -> Any:
        x, y, each = rows.arrays()
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(each)

    def model_fn(features: Any, labels: Any, mode: Any) -> Any:
        loss = cross_entropy(labels, dense(features, CLASSES, "logits"))
        train_op = None
        if mode == tf.estimator.ModeKeys.TRAIN:
            step = tf.train.get_or_create_global_step()
            train_op = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=step)
            epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = tf.estimator.RunConfig(save_checkpoints_steps=2, model_dir=os.environ["EPL_TEST_FOLDER"])
    made = tf.estimator.Estimator(model_fn, config=config)
    made.train(input_fn, max_steps=runs)
    found = made.evaluate(input_fn)
    assert int(found["global_step"]) == runs
    return {"kernel": np.ravel(made.get_variable_value("logits/kernel")).tolist()}


def twice(epl: Any, rows: Rows, runs: int) -> Result:
    """The library is started again with another graph and other settings, and everything before is forgotten."""
    epl.init(epl.Config({"pipeline.num_micro_batch": 4}))
    with tf.Graph().as_default(), epl.replicate(1):
        dense(rows.next()[0], 3, "forgotten")
    epl.init()
    with tf.Graph().as_default(), epl.Cluster():
        with epl.replicate(1):
            x, labels = rows.next()
            loss = cross_entropy(labels, dense(x, CLASSES, "logits"))
        return train(loss, tf.train.GradientDescentOptimizer(0.3).minimize(loss), runs)


def specific_cluster(epl: Any, rows: Rows, runs: int) -> Result:
    """Stages on the devices that the script names."""
    epl.init(epl.Config({"pipeline.num_micro_batch": 2}))
    devices = [[["/job:worker/replica:0/task:1/device:GPU:0"]], [["/job:worker/replica:0/task:0/device:GPU:0"]]]
    with epl.Cluster(layout={"specific": devices}):
        with epl.replicate(1):
            x, labels = rows.next()
            h = dense(x, 10, "first", tf.tanh)
        with epl.replicate(1):
            loss = cross_entropy(labels, dense(h, CLASSES, "logits"))
        return train(loss, tf.train.MomentumOptimizer(0.2, 0.9).minimize(loss), runs)


def auto_pipeline(epl: Any, rows: Rows, runs: int) -> Result:
    """Stages that are looked for; a run takes all micro-batches."""
    epl.init(epl.Config({"auto.auto_parallel": True, "pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}))
    x, labels = rows.next()
    h = dense(dense(x, 16, "first", tf.tanh), 16, "second", tf.tanh)
    loss = cross_entropy(labels, dense(dense(h, 16, "third", tf.tanh), CLASSES, "logits"))
    train_op = tf.train.AdamOptimizer(0.01).minimize(loss, tf.train.get_or_create_global_step())
    return train(loss, train_op, runs)
