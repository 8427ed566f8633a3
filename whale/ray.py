"""Runs a function on a Ray cluster: ``import whale.ray; whale.ray.run(fn, np=4)``."""

from whale.frontends.on_ray import run as run
