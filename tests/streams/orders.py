"""Drawn sequences of iterations over one dataset that is shuffled, and what is made of it.

A program is drawn from a number. It runs alike with and without Whale; what it gives depends on the order in which
every one of its iterations has the samples.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

# Programs from this number on may do what TensorFlow itself does in another way each time.
RACING = 1_000_000
SETTLED_S = 0.1
LONG = 8  # batches, in which no act that stops early comes near the end


@dataclass(frozen=True)
class Data:
    """A dataset; ``rest``: what is behind its shuffle."""

    samples: int
    buffer: int
    seeded: bool  # by the shuffle's own seed, or by TensorFlow's global one
    reshuffles: bool | None
    below: bool  # a map in front of the shuffle
    rest: tuple[str, ...]
    batch: int

    def make(self) -> tf.data.Dataset:
        """The dataset, made anew."""
        draw = np.random.default_rng(7)
        x = draw.normal(size=(self.samples, 3))
        made = tf.data.Dataset.from_tensor_slices((x, x @ np.array([0.3, -0.2, 0.5])))
        if self.below:
            made = made.map(lambda x, y: (x + 0.25, y))
        made = made.shuffle(self.buffer, 5 if self.seeded else None, self.reshuffles)
        for step in self.rest:
            made = STEPS[step](made, self.batch)
        return made


STEPS: dict[str, Callable[[tf.data.Dataset, int], tf.data.Dataset]] = {
    "map": lambda d, n: d.map(lambda x, y: (x * 1.5, y)),
    "shuffle": lambda d, n: d.shuffle(5, seed=11),
    "cache": lambda d, n: d.cache(),
    "take": lambda d, n: d.take(7),
    "skip": lambda d, n: d.skip(3),
    "batch": lambda d, n: d.batch(n),
    "full batches": lambda d, n: d.batch(n, drop_remainder=True),
    "repeat": lambda d, n: d.repeat(2),
}
DERIVED: dict[str, Callable[[tf.data.Dataset], tf.data.Dataset]] = {
    "all": lambda d: d,
    "first": lambda d: d.take(2),
    "rest": lambda d: d.skip(1),
    "mapped": lambda d: d.map(lambda x, y: (-x, y)),
    "twice": lambda d: d.take(2).repeat(2),
    "first mapped": lambda d: d.map(lambda x, y: (2 * x, y)).take(2),
    "shuffled": lambda d: d.shuffle(3, seed=9),
    "and again": lambda d: d.concatenate(d.take(2)),
    "in turn": lambda d: tf.data.Dataset.sample_from_datasets([d, d.take(2)], seed=6),
    "padded": lambda d: d.unbatch().padded_batch(5, ([3], [])),
    "rebatched": lambda d: d.rebatch(4),
}
STOPS = ("first", "twice", "first mapped")
READ_AHEAD = ("mapped", "first", "first mapped", "shuffled", "and again", "in turn", "padded", "rebatched")
ACTS = (
    "loop",
    "part",
    "shard part",
    "shard",
    "fit",
    "fit",
    "fit and validate",
    "evaluate",
    "predict",
    "both",
    "restart",
    "callback",
)
PARTS = (
    "part",
    "shard part",
    "both",
    "callback",
    "fit and validate",
    "restart",
)  # not to the end, or while another one goes on


@dataclass(frozen=True)
class Program:
    """What is done with a dataset: (act, of what is made of it, a number)."""

    data: Data
    acts: tuple[tuple[str, str, int], ...]


_SIMPLE = Data(26, 26, True, None, False, ("batch",), 6)
CASES = (
    Program(_SIMPLE, (("fit", "all", 2), ("fit", "all", 2), ("loop", "all", 1))),
    Program(_SIMPLE, (("fit and validate", "first", 3),)),
    Program(
        replace(_SIMPLE, below=True, rest=("map", "batch")),
        (("loop", "all", 1), ("fit", "mapped", 2), ("predict", "all", 1)),
    ),
    Program(
        replace(_SIMPLE, rest=("cache", "batch")), (("fit", "first", 1), ("shard", "all", 2), ("evaluate", "all", 1))
    ),
    Program(replace(_SIMPLE, seeded=False, below=True), (("fit", "all", 1), ("restart", "all", 2), ("fit", "all", 1))),
    Program(replace(_SIMPLE, below=True, rest=("batch", "repeat")), (("fit", "all", 2), ("predict", "all", 1))),
    Program(
        replace(_SIMPLE, rest=("cache", "batch"), batch=3),
        (("part", "all", 3), ("shard part", "all", 4), ("fit", "all", 2), ("restart", "all", 2), ("shard", "first", 1)),
    ),
    Program(
        _SIMPLE,
        (("shard", "shuffled", 2), ("fit", "and again", 2), ("shard part", "rebatched", 2), ("restart", "shuffled", 2)),
    ),
    Program(
        replace(_SIMPLE, below=True),
        (("shard", "in turn", 2), ("restart", "and again", 2), ("fit", "padded", 2), ("evaluate", "rebatched", 1)),
    ),
    Program(
        replace(_SIMPLE, buffer=4, rest=("shuffle", "batch")),
        (("restart", "first mapped", 2), ("loop", "all", 1), ("fit", "all", 1)),
    ),
    Program(
        replace(_SIMPLE, samples=22, buffer=22, rest=("shuffle", "skip", "batch")),
        (("restart", "in turn", 2), ("shard part", "first mapped", 2)),
    ),
)


def drawn(number: int) -> Program:
    """The program of a number; those below 0 are the cases."""
    if number < 0:
        return CASES[number]
    draw = random.Random(f"orders {number}")
    samples = draw.randint(5, 24)
    rest = [step for step in ("map", "shuffle", "cache", "take", "skip") if draw.random() < 0.2]
    draw.shuffle(rest)
    samples += 30 * ("cache" in rest and "take" not in rest and draw.random() < 0.5)
    repeats = draw.choice(["", "", "before", "behind"])
    if repeats == "before":
        rest.append("repeat")
    rest.append(draw.choice(["batch", "batch", "full batches"]))
    counts_one_more = rest[-1] == "full batches"  # Keras, at the end of batches of which it does not know how many
    if repeats == "behind":
        rest.append("repeat")
    data = Data(
        samples,
        draw.choice([samples, 4]),
        draw.random() < 0.7,
        draw.choice([None, True, True, False]),
        draw.random() < 0.4,
        tuple(rest),
        draw.randint(2, 6),
    )
    # TensorFlow reads ahead, a batch or more, as it sees fit: where that begins the next order of a repetition, and the
    # repetition is not read to its end, or another iteration begins meanwhile, nobody can say which order is whose; and
    # where a loop or take stops at the last batches but one of a cache, nobody can say whether that is full.
    races = repeats if number < RACING else ""
    short = number < RACING and "cache" in rest and int(data.make().cardinality()) < LONG
    left_out = {*(READ_AHEAD if races else ()), *(STOPS if short else ()), *(["in turn"] if counts_one_more else ())}
    derived = [name for name in DERIVED if name not in left_out]
    kinds = [act for act in ACTS if not ((races or short) and act in PARTS)]
    acts = []
    for _ in range(draw.randint(3, 6)):
        act, part = draw.choice(kinds), draw.choice(derived)
        acts.append((act, "all" if part == "twice" and act in PARTS else part, draw.randint(1, 3)))
    if "cache" in rest and any(act == "restart" for act, _, _ in acts):
        # Two iterations at once fill a cache in an order that no other process can find out: that is refused.
        acts = [(act, "and again" if part == "in turn" else part, count) for act, part, count in acts]
    return Program(data, tuple(acts))


class Run:
    """One run of programs: plain, or as a rank."""

    def __init__(self, wh: Any, model: Any, keras: Any) -> None:
        self._wh, self._model, self._keras = wh, model, keras
        self._first = [weight.copy() for weight in model.get_weights()]
        self._seen = (wh.function if wh is not None else tf.function)(lambda x: tf.matmul(x, tf.ones([3, 1], x.dtype)))

    def __call__(self, program: Program) -> dict[str, np.ndarray]:
        """What a program gives, by act."""
        tf.random.set_seed(3)
        self._model.set_weights(self._first)
        self._data = program.data.make()
        found: dict[str, np.ndarray] = {}
        for i, (act, derived, number) in enumerate(program.acts):
            values = getattr(self, "_" + act.replace(" ", "_"))(program.data, derived, number)
            if "repeat" in program.data.rest:  # behind its last batch a thread of TensorFlow begins another order soon
                time.sleep(SETTLED_S)
            found |= {f"{i}/{act}/{name}": np.asarray(value) for name, value in values.items()}
        return found | {f"weights/{i}": weight for i, weight in enumerate(self._model.get_weights())}

    def _of(self, derived: str) -> tf.data.Dataset:
        return DERIVED[derived](self._data)

    def _limited(self, elements: Iterable[Any], count: int = 9) -> Iterator[Any]:
        return itertools.islice(elements, count)

    def _values(self, elements: Iterable[Any]) -> list[np.ndarray]:
        return [self._seen(x).numpy() for x, _ in elements]

    def _named(self, values: Iterable[Any]) -> dict[str, Any]:
        return {str(i): value for i, value in enumerate(values)}

    def _sharded(self, dataset: tf.data.Dataset) -> Any:
        return dataset if self._wh is None else self._wh.shard(dataset)

    def _loop(self, data: Data, derived: str, number: int) -> dict[str, Any]:
        elements = self._of(derived)
        return self._named(x.numpy() for x, _ in elements)

    def _part(self, data: Data, derived: str, number: int) -> dict[str, Any]:
        return self._named(x.numpy() for x, _ in self._limited(self._of(derived), number))

    def _shard(self, data: Data, derived: str, number: int) -> dict[str, Any]:
        made = self._sharded(self._of(derived))
        found = [self._values(made) for _ in range(number)]
        return self._named(itertools.chain(*found))

    def _shard_part(self, data: Data, derived: str, number: int) -> dict[str, Any]:
        return self._named(self._values(self._limited(self._sharded(self._of(derived)), number)))

    def _both(self, data: Data, derived: str, number: int) -> dict[str, Any]:
        """Two iterations at once."""
        one, other = iter(self._sharded(self._data)), iter(self._sharded(self._of(derived)))
        found = []
        for (x, _), (y, _) in self._limited(zip(one, other), 4):
            found += [self._seen(x).numpy(), self._seen(y).numpy()]
        return self._named(found)

    def _restart(self, data: Data, derived: str, number: int) -> dict[str, Any]:
        """A process ends in the middle of an iteration, and another one goes on with it, and with all that follows."""
        iterator = iter(self._sharded(self._of(derived)))
        found = self._values(self._limited(iterator, number))
        if self._wh is not None:
            # All ranks read what the first one writes to its folder, which stays for as long.
            self._folder = tempfile.TemporaryDirectory()
            path = tf.train.Checkpoint(data=iterator).write(str(Path(self._folder.name, "saved")))
            tf.random.set_seed(3)  # as the other process does
            self._data = data.make()
            iterator = iter(self._sharded(self._of(derived)))
            tf.train.Checkpoint(data=iterator).read(path).assert_consumed()
        found += self._values(iterator)
        return self._named(found)

    def _fit(self, data: Data, derived: str, number: int, **more: Any) -> dict[str, Any]:
        return self._model.fit(self._of(derived), epochs=number, verbose=0, **more).history

    def _fit_and_validate(self, data: Data, derived: str, number: int) -> dict[str, Any]:
        part = self._of(derived)
        return self._model.fit(self._data, epochs=number, verbose=0, validation_data=part).history

    def _callback(self, data: Data, derived: str, number: int) -> dict[str, Any]:
        """The script looks at the data after each epoch."""
        seen: list[np.ndarray] = []
        part = self._of(derived)

        def look(epoch: int, logs: Any) -> None:
            seen.extend(x.numpy() for x, _ in self._limited(part, 2))

        callback = self._keras.callbacks.LambdaCallback(on_epoch_end=look)
        return self._fit(data, "all", number, callbacks=[callback]) | self._named(seen)

    def _evaluate(self, data: Data, derived: str, number: int) -> dict[str, Any]:
        return {"loss": self._model.evaluate(self._of(derived), verbose=0)}

    def _predict(self, data: Data, derived: str, number: int) -> dict[str, Any]:
        return {"rows": self._model.predict(self._of(derived), verbose=0)}


def run_of(wh: Any, keras: Any) -> Run:
    """What runs programs with one model, whose steps are compiled once."""
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return Run(wh, model, keras)
