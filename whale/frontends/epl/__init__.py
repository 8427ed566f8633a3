"""Implements the API of the Easy Parallel Library (EPL), whose scripts build TensorFlow 1 graphs, on Whale's ranks."""
