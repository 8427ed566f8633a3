"""Computes when the stages of a pipeline end a step, by the core (core/schedule/play_pipeline.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain

from whale_ops._native import load_core


def play_pipeline(
    forward_s: Sequence[Sequence[float]], backward_s: Sequence[Sequence[float]], micro_batches: int
) -> list[float]:
    """Returns the seconds at which each stage's last pass ends under 1F1B, interleaved if stages have several chunks.

    Args:
        forward_s, backward_s: seconds of one micro-batch, indexed [stage][chunk], sends that the stage waits for
            included.
        micro_batches: of a step, at least 1.

    Raises:
        CommError: the op library is not built.
    """
    stages, chunks = len(forward_s), len(forward_s[0])
    table = ctypes.c_double * (stages * chunks)
    ends_s = (ctypes.c_double * stages)()
    forward, backward = table(*chain.from_iterable(forward_s)), table(*chain.from_iterable(backward_s))
    load_core().whale_play_pipeline(stages, chunks, micro_batches, forward, backward, ends_s)
    return list(ends_s)
