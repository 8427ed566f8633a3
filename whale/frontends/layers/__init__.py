"""Implements `wh.losses` and `wh.layers` for giant models in plain TensorFlow, so that they also run on one device."""
