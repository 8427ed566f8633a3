"""Saves random states outside of variables as text in a checkpoint: Python's, NumPy's, and TensorFlow's global
generator.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import stateful_random_ops

STATE_KEY = "whale/random_state"  # belongs to no object: TensorFlow's restoring ignores it


def read_random_state() -> str:
    """Returns the states of this process as JSON."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }
    generator = stateful_random_ops.global_generator
    if generator is not None:
        state["tensorflow"] = [int(generator.algorithm), generator.state.numpy().tolist()]
    return json.dumps(state)


def set_random_state(text: str) -> None:
    """Restores states that ``read_random_state`` returned, so that this process continues their streams."""
    state = json.loads(text)
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = state["numpy"]
    np.random.set_state((kind, np.array(numbers, np.uint32), *rest))
    if "tensorflow" in state:
        algorithm, values = state["tensorflow"]
        generator = tf.random.get_global_generator()
        if int(generator.algorithm) != algorithm:
            tf.random.set_global_generator(tf.random.Generator.from_state(values, algorithm))
        else:
            generator.reset(np.array(values, generator.state.dtype.as_numpy_dtype))
