"""Structures that were prepared once are packed as tf.nest packs them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import tensorflow as tf

from whale.capture.packing import make_element_packer, make_packer

pytestmark = pytest.mark.core

A = tf.TensorSpec((2,), tf.float32)
Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "structure",
    [A, (A, A), [A, (A,)], {"b": A, "a": (A, {"d": A, "c": A})}, (), {}, Pair(A, [A]), OrderedDict(b=A, a=A)],
    ids=str,
)
def test_it_packs_as_tf_nest_does(structure: Any) -> None:
    values = list(range(len(tf.nest.flatten(structure))))
    expected = tf.nest.pack_sequence_as(structure, values)
    packed = make_element_packer(structure)(values)
    assert packed == expected and type(packed) is type(expected)
    if isinstance(packed, dict):
        assert list(packed) == list(expected)


def test_constants_stay_and_other_parts_are_left_to_tf_nest() -> None:
    pack = make_packer({"loss": A, "name": "x", "none": None, "count": (3, A)}, tf.TensorSpec)
    assert pack is not None and pack([1, 2]) == {"loss": 2, "name": "x", "none": None, "count": (3, 1)}
    assert make_packer((A, Pair(A, A)), tf.TensorSpec) is None
    assert make_packer((A, object()), tf.TensorSpec) is None
