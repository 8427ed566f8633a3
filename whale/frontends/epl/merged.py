"""Values of replicas merged as a script marks them: what the whole batch gives is scaled to what replicas would."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def merge(graph: Any, tf_graph: tf.Graph) -> None:
    """Makes the merged values of what is marked in ``graph`` and has none yet."""
