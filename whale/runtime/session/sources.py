"""Runs what brings data into a session's runs (iterators, dequeues, Python functions) on the first rank, ahead of the
rest.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from whale.capture.v1 import GraphCapture, Source
from whale.errors import ProgramError
from whale.runtime.run.context import Context
from whale.runtime.run.graph_semantics import BatchReaders
from whale.runtime.session.batches import join_parts, read_parts
from whale.runtime.session.one_rank import SingleRankRuns


class Sources:
    """The sources of a session's graph, found once for each set of fetches.

    Args:
      lock: held while they are looked for.
    """

    def __init__(
        self, context: Context, captures: GraphCapture, one_rank: SingleRankRuns, lock: threading.Lock
    ) -> None:
        self._context, self._captures, self._one_rank, self._lock = context, captures, one_rank, lock
        self._sources: dict[Hashable, list[Source]] = {}
        self._seen: dict[str, Sequence[int]] = {}  # shapes of what they brought in last

    def bring_in(
        self,
        wanted: Sequence[Any],
        feeds: Mapping[tf.Tensor, np.ndarray],
        options: Any,
        plan_only: bool,
        batches: BatchReaders | None = None,
    ) -> tuple[dict[tf.Tensor, np.ndarray], set[str]]:
        """Runs what brings data in (iterators, dequeues). Returns (all that is fed then, names of what has run).

        Args:
          wanted: fetches and targets.
          plan_only: nothing runs; what would be brought in has its shapes, and no values.
          batches: the ranks that run it; None: the first one.
        """
        given, done = dict(feeds), set[str]()
        while True:
            key = (tuple(w.name for w in wanted), tuple(t.name for t in given))
            if key not in self._sources:
                with self._lock:
                    self._sources[key] = self._captures.find_sources(wanted, given)
            if not self._sources[key]:
                # Values that were brought in go first: the first input tells which size is the batch's.
                return {t: given[t] for t in sorted(given, key=lambda t: t in feeds)}, done
            for source in self._sources[key]:
                outputs = list(source.operation.outputs)
                if plan_only:
                    values = [
                        np.zeros(shape, t.dtype.as_numpy_dtype) for t, shape in self._find_expected_shapes(outputs)
                    ]
                    if batches is not None:
                        times = batches.turns * (len(batches.readers) if batches.whole else 1)
                        values = join_parts([values] * times, [t.name for t in outputs])
                else:
                    needed = {t: v for t, v in given.items() if t.name in source.fed}
                    if batches is None:
                        values = self._one_rank.run_on_first_rank(outputs, needed, options)
                    else:
                        read = partial(self._one_rank.run, outputs, [], needed, (options, None))
                        values = read_parts(read, [t.name for t in outputs], batches, self._context)
                    self._seen.update({t.name: v.shape for t, v in zip(outputs, values)})
                given.update(zip(outputs, values))
                done.add(source.operation.name)

    def _find_expected_shapes(self, outputs: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor, Sequence[int]]]:
        """Returns the shapes of what a source will bring, known from the graph or else from the last run."""
        found: list[tuple[tf.Tensor, Sequence[int]]] = []
        for t in outputs:
            shape = t.shape.as_list() if t.shape.is_fully_defined() else self._seen.get(t.name)
            if shape is None:
                raise ProgramError(
                    "a plan needs to know the size of the batch, and only a run brings it in",
                    op=t.name,
                    given=t.shape,
                    expected="a static shape",
                    action="run the step once before asking for its plan, or batch with drop_remainder=True",
                )
            found.append((t, shape))
        return found
