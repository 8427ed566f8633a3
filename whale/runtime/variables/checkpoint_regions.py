"""The rectangles of a variable's value that ranks hold, for checkpoints: where they lie, reading them, setting them."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from whale.ir.layout import Split
from whale.runtime.ranks.ranks import Ranks

_by_regions: contextvars.ContextVar[bool] = contextvars.ContextVar("whale_restores_by_regions", default=False)


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a variable: its first index and its extent in each dimension, in the whole value and in a part.

    Attributes:
      begin: in the whole value; size: its shape.
      place: which of the ranks that hold the variable between them has it; start: its first index in that rank's part,
        in the dimension that is cut.
    """

    begin: tuple[int, ...]
    size: tuple[int, ...]
    place: int
    dim: int
    start: int

    def spec(self, shape: Sequence[int]) -> str:
        """Of a variable of ``shape``, as in ``slice_spec``."""
        return slice_spec(shape, self.begin, self.size)


def slice_spec(shape: Sequence[int], begin: Sequence[int], size: Sequence[int]) -> str:
    """A rectangle of a tensor of ``shape`` as TensorFlow's ``shape_and_slices`` write it: ``"4 6 0,4:3,3"``."""
    return f"{' '.join(map(str, shape))} {':'.join(f'{b},{s}' for b, s in zip(begin, size))}"


def variable_of(trackable: Any) -> Any:
    """The tf.Variable that an object of a checkpoint is, or that it wraps (Keras 3); None for other objects."""
    found = trackable if isinstance(trackable, tf.Variable) else getattr(trackable, "_value", None)
    return found if isinstance(found, tf.Variable) else None


def lies_split(variable: Any) -> bool:
    """Whether it is a variable of which the ranks hold parts."""
    return getattr(variable, "_whale_parts", None) is not None


def regions(variable: Any) -> list[Region]:
    """The rectangles into which a variable that lies split is cut; those without elements are left out."""
    return regions_of(variable._whale_parts.placement, tuple(variable.shape))


def regions_of(placement: Split, shape: Sequence[int]) -> list[Region]:
    """The rectangles into which a value is cut; those without elements are left out."""
    found = []
    for place, size in enumerate(placement.sizes):
        for block in range(placement.blocks if size else 0):
            begin, extent = [0] * len(shape), list(shape)
            begin[placement.dim] = block * sum(placement.sizes) + placement.offset(place)
            extent[placement.dim] = size
            if 0 not in extent:
                found.append(Region(tuple(begin), tuple(extent), place, placement.dim, block * size))
    return found


def holders(variable: Any, region: Region, context: Ranks) -> tuple[int, ...]:
    """The ranks that have a region."""
    found: tuple[int, ...] = variable._whale_parts.holders(region.place)
    return found


def region_value(variable: Any, region: Region, context: Ranks, rank: int) -> tf.Tensor:
    """The region's values now, whatever later steps do, from a rank of this process."""
    variable._whale_parts.settle()
    part = variable._whale_parts.of_rank(rank).read_value()
    if tuple(part.shape) == region.size:
        return part
    begin = [0] * len(region.size)
    begin[region.dim] = region.start
    return tf.slice(part, begin, region.size)


def own_regions(variable: Any, context: Ranks) -> list[Region]:
    """The regions that ranks of this process have."""
    return [p for p in regions(variable) if any(rank in context.ranks for rank in holders(variable, p, context))]


def assign_regions(variable: Any, values: Sequence[tuple[Region, tf.Tensor]], context: Ranks) -> None:
    """Sets all of ``own_regions``; a whole value that was assigned before is gone."""
    parts = variable._whale_parts
    parts.settle()
    for rank in context.ranks:
        place = parts.place(rank)
        mine = sorted(((p.start, v) for p, v in values if p.place == place), key=lambda found: found[0])
        if mine:
            parts.of_rank(rank).assign(tf.concat([v for _, v in mine], axis=parts.placement.dim))


@contextlib.contextmanager
def restored_by_pieces() -> Iterator[None]:
    """Under it TensorFlow's restoring leaves out variables that lie split: their regions are read instead."""
    token = _by_regions.set(True)
    try:
        yield
    finally:
        _by_regions.reset(token)


def restores_by_regions() -> bool:
    """Whether what TensorFlow restores now is read region by region, and not by it."""
    return _by_regions.get()
