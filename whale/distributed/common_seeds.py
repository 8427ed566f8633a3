"""Seeds for what has none, and an order for what leaves it open: equal on all ranks of a run, so that every rank draws
the same whole batches.

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

_KERAS_GENERATOR = "global_seed_generator"  # the attribute in which Keras 3 keeps it


def read_random_state() -> bytes:
    """The random states of this process that belong to nobody, and a number from which seeds are to follow.

    They are Python's, NumPy's, TensorFlow's global seed and global generator, and those of each Keras that is imported.
    """
    number = random.SystemRandom().getrandbits(62)
    generator = stateful_random_ops.global_generator
    kind = int(generator.algorithm) if generator is not None else 0
    tensorflow = tf_context.global_seed(), kind, _find_generator_state(generator)
    return pack((random.getstate(), np.random.get_state(), tensorflow, _read_keras_states(), number))


def compute_state_number(state: bytes) -> int:
    """The number of a random state."""
    return int(unpack(state)[-1])


def take_random_state(state: bytes) -> int:
    """Another process's random states become this one's; their number."""
    python_state, numpy_state, (seed, kind, generator_state), keras_states, number = unpack(state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    if seed is not None and tf_context.global_seed() != seed:
        tf.random.set_seed(seed)
    mine = stateful_random_ops.global_generator
    if generator_state is None:
        stateful_random_ops.global_generator = None  # made when it is asked for
    elif mine is None or int(mine.algorithm) != kind:
        stateful_random_ops.global_generator = tf.random.Generator.from_state(generator_state, kind)
    else:
        mine.state.assign(generator_state)
    _take_keras_states(keras_states)
    return int(number)


def _find_generator_state(generator: Any) -> np.ndarray | None:
    """The state of a generator that keeps it in a variable, as those of TensorFlow and Keras 3 do; None without one."""
    return generator.state.numpy() if generator is not None else None


def _read_keras_states() -> dict[str, Any]:
    """The states of the generators that each Keras draws from where a script names none; None: it has none yet."""
    found: dict[str, Any] = {}
    if (kept := _find_keras3_attributes()) is not None:
        found["keras"] = _find_generator_state(kept.get_global_attribute(_KERAS_GENERATOR))
    for name, seeds in _iterate_keras2_seeds():
        generator = getattr(seeds, "generator", None)
        found[name] = generator.getstate() if generator is not None else None
    return found


def _take_keras_states(states: Mapping[str, Any]) -> None:
    """Forgets the state of a Keras that the first rank has not imported yet: it is made again when it is asked for."""
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
    """The module in which Keras 3 keeps what is global, if it is imported."""
    return sys.modules.get("keras.src.backend.common.global_state")


def _iterate_keras2_seeds() -> Iterator[tuple[str, Any]]:
    """(name, what holds the generator) of each Keras 2 that is imported; of this thread, as Keras has it."""
    for name in ("keras", "tf_keras"):
        seeds = getattr(sys.modules.get(f"{name}.src.backend"), "_SEED_GENERATOR", None)
        if seeds is not None:
            yield f"{name}.src", seeds


IN_ORDER = "_whale_in_order"  # of a dataset that was made with an order
# They take `deterministic`, or `sloppy`, and then give samples as they are ready.
_LEAVE_OPEN = (
    map_op._ParallelMapDataset,
    batch_op._ParallelBatchDataset,
    interleave_op._ParallelInterleaveDataset,
    readers.ParallelInterleaveDataset,
)


class CommonSeeds:
    """Draws seeds for what a script gives none, from its making to ``take_back``.

    That are tf.data's shuffles, random operations that run eagerly, generators of NumPy (``np.random.default_rng()``)
    and those of TensorFlow; in the script's own lines generators of Python (``random.Random()``) and ``uuid`` too.
    Datasets with ``deterministic=False``, which may have any order, get the one that they have without it.

    A seed follows from the number that all ranks were given, and from the line of the script that asks, so that a
    dataset which one rank alone makes changes nothing for the others.

    Args:
      number: what the first rank drew.
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
        """Leaves what has no seed from now on to TensorFlow and NumPy."""
        self._put_back(0)

    def leave_draws_to_ranks(self) -> None:
        """From now on only shuffles get seeds: each rank has data of its own, and disturbs it in its own way."""
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
        """Whether these are seeds of this run, which another run does not have."""
        return (seed, seed2) in self._given

    @property
    def draw_counts(self) -> dict[str, int]:
        """How often each line of the script has asked."""
        return dict(self._asked)

    def go_to(self, asked: Mapping[str, int]) -> None:
        """Seeds follow as if the lines had asked so often."""
        self._asked = Counter(asked)

    def draw(self) -> int:
        """A positive number of 62 bits for the line that asks; the next one when it asks again."""
        return int.from_bytes(self._draw_bytes(8), "little") % (1 << 62) + 1

    def _draw_bytes(self, count: int) -> bytes:
        line = find_script_line()
        self._asked[line] += 1
        text = f"{self._number} {line} {self._asked[line]}"
        return hashlib.blake2b(text.encode(), digest_size=count).digest()

    @contextmanager
    def set_global_seed(self) -> Iterator[None]:
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

    def _get_operation_seed(self, op_seed: Any) -> tuple[Any, Any]:
        """Returns the seeds of an operation that draws.

        Each line has seeds of its own and keeps them: TensorFlow keeps a kernel for these, whose stream goes on.
        """
        seeds: tuple[Any, Any] = self._seed_of_operation(op_seed)
        if seeds != (None, None) or not tf.executing_eagerly():
            return seeds
        text = f"{self._number} {sys._getframe(1).f_code.co_name} {find_script_line()}"
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return (drawn >> 33) + 1, drawn & 0x7FFFFFFF

    def _draw_entropy(self, bits: int) -> int:
        """Returns the seed of a NumPy generator that is given none."""
        return int.from_bytes(self._draw_bytes(-(-bits // 8)), "little") >> -bits % 8

    def _make_uuid(self, original: Callable[..., uuid.UUID]) -> Callable[..., uuid.UUID]:
        """Returns the function for lines of the script; libraries keep theirs, for names that are a process's own."""

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> uuid.UUID:
            if is_of_library(sys._getframe(1).f_code.co_filename):
                return original(*args, **kwargs)
            return uuid.UUID(bytes=self._draw_bytes(16), version=4)

        return make

    def _make_seeded(self, original: Callable[..., None]) -> Callable[..., None]:
        """Returns the constructor of Python's generators, which gives those of the script a seed."""

        @functools.wraps(original)
        def init(generator: random.Random, x: Any = None) -> None:
            is_open = x is None and type(generator) is random.Random
            if is_open and not is_of_library(sys._getframe(1).f_code.co_filename):
                x = self.draw()
            original(generator, x)

        return init

    def _draw_generator_state(self, shape: Any, dtype: Any = tf.int64) -> tf.Tensor:
        """Returns the seed of a TensorFlow generator, the global one too, that is given none."""
        if not tf.executing_eagerly():
            return self._fresh_state(shape, dtype)
        dtype = tf.as_dtype(dtype)
        count = int(np.prod(shape)) * dtype.size
        drawn = b"".join(self._draw_bytes(min(64, count - begin)) for begin in range(0, count, 64))
        return tf.constant(np.frombuffer(drawn, dtype.as_numpy_dtype).reshape(shape))


def restart_streams() -> Callable[[], None]:
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


def _make_in_order(make: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor of a dataset that keeps the order of its samples, whatever it is asked."""
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
    """Returns ``tf.data.Dataset.with_options`` without the option that leaves the order open."""

    @functools.wraps(with_options)
    def give(dataset: tf.data.Dataset, options: tf.data.Options, *args: Any, **kwargs: Any) -> tf.data.Dataset:
        if getattr(options, "deterministic", None) is False:
            options = copy.deepcopy(options)
            options.deterministic = True
        return with_options(dataset, options, *args, **kwargs)

    return give
