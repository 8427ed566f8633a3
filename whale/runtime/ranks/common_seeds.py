"""Seeds for what has none: equal on all ranks of a run, so that every rank draws the same whole batches."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.util import random_seed as dataset_seeds
from tensorflow.python.eager import context as tf_context

import whale_ops
from whale.runtime.ranks.plain import pack, unpack
from whale.runtime.ranks.script_line import script_line


def random_state() -> bytes:
    """Python's, NumPy's and TensorFlow's random states in this process, and a number from which seeds are to follow."""
    number = random.SystemRandom().getrandbits(62)
    return pack((random.getstate(), np.random.get_state(), tf_context.global_seed(), number))


def number_of(state: bytes) -> int:
    """The number of a random state."""
    return int(unpack(state)[3])


def take_random_state(state: bytes) -> int:
    """Another process's random states become this one's; their number."""
    python_state, numpy_state, seed, number = unpack(state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    if seed is not None and tf_context.global_seed() != seed:
        tf.random.set_seed(seed)
    return int(number)


class CommonSeeds:
    """Draws seeds for tf.data's shuffles without one, from its making to ``take_back``.

    A seed follows from the number that all ranks were given, and from the line of the script that asks, so that a
    dataset which one rank alone makes changes nothing for the others.

    Args:
      number: what the first rank drew.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._asked: Counter[str] = Counter()
        self._given: set[tuple[int, int]] = set()
        self._original = dataset_seeds.get_seed
        dataset_seeds.get_seed = self._get_seed

    def take_back(self) -> None:
        """Datasets made from now on are seeded as TensorFlow does it."""
        dataset_seeds.get_seed = self._original

    def gave(self, seed: int, seed2: int) -> bool:
        """Whether these are seeds of this run, which another run does not have."""
        return (seed, seed2) in self._given

    @property
    def asked(self) -> dict[str, int]:
        """How often each line of the script has asked."""
        return dict(self._asked)

    def go_to(self, asked: Mapping[str, int]) -> None:
        """Seeds follow as if the lines had asked so often."""
        self._asked = Counter(asked)

    def draw(self) -> int:
        """A positive number of 62 bits for the line that asks; the next one when it asks again."""
        line = script_line()
        self._asked[line] += 1
        text = f"{self._number} {line} {self._asked[line]}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % (1 << 62) + 1

    @contextmanager
    def as_global(self) -> Iterator[None]:
        """Inside, TensorFlow's global seed is one of these, unless the script has set one."""
        if tf_context.global_seed() is not None:
            yield
            return
        # Not tf.random.set_seed: it begins the kernels anew of all that has drawn so far.
        tf_ctx = tf_context.context()
        drawn = self.draw() & 0x7FFFFFFF
        tf_ctx._seed, tf_ctx._rng = drawn, random.Random(drawn)
        try:
            yield
        finally:
            tf_ctx._seed = None

    def _get_seed(self, seed: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """What tf.data asks when a dataset is made that draws."""
        if seed is not None or tf_context.global_seed() is not None or not tf.executing_eagerly():
            return self._original(seed)  # type: ignore[no-any-return]
        drawn = self.draw()
        pair = drawn >> 31, drawn & 0x7FFFFFFF
        self._given.add(pair)
        return tf.constant(pair[0], tf.int64), tf.constant(pair[1], tf.int64)


def streams_begin_anew() -> Callable[[], None]:
    """From now on streams begin anew with each ``tf.random.set_seed``, as those of TensorFlow's kernels do.

    Returns:
      what ends that.
    """
    original = tf_context.Context._set_global_seed

    def set_global_seed(self: Any, seed: Any) -> None:
        original(self, seed)
        if self._context_handle is not None:
            whale_ops.forget_streams()

    tf_context.Context._set_global_seed = set_global_seed

    def put_back() -> None:
        tf_context.Context._set_global_seed = original

    return put_back
