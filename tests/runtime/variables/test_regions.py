"""A checkpoint takes every element of a variable that is sharded over ranks, and gives it back at its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale.ir.layout import shard
from whale.ir.mesh import Region, Tiles, make_one_axis_tiles
from whale.runtime.variables.checkpoint_regions import assign_regions, list_variable_regions, read_region_value
from whale.runtime.variables.split_variable import cut_part

SHAPE = (6, 5)
RUNS = shard(0, (2, 0, 1), 2)  # two runs of three rows: a rank's rows lie in two places


def _inside(whole: np.ndarray, region: Region) -> np.ndarray:
    return whole[tuple(slice(i, i + n) for i, n in zip(region.begin, region.size))]


@pytest.mark.parametrize(
    "tiles",
    [
        make_one_axis_tiles(shard(1, (3, 2))),
        make_one_axis_tiles(RUNS),
        Tiles(("one", "other"), (RUNS, shard(1, (1, 4)))),
    ],
    ids=str,
)
def test_regions_are_read_and_set_where_they_lie(tiles: Tiles) -> None:
    whole = np.arange(30.0).reshape(SHAPE)
    expected = [cut_part(tf.constant(whole), tiles, place) for place in range(tiles.count)]
    held = [tf.Variable(part) for part in expected]
    parts = SimpleNamespace(
        tiles=tiles, folder="", dtype=tf.float64, settle=lambda: None, find_place=lambda rank: rank,
        find_rank_part=held.__getitem__, read_value=lambda rank: held[rank].read_value(),
    )  # fmt: skip
    variable, context = SimpleNamespace(_whale_parts=parts, shape=tf.TensorShape(SHAPE)), SimpleNamespace()
    context.ranks = range(tiles.count)
    found: list[tuple[Region, Any]] = [
        (r, read_region_value(variable, r, context, r.place)) for r in list_variable_regions(variable)
    ]
    for region, value in found:
        np.testing.assert_array_equal(value, _inside(whole, region))
    assert sorted(x for _, value in found for x in value.numpy().ravel()) == sorted(whole.ravel())
    for part in held:
        part.assign(tf.zeros_like(part))
    assign_regions(variable, found, context)
    for part, wanted in zip(held, expected):
        np.testing.assert_array_equal(part, wanted)
