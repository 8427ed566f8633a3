"""Losses and layers of giant models, in plain TensorFlow: on one device they compute the same. `wh.losses`."""
