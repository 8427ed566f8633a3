"""What of a compilation is TensorFlow's own tracing, for benchmarks of the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from whale.runtime.compile import step as step_of_function


@contextmanager
def traced_apart() -> Iterator[list[float]]:
    """Inside, the one number of the list is the processor seconds that traces of `wh.function` have taken so far."""
    seconds, trace = [0.0], step_of_function.trace_function

    def timed(*args: Any, **kwargs: Any) -> Any:
        start_s = time.process_time()
        try:
            return trace(*args, **kwargs)
        finally:
            seconds[0] += time.process_time() - start_s

    step_of_function.trace_function = timed
    try:
        yield seconds
    finally:
        step_of_function.trace_function = trace
