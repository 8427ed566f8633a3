"""A strategy that does nothing at all: what the tutorials are compared with, in a process that never loads Whale.

Not tf.distribute's own strategy of one device, which reads ahead, so that a dataset iterated again goes on elsewhere;
nor do datasets read ahead here, which TensorFlow makes them do where it seems to help.
"""

import contextlib

import tensorflow as tf


class Strategy:
    num_replicas_in_sync = 1
    cluster_resolver = None

    def scope(self):
        return contextlib.nullcontext()

    def run(self, fn, args=()):
        return fn(*args)

    def reduce(self, op, value, axis):
        return value

    def experimental_distribute_dataset(self, dataset):
        return _without_reading_ahead(dataset)

    def distribute_datasets_from_function(self, dataset_fn):
        return _without_reading_ahead(dataset_fn(tf.distribute.InputContext()))


def _without_reading_ahead(dataset):
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)
