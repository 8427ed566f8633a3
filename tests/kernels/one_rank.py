"""What one rank finds and runs of a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from whale.config.keys import KERNELS


def on_one_rank(body: Callable[..., Any], *given: tf.Tensor, **config: Any) -> tuple[list[np.ndarray], Counter[str]]:
    """What one rank finds, and the operations that it runs."""
    wh.init({"communication.in_process_ranks": 1, **config})
    step = wh.function(body)
    found = [value.numpy() for value in step(*given)]
    program = step._step(given, {}).compiled.ranks[0]
    wh.shutdown()
    return found, Counter(node.op for graph in (program, *program.functions.values()) for node in graph.nodes)


def without(*names: str) -> dict[str, list[str]]:
    """The configuration in which all but these kernels are used."""
    return {"kernels": [name for name in KERNELS if name not in names]}
