"""The library's eight tutorials, on small models and generated rows: the annotations are those of its documentation."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tests.epl.model import CLASSES, WIDTH, Rows, cross_entropy, dense, train

Result = dict[str, list[float]]


def quick_start(epl: Any, rows: Rows, runs: int) -> Result:
    epl.init()
    epl.set_default_strategy(epl.replicate(1))

    x, labels = rows.next()
    logits = dense(dense(x, 2, "first"), CLASSES, "logits")
    loss = cross_entropy(labels, logits)
    global_step = tf.train.get_or_create_global_step()
    optimizer = tf.train.MomentumOptimizer(learning_rate=0.1, momentum=0.9)
    return train(loss, optimizer.minimize(loss, global_step=global_step), runs)


def data_parallelism(epl: Any, rows: Rows, runs: int) -> Result:
    """A convolution with a residual, for ResNet."""
    epl.init()
    epl.set_default_strategy(epl.replicate(device_count=1))

    x, labels = rows.next(drop_remainder=True)
    image = tf.reshape(x, [-1, 2, WIDTH // 2, 1])
    start = np.random.default_rng(1).normal(size=(2, 3, 1, 4)) / 3
    kernel = tf.get_variable("conv", start.shape, tf.float64, tf.constant_initializer(start))
    h = tf.nn.relu(tf.nn.conv2d(image, kernel, strides=1, padding="SAME")) + image
    loss = cross_entropy(labels, dense(tf.reduce_mean(h, [1, 2]), CLASSES, "logits"))
    train_op = tf.train.AdamOptimizer(0.01).minimize(loss, tf.train.get_or_create_global_step())
    return train(loss, train_op, runs)


def pipeline(epl: Any, rows: Rows, runs: int) -> Result:
    """Two stages by set_default_strategy, for BERT."""
    epl.init(epl.Config({"pipeline.num_micro_batch": 4}))
    epl.set_default_strategy(epl.replicate(1))
    x, labels = rows.next()
    h = dense(dense(x, 10, "first", tf.tanh), 6, "second", tf.tanh)
    epl.set_default_strategy(epl.replicate(1))
    loss = cross_entropy(labels, dense(dense(h, 9, "third", tf.tanh), CLASSES, "fourth"))
    variables = tf.trainable_variables()
    slopes, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), clip_norm=0.3)
    train_op = tf.train.AdamOptimizer(0.01).apply_gradients(
        list(zip(slopes, variables)), tf.train.get_or_create_global_step()
    )
    return train(loss, train_op, runs)


def experts(epl: Any, x: Any, scope: Any) -> Any:
    """Four experts between a gate and what combines them; their weights are made in a split scope."""
    gates = tf.nn.softmax(dense(x, 4, "gate"))
    with scope():
        start = np.random.default_rng(2).normal(size=(4, WIDTH, WIDTH)) / 4
        inner = tf.get_variable("in_weights", start.shape, tf.float64, tf.constant_initializer(start))
        outer = tf.get_variable("out_weights", start.shape, tf.float64, tf.constant_initializer(start[::-1]))
    sent = tf.einsum("BE,BM->EBM", gates, x)
    hidden = tf.nn.relu(tf.einsum("EBM,EMH->EBH", sent, inner))
    back = tf.einsum("EBH,EHM->EBM", hidden, outer)
    return tf.einsum("BE,EBM->BM", gates, back)


def mixture_of_experts(epl: Any, rows: Rows, runs: int) -> Result:
    config = epl.Config({"cluster.colocate_split_and_replicate": True})
    epl.init(config)
    total_gpu_num = epl.Env.get().cluster.total_gpu_num
    epl.set_default_strategy(epl.replicate(total_gpu_num))
    x, labels = rows.next()
    h = dense(x, WIDTH, "attention", tf.tanh)
    h = h + experts(epl, h, lambda: epl.split(total_gpu_num))
    loss = cross_entropy(labels, dense(h, CLASSES, "logits"))
    return train(loss, tf.train.GradientDescentOptimizer(0.3).minimize(loss), runs)


def api_data_parallelism(epl: Any, rows: Rows, runs: int) -> Result:
    epl.init()
    with epl.replicate(device_count=1):
        x, labels = rows.next()
        # A sum: replicas' gradients are averaged, so that a sum over all rows is one over a replica's on average.
        loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, dense(x, CLASSES, "logits")))
        if rows.mine is None:
            loss = loss / rows.replicas
        epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)
    return train(loss, tf.train.GradientDescentOptimizer(0.05).minimize(loss), runs)


def api_pipeline(epl: Any, rows: Rows, runs: int) -> Result:
    """Two stages, replicated where there are four devices."""
    config = epl.Config({"pipeline.num_micro_batch": 4, "pipeline.strategy": "PreferForward"})
    epl.init(config)
    with epl.replicate(device_count=1, name="stage_0"):
        x, labels = rows.next()
        h = dense(x, 10, "first", tf.tanh)
    with epl.replicate(device_count=1, name="stage_1"):
        loss = cross_entropy(labels, dense(h, CLASSES, "logits"))
    return train(loss, tf.train.MomentumOptimizer(0.2, 0.9).minimize(loss), runs)


def api_classification(epl: Any, rows: Rows, runs: int) -> Result:
    """Features are computed by rows, and the classes are divided."""
    config = epl.Config({"cluster.colocate_split_and_replicate": True})
    epl.init(config)
    count = epl.Env.get().cluster.total_gpu_num
    with epl.replicate(count):
        x, labels = rows.next()
        features = dense(x, 16, "features", tf.nn.relu)
    with epl.split(count):
        logits = dense(features, CLASSES, "classes")
        loss = cross_entropy(labels, logits)
    return train(loss, tf.train.AdamOptimizer(0.01).minimize(loss), runs)


def api_experts(epl: Any, rows: Rows, runs: int) -> Result:
    """Replicas of one device each, and experts that all of them share."""
    config = epl.Config()
    config.cluster.colocate_split_and_replicate = True
    epl.init(config)
    epl.set_default_strategy(epl.replicate(1))
    x, labels = rows.next()
    h = x + experts(epl, x, lambda: epl.split(epl.Env.get().cluster.total_gpu_num))
    loss = cross_entropy(labels, dense(h, CLASSES, "logits"))
    return train(loss, tf.train.MomentumOptimizer(0.2, 0.9).minimize(loss), runs)
