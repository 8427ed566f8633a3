"""Implements ``wh.Strategy()``, which takes the place of tf.distribute's strategies in scripts as they are written."""
