"""Tells which graphs that TensorFlow builds are no programs of steps: a step is a plain function in them.

Functions of a dataset (what ``map``, ``filter`` or ``reduce`` were given) run where rows are read, one element or batch
at a time: every reader computes them for the rows that it reads, as one process does. Keras calls layers in graphs of
its own to find shapes, which are never run.
"""

from __future__ import annotations

import sys

import tensorflow as tf

_TRACES_DATASETS = "tensorflow/python/data/ops/structured_function.py"
_FINDS_SHAPES = ("scratch_graph", "keras_graph")


def is_graph_without_steps() -> bool:
    """Tells whether the graph that the caller's code adds to is such a graph, or within one."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if any(name in getattr(graph, "name", "") for name in _FINDS_SHAPES):
            return True
        graph = getattr(graph, "outer_graph", None)
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_TRACES_DATASETS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
