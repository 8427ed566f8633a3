"""Spreads runs of TensorFlow 1 sessions over the ranks."""
