"""Which calls of a step one process serves with one trace: their random streams go on from one to the other.

Whale plans a step for each set of shapes. TensorFlow has a trace for each one only where it knows the shapes; where it
does not, one trace serves many, and each of its random operations has one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from whale.capture.signature import Arguments
from whale.runtime.run.context import unique

_DIGITS = 8


def new_streams() -> str:
    """What the names of a trace's streams begin with; those of others are as long."""
    return unique("whale_streams", _DIGITS)


class Relaxed:
    """Which trace a tf.function with ``reduce_retracing`` would take, asked of one that computes nothing."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._known: dict[Hashable, Hashable] = {}

    def trace(self, kind: Hashable, specs: Sequence[Any]) -> Hashable:
        """The trace for tensors, arrays or iterators of these types; ``kind``: all else that a trace is made for."""
        types = [s if isinstance(s, tf.TypeSpec) else tf.TensorSpec(s.shape, s.dtype) for s in specs]
        key = kind, repr(types)
        if key not in self._known:
            made = self._made.get(kind)
            if made is None:
                made = self._made[kind] = tf.function(lambda *tensors: None, reduce_retracing=True, autograph=False)
            # A trace lives as long as the function, so that no other one has its number.
            graph = made.get_concrete_function(*types).graph
            self._known[key] = kind, id(graph)
        return self._known[key]


class Traces:
    """The traces of one step, by their calls' arguments.

    Args:
      step: what the step is made of; perhaps a tf.function.
      one: whether one trace serves all shapes, as the caller knows.
    """

    def __init__(self, step: Callable[..., Any], one: bool) -> None:
        self._any_shape = one or getattr(step, "input_signature", None) is not None
        self._relaxed = Relaxed() if getattr(step, "_reduce_retracing", False) else None
        self._names: dict[Hashable, str] = {}
        self._seeds: dict[str, int | None] = {}  # TensorFlow's global one, by streams

    def streams(self, arguments: Arguments) -> str:
        """What the names of the streams begin with of the trace that one process would take for a call."""
        parts: list[Any] = [self._kind(one) for one in arguments.key]  # type: ignore[attr-defined]
        trace: Hashable = tuple(parts)
        if self._relaxed is not None and not self._any_shape:
            fixed = tuple([one[:2] if _is_tensor(one) else one for one in parts])
            shapes = [one[2] for one in parts if _is_tensor(one)]
            dtypes = [one[1] for one in parts if _is_tensor(one)]
            trace = self._relaxed.trace(fixed, [tf.TensorSpec(s, d) for s, d in zip(shapes, dtypes)])
        if trace not in self._names:
            self._names[trace] = new_streams()
            self._seeds[self._names[trace]] = tf_context.global_seed()
        return self._names[trace]

    @contextmanager
    def seeded(self, streams: str) -> Iterator[None]:
        """Inside, TensorFlow's global seed is what it was when the trace of these streams was made."""
        tf_ctx = tf_context.context()
        now, tf_ctx._seed = tf_ctx._seed, self._seeds[streams]
        try:
            yield
        finally:
            tf_ctx._seed = now

    def _kind(self, entry: Any) -> Hashable:
        """A part of the arguments' key, without what no trace depends on: how ranks hold rows, how many there are."""
        if isinstance(entry, tuple) and entry and isinstance(entry[0], tf.TypeSpec):
            return entry[0]
        if not _is_tensor(entry):
            return entry  # type: ignore[no-any-return]
        shape = entry[2][0] if entry[0] == "part" else entry[2]
        return ("tensor", entry[1]) if self._any_shape else ("tensor", entry[1], tuple(shape))


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 3 and entry[0] in ("tensor", "part")
