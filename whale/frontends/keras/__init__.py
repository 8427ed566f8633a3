"""Runs ``fit``, ``evaluate``, ``predict`` and the rest of Keras 3, tf_keras and Keras 2 over the ranks of a run."""
