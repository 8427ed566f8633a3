"""Lists, reads and assigns the rectangles of sharded variables that ranks hold, for checkpoints."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from whale.distributed.ranks import Ranks
from whale.ir.mesh import Region, Tiles
from whale.runtime.variables.in_files import write_block

_PIECE_BYTES = 64 << 20
_by_regions: contextvars.ContextVar[bool] = contextvars.ContextVar("whale_restores_by_regions", default=False)


def format_spec(region: Region, shape: Sequence[int]) -> str:
    """Returns a region of a variable of ``shape`` in TensorFlow's notation, as ``slice_spec`` does."""
    return slice_spec(shape, region.begin, region.size)


def slice_spec(shape: Sequence[int], begin: Sequence[int], size: Sequence[int]) -> str:
    """Returns a rectangle of a tensor of ``shape`` in TensorFlow's notation for ``shape_and_slices``: ``"4 6 0,4:3,3"``
    for rows 0-3 and columns 3-5 of 4 x 6.
    """
    return f"{' '.join(map(str, shape))} {':'.join(f'{b},{s}' for b, s in zip(begin, size))}"


def find_variable(trackable: Any) -> Any:
    """Returns the tf.Variable that an object of a checkpoint is, or wraps (Keras 3); None for other objects."""
    found = trackable if isinstance(trackable, tf.Variable) else getattr(trackable, "_value", None)
    return found if isinstance(found, tf.Variable) else None


def is_split(variable: Any) -> bool:
    """Returns True if the variable is sharded, so that each rank holds a part instead of the whole value."""
    return getattr(variable, "_whale_parts", None) is not None


def list_variable_regions(variable: Any) -> list[Region]:
    """Returns the rectangles into which a sharded variable is cut, without empty ones."""
    return list_regions(variable._whale_parts.tiles, tuple(variable.shape.as_list()))


def list_regions(tiles: Tiles, shape: Sequence[int]) -> list[Region]:
    """Returns the rectangles into which ``tiles`` cut a value of ``shape``, without empty ones."""
    return [region for place in range(tiles.count) for region in tiles.iterate_regions(shape, place)]


def find_holders(variable: Any, region: Region, context: Ranks) -> tuple[int, ...]:
    """Returns the ranks that hold a region of a sharded variable."""
    found: tuple[int, ...] = variable._whale_parts.find_holders(region.place)
    return found


def read_region_value(variable: Any, region: Region, context: Ranks, rank: int) -> tf.Tensor:
    """Returns a snapshot of a region's values, from the part of ``rank``, which is a rank of this process."""
    variable._whale_parts.settle()
    part = variable._whale_parts.read_value(rank)
    if tuple(part.shape) == region.size:
        return part
    return tf.slice(part, region.start, region.size)


def list_own_regions(variable: Any, context: Ranks) -> list[Region]:
    """Returns the regions of a sharded variable that ranks of this process hold."""
    return [
        p
        for p in list_variable_regions(variable)
        if any(rank in context.ranks for rank in find_holders(variable, p, context))
    ]


def is_in_files(variable: Any) -> bool:
    """Returns True if a variable is sharded and its parts are stored in files, so that it has to be restored in small
    pieces.
    """
    return is_split(variable) and bool(variable._whale_parts.folder)


def iterate_pieces(region: Region, dtype: tf.DType) -> Iterator[Region]:
    """Yields pieces of a region, cut by rows, of about 64 MiB each."""
    rows, *row = region.size
    each = max(1, _PIECE_BYTES // max(1, math.prod(row) * dtype.size))
    for first in range(0, rows, each):
        start, begin = ((n[0] + first, *n[1:]) for n in (region.start, region.begin))
        yield replace(region, start=start, begin=begin, size=(min(each, rows - first), *row))


def assign_regions(variable: Any, values: Sequence[tuple[Region, tf.Tensor]], context: Ranks) -> None:
    """Assigns values to the regions that ranks of this process hold; a whole value assigned before is cut first, and so
    overwritten.

    Args:
      values: (region, value) for all regions of ``list_own_regions``, or for pieces of regions if the parts are in
        files.
    """
    parts = variable._whale_parts
    parts.settle()
    for rank in context.ranks:
        place = parts.find_place(rank)
        mine = [(region, value) for region, value in values if region.place == place]
        if parts.folder:
            for region, value in mine:
                write_block(parts.find_rank_part(rank), region.start, value)
        elif len(mine) == 1:
            parts.find_rank_part(rank).assign(mine[0][1])
        elif mine:
            whole = np.empty(parts.find_rank_part(rank).shape.as_list(), parts.dtype.as_numpy_dtype)
            for region, value in mine:
                whole[tuple(slice(i, i + n) for i, n in zip(region.start, region.size))] = value.numpy()
            parts.find_rank_part(rank).assign(whole)


@contextlib.contextmanager
def restore_by_pieces() -> Iterator[None]:
    """Makes TensorFlow's restore skip sharded variables inside this context, since their regions are read
    separately.
    """
    token = _by_regions.set(True)
    try:
        yield
    finally:
        _by_regions.reset(token)


def is_restoring_by_regions() -> bool:
    """Returns True inside ``restore_by_pieces``: sharded variables are then restored region by region, not by
    TensorFlow.
    """
    return _by_regions.get()
