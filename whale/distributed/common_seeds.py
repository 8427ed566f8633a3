"""Gives seeds that are equal on all ranks to everything that a script leaves unseeded, and a fixed order to datasets.

So every rank draws the same whole batches, of which it then takes its own rows.

Decisions: 0133, 0191.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import random
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import batch_op, dataset_ops, interleave_op, map_op, readers
from tensorflow.python.data.util import random_seed as dataset_seeds
from tensorflow.python.eager import context as tf_context
from tensorflow.python.framework import random_seed as operation_seeds
from tensorflow.python.ops import stateful_random_ops

import whale_ops
from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.script_line import find_script_line, is_of_library

_KERAS_GENERATOR = "global_seed_generator"  # the global attribute in which Keras 3 keeps its default generator


def read_random_state() -> bytes:
    """Returns this process's global random states, and a drawn number from which later seeds are derived, as bytes.

    The states are those of Python's ``random``, of NumPy, of TensorFlow's global seed and global generator, and of the
    default generators of each Keras that is imported. The first rank sends them to the others, which call
    `take_random_state`.
    """
    number = random.SystemRandom().getrandbits(62)
    generator = stateful_random_ops.global_generator
    kind = int(generator.algorithm) if generator is not None else 0
    tensorflow = tf_context.global_seed(), kind, _find_generator_state(generator)
    return pack((random.getstate(), np.random.get_state(), tensorflow, _read_keras_states(), number))


def compute_state_number(state: bytes) -> int:
    """Returns the drawn number that `read_random_state` has put into the bytes."""
    return int(unpack(state)[-1])


def take_random_state(state: bytes) -> int:
    """Sets this process's global random states to another process's, and returns the number drawn there.

    Args:
      state: what `read_random_state` returned in the other process.
    """
    python_state, numpy_state, (seed, kind, generator_state), keras_states, number = unpack(state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    if seed is not None and tf_context.global_seed() != seed:
        tf.random.set_seed(seed)
    mine = stateful_random_ops.global_generator
    if generator_state is None:
        stateful_random_ops.global_generator = None  # TensorFlow creates it on demand
    elif mine is None or int(mine.algorithm) != kind:
        stateful_random_ops.global_generator = tf.random.Generator.from_state(generator_state, kind)
    else:
        mine.state.assign(generator_state)
    _take_keras_states(keras_states)
    return int(number)


def _find_generator_state(generator: Any) -> np.ndarray | None:
    """Returns the state of a generator of TensorFlow or Keras 3, which is a variable, as an array; None without a
    generator.
    """
    return generator.state.numpy() if generator is not None else None


def _read_keras_states() -> dict[str, Any]:
    """Returns, by name of each imported Keras package, the state of its default random generator; None for a generator
    that Keras has not created yet.
    """
    found: dict[str, Any] = {}
    if (kept := _find_keras3_attributes()) is not None:
        found["keras"] = _find_generator_state(kept.get_global_attribute(_KERAS_GENERATOR))
    for name, seeds in _iterate_keras2_seeds():
        generator = getattr(seeds, "generator", None)
        found[name] = generator.getstate() if generator is not None else None
    return found


def _take_keras_states(states: Mapping[str, Any]) -> None:
    """Sets the states of the imported Keras packages' default generators to those of the first rank.

    A generator that the first rank has not created is removed here as well, so that it is created on demand.
    """
    if (kept := _find_keras3_attributes()) is not None:
        mine, state = kept.get_global_attribute(_KERAS_GENERATOR), states.get("keras")
        if state is None:
            kept.set_global_attribute(_KERAS_GENERATOR, None)
        else:
            if mine is None:
                mine = sys.modules["keras"].random.SeedGenerator(0)
                kept.set_global_attribute(_KERAS_GENERATOR, mine)
            mine.state.assign(state)
    for name, seeds in _iterate_keras2_seeds():
        if (state := states.get(name)) is None:
            seeds.generator = None
        else:
            seeds.generator = random.Random()
            seeds.generator.setstate(state)


def _find_keras3_attributes() -> Any:
    """Returns the module in which Keras 3 keeps its global attributes, or None if it is not imported."""
    return sys.modules.get("keras.src.backend.common.global_state")


def _iterate_keras2_seeds() -> Iterator[tuple[str, Any]]:
    """Yields (name, object with this thread's ``generator`` attribute) of each Keras 2 package that is imported."""
    for name in ("keras", "tf_keras"):
        seeds = getattr(sys.modules.get(f"{name}.src.backend"), "_SEED_GENERATOR", None)
        if seeds is not None:
            yield f"{name}.src", seeds


IN_ORDER = "_whale_in_order"  # attribute of datasets that were created with a fixed order
# Datasets that, by `deterministic` or `sloppy`, may yield elements in the order in which these are ready.
_LEAVE_OPEN = (
    map_op._ParallelMapDataset,
    batch_op._ParallelBatchDataset,
    interleave_op._ParallelInterleaveDataset,
    readers.ParallelInterleaveDataset,
)


class CommonSeeds:
    """Replaces functions of Python, NumPy and TensorFlow that draw seeds, from construction to ``take_back``.

    Seeds are given to tf.data's shuffles, to random operations that run eagerly, and to generators of NumPy
    (``np.random.default_rng()``) and TensorFlow. ``random.Random()`` and ``uuid`` are replaced only where lines of the
    script itself call them. Datasets with the option ``deterministic=False`` yield their elements in the deterministic
    order.

    A seed is derived from a number that is equal on all ranks, from the line of the script that asks, and from how
    often that line has asked. So a dataset that only one rank creates does not change the seeds of others.

    Args:
      number: the number that the first rank drew (`compute_state_number`).
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._asked: Counter[str] = Counter()
        self._given: set[tuple[int, int]] = set()
        self._replaced: list[tuple[Any, str, Any]] = []
        self._original = self._replace(dataset_seeds, "get_seed", self._get_seed)
        self._seed_of_operation = self._replace(operation_seeds, "get_seed", self._get_operation_seed)
        self._replace(np.random.bit_generator, "randbits", self._draw_entropy)
        for name in ("uuid1", "uuid4"):
            self._replace(uuid, name, self._make_uuid(getattr(uuid, name)))
        self._replace(random.Random, "__init__", self._make_seeded(random.Random.__init__))
        self._fresh_state = self._replace(stateful_random_ops, "non_deterministic_ints", self._draw_generator_state)
        for kind in _LEAVE_OPEN:
            self._replace(kind, "__init__", _make_in_order(kind.__init__))
        with_options = dataset_ops.DatasetV2.with_options
        self._replace(dataset_ops.DatasetV2, "with_options", _give_order(with_options))

    def take_back(self) -> None:
        """Restores all replaced functions, so that unseeded draws are left to Python, NumPy and TensorFlow again."""
        self._put_back(0)

    def leave_draws_to_ranks(self) -> None:
        """Restores all replaced functions except tf.data's seeds, when each rank reads and augments data of its own."""
        self._put_back(1)

    def _put_back(self, first: int) -> None:
        for where, name, original in self._replaced[first:]:
            setattr(where, name, original)
        del self._replaced[first:]

    def _replace(self, where: Any, name: str, by: Any) -> Any:
        original = getattr(where, name)
        self._replaced.append((where, name, original))
        setattr(where, name, by)
        return original

    def has_given(self, seed: int, seed2: int) -> bool:
        """Returns True if this pair of tf.data seeds was drawn here; such seeds differ from run to run."""
        return (seed, seed2) in self._given

    @property
    def draw_counts(self) -> dict[str, int]:
        """Returns how many seeds each line of the script has drawn so far ("train.py:12" -> count), to be saved in
        checkpoints.
        """
        return dict(self._asked)

    def go_to(self, asked: Mapping[str, int]) -> None:
        """Continues the seeds from saved counts, e.g. of a checkpoint.

        Args:
          asked: how many seeds each line of the script has drawn, as `draw_counts` returned it.
        """
        self._asked = Counter(asked)

    def draw(self) -> int:
        """Draws a positive 62-bit number for the line of the script that is running; each call gives the next one."""
        return int.from_bytes(self._draw_bytes(8), "little") % (1 << 62) + 1

    def _draw_bytes(self, count: int) -> bytes:
        line = find_script_line()
        self._asked[line] += 1
        text = f"{self._number} {line} {self._asked[line]}"
        return hashlib.blake2b(text.encode(), digest_size=count).digest()

    @contextmanager
    def set_global_seed(self) -> Iterator[None]:
        """Sets TensorFlow's global seed to a drawn one while the context is open, unless the script has set one."""
        if tf_context.global_seed() is not None:
            yield
            return
        # Not tf.random.set_seed, which would restart the random streams of everything that has drawn so far.
        tf_ctx = tf_context.context()
        drawn = self.draw() & 0x7FFFFFFF
        tf_ctx._seed, tf_ctx._rng = drawn, random.Random(drawn)
        try:
            yield
        finally:
            tf_ctx._seed = None

    def _get_seed(self, seed: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the pair of seeds for a tf.data dataset that draws, such as a shuffle; replaces tf.data's own
        function.

        Args:
          seed: the seed that the script has given; None: none.
        """
        if seed is not None or tf_context.global_seed() is not None or not tf.executing_eagerly():
            return self._original(seed)  # type: ignore[no-any-return]
        drawn = self.draw()
        pair = drawn >> 31, drawn & 0x7FFFFFFF
        self._given.add(pair)
        return tf.constant(pair[0], tf.int64), tf.constant(pair[1], tf.int64)

    def _get_operation_seed(self, op_seed: Any) -> tuple[Any, Any]:
        """Returns the pair of seeds of a random operation that runs eagerly; replaces TensorFlow's own function.

        A line of the script gets the same pair at each call. TensorFlow caches the op's kernel by these seeds, and the
        kernel's random stream goes on from call to call.
        """
        seeds: tuple[Any, Any] = self._seed_of_operation(op_seed)
        if seeds != (None, None) or not tf.executing_eagerly():
            return seeds
        text = f"{self._number} {sys._getframe(1).f_code.co_name} {find_script_line()}"
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return (drawn >> 33) + 1, drawn & 0x7FFFFFFF

    def _draw_entropy(self, bits: int) -> int:
        """Returns `bits` bits of entropy for a NumPy generator that was created without a seed."""
        return int.from_bytes(self._draw_bytes(-(-bits // 8)), "little") >> -bits % 8

    def _make_uuid(self, original: Callable[..., uuid.UUID]) -> Callable[..., uuid.UUID]:
        """Returns a replacement of ``uuid.uuid1`` or ``uuid.uuid4`` (``original``).

        If a line of the script calls it, the result is equal on all ranks; if a library does, the original is called.
        """

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> uuid.UUID:
            if is_of_library(sys._getframe(1).f_code.co_filename):
                return original(*args, **kwargs)
            return uuid.UUID(bytes=self._draw_bytes(16), version=4)

        return make

    def _make_seeded(self, original: Callable[..., None]) -> Callable[..., None]:
        """Returns a replacement of the constructor of ``random.Random`` (``original``), which seeds generators that the
        script creates without a seed.
        """

        @functools.wraps(original)
        def init(generator: random.Random, x: Any = None) -> None:
            is_open = x is None and type(generator) is random.Random
            if is_open and not is_of_library(sys._getframe(1).f_code.co_filename):
                x = self.draw()
            original(generator, x)

        return init

    def _draw_generator_state(self, shape: Any, dtype: Any = tf.int64) -> tf.Tensor:
        """Returns the initial state of a TensorFlow generator that was created without a seed, the global generator
        included.
        """
        if not tf.executing_eagerly():
            return self._fresh_state(shape, dtype)
        dtype = tf.as_dtype(dtype)
        count = int(np.prod(shape)) * dtype.size
        drawn = b"".join(self._draw_bytes(min(64, count - begin)) for begin in range(0, count, 64))
        return tf.constant(np.frombuffer(drawn, dtype.as_numpy_dtype).reshape(shape))


def restart_streams() -> Callable[[], None]:
    """Makes each ``tf.random.set_seed`` restart the random streams of Whale's kernels, as it restarts TensorFlow's own.

    Returns:
      A function that undoes this.
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


def _make_in_order(make: Callable[..., None]) -> Callable[..., None]:
    """Returns a replacement of a dataset class's constructor (``make``): the dataset keeps the order of its elements
    even if the script passes ``deterministic=False``.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def init(dataset: Any, *args: Any, **kwargs: Any) -> None:
        asked = signature.bind(dataset, *args, **kwargs)
        for name, kept in (("deterministic", True), ("sloppy", False)):
            if asked.arguments.get(name) is not None:
                asked.arguments[name] = kept
        make(*asked.args, **asked.kwargs)
        setattr(dataset, IN_ORDER, True)

    return init


def _give_order(with_options: Callable[..., tf.data.Dataset]) -> Callable[..., tf.data.Dataset]:
    """Wraps ``tf.data.Dataset.with_options`` so that the option ``deterministic=False`` becomes True."""

    @functools.wraps(with_options)
    def give(dataset: tf.data.Dataset, options: tf.data.Options, *args: Any, **kwargs: Any) -> tf.data.Dataset:
        if getattr(options, "deterministic", None) is False:
            options = copy.deepcopy(options)
            options.deterministic = True
        return with_options(dataset, options, *args, **kwargs)

    return give
