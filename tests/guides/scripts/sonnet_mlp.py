"""A Sonnet network and optimizer in a loop of its own."""

import numpy as np
import sonnet as snt
import tensorflow as tf

rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 6)).astype("float32"), rng.integers(0, 3, 64)
network = snt.Sequential([snt.Linear(16), tf.nn.relu, snt.Linear(3)])
optimizer = snt.optimizers.SGD(0.1)


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        logits = network(images)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    weights = network.trainable_variables
    optimizer.apply(tape.gradient(loss, weights), weights)
    return loss


losses = []
for _epoch in range(2):
    for begin in range(0, 64, 16):
        losses.append(float(step(tf.constant(x[begin : begin + 16]), tf.constant(y[begin : begin + 16]))))
result = {"losses": losses, "weights": [w.numpy() for w in network.trainable_variables]}
