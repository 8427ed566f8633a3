"""Gives all ranks one seed for what others make in the script's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from whale.runtime.context import find_running


@contextmanager
def common_seed() -> Iterator[None]:
    """Sets TensorFlow's global seed, inside, to one that the first rank drew, unless the script has set one.

    Random operations without a seed that are made inside then draw the same on every rank. Does nothing where no other
    process takes part. Not collective.
    """
    context = find_running()
    if context is None or context.seeds is None:
        yield
        return
    with context.seeds.set_global_seed():
        yield
