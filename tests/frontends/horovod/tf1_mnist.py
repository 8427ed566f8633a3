"""Horovod's example for TensorFlow 1, on generated digits: a MonitoredTrainingSession with the broadcast hook."""

import json

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()


def conv_model(feature, target):
    target = tf.one_hot(tf.cast(target, tf.int32), 10, 1, 0)
    feature = tf.reshape(feature, [-1, 12, 12, 1])
    rng = np.random.default_rng(3 + hvd.rank())  # other weights on each rank, until they are broadcast

    def weights(name, *shape):
        return tf.get_variable(name, initializer=(rng.normal(size=shape) * 0.2).astype(np.float32))

    conv = tf.nn.relu(tf.nn.conv2d(feature, weights("kernel", 5, 5, 1, 8), 1, "SAME"))
    pool = tf.nn.max_pool(conv, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
    logits = tf.matmul(tf.reshape(pool, [-1, 6 * 6 * 8]), weights("dense", 6 * 6 * 8, 10)) + weights("bias", 10)
    return tf.argmax(logits, 1), tf.losses.softmax_cross_entropy(target, logits)


hvd.init()
rng = np.random.default_rng(5)
x_train, y_train = rng.uniform(size=(320, 144)), rng.integers(10, size=320)

with tf.name_scope("input"):
    image = tf.placeholder(tf.float32, [None, 144], name="image")
    label = tf.placeholder(tf.float32, [None], name="label")
predict, loss = conv_model(image, label)

opt = tf.train.AdamOptimizer(0.002, epsilon=1e-6)
opt = hvd.DistributedOptimizer(opt)
global_step = tf.train.get_or_create_global_step()
train_op = opt.minimize(loss, global_step=global_step)
mean_loss = hvd.allreduce(loss)

hooks = [
    hvd.BroadcastGlobalVariablesHook(0),
    tf.train.StopAtStepHook(last_step=10),
    tf.train.LoggingTensorHook(tensors={"step": global_step, "loss": loss}, every_n_iter=10),
]
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
checkpoint_dir = "./checkpoints" if hvd.rank() == 0 else None
batch, losses, step = 32 // hvd.size(), [], 0
with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks, config=config) as mon_sess:
    while not mon_sess.should_stop():
        rows = slice(32 * step + batch * hvd.rank(), 32 * step + batch * (hvd.rank() + 1))
        _, value = mon_sess.run([train_op, mean_loss], feed_dict={image: x_train[rows], label: y_train[rows]})
        losses.append(float(value))
        step += 1
if hvd.rank() == 0:
    print("RESULT", json.dumps({"loss": losses}))
