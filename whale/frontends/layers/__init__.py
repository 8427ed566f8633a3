"""Implements `wh.losses` and `wh.layers` for giant models in plain TensorFlow: on one device they compute the same."""
