"""Implements ``wh.Strategy()``, which replaces tf.distribute's strategies in scripts that are otherwise unchanged."""
