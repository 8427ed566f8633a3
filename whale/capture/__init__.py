"""Captures TensorFlow graphs and traced functions as programs, and encodes a program's nodes as protos."""
