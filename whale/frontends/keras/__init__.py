"""Runs ``fit``, ``evaluate``, ``predict`` and the other methods of Keras 3, tf_keras and Keras 2 over the ranks of a
run.
"""
