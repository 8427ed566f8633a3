"""Implements ``wh.Strategy()``, which replaces tf.distribute's strategies in unchanged scripts."""
