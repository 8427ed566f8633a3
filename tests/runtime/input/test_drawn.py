"""Steps that read batches of an iterator themselves are divided as those that are given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import ProgramError

pytestmark = pytest.mark.core

X = np.random.default_rng(0).random((20, 3)).astype(np.float32)


def dataset() -> tf.data.Dataset:
    """Batches of 8, 8 and 4 rows."""
    return tf.data.Dataset.from_tensor_slices((X, X[:, :1] * 2)).batch(8)


def trainer() -> Callable[[Any, Any], Any]:
    w = tf.Variable(np.full((3, 1), 0.5, np.float32))

    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(x, w) - y) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    return train


def epochs(step: Callable[[Any], Any], iterators: list[Any]) -> list[float]:
    losses = []
    for iterator in iterators:
        try:
            while True:
                losses.append(float(step(iterator)))
        except tf.errors.OutOfRangeError:
            pass
    return losses


def rows(step: Any) -> list[list[tuple[int, ...]]]:
    return [[b.placement.sizes for b in s.compiled.plan.batch_inputs] for s in step._steps.values()]


def argument(function: Any) -> tuple[Any, list[float]]:
    train = trainer()
    step = function(lambda it: train(*next(it)))
    return step, epochs(step, [iter(dataset()) for _ in range(2)])


def captured(function: Any) -> tuple[Any, list[float]]:
    train, iterator = trainer(), iter(dataset().repeat(2))
    step = function(lambda: train(*iterator.get_next()))
    return step, epochs(lambda _: step(), [None])


def begun(function: Any) -> tuple[Any, list[float]]:
    """The script has taken a batch before, and takes one between the steps."""
    train, iterator = trainer(), iter(dataset().repeat(3))
    step = function(lambda data, rate: train(*next(data["train"])) * rate)
    next(iterator)
    first = float(step({"train": iterator}, 2.0))
    next(iterator)
    return step, [first, *epochs(lambda it: step({"train": it}, 2.0), [iterator])]


@pytest.mark.parametrize("case", [argument, captured, begun])
def test_the_batch_is_divided(ranks: Callable[..., None], case: Callable[[Any], tuple[Any, list[float]]]) -> None:
    _, expected = case(tf.function)
    ranks(2)
    step, found = case(wh.function)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert sorted(rows(step)) == [[(2, 2)] * 2, [(4, 4)] * 2]


def test_several_batches_of_one_step(ranks: Callable[..., None]) -> None:
    def two(function: Any) -> list[float]:
        train = trainer()
        step = function(lambda a, b: train(*next(a)) + train(*next(b)) + train(*next(a)))
        return [float(step(iter(dataset()), iter(dataset().skip(1)))) for _ in range(2)]

    expected = two(tf.function)
    ranks(2)
    np.testing.assert_allclose(two(wh.function), expected, rtol=1e-5)


def make_epoch(function: Any, train: Any) -> Any:
    """Returns a step that trains on every element of an iterator; it returns the sum of the losses."""

    @function
    def epoch(iterator: Any) -> Any:
        total = 0.0
        for x, y in iterator:
            total += train(x, y)
        return total

    return epoch


@pytest.mark.parametrize("size", [1, 2])
def test_inside_a_loop_every_rank_reads(ranks: Callable[..., None], size: int) -> None:
    def looped(function: Any) -> list[float]:
        train = trainer()

        @function
        def step(iterator: Any) -> Any:
            total = 0.0
            for _ in tf.range(2):
                total += train(*next(iterator))
            return total

        all_of = make_epoch(function, train)
        of_two = [float(step(iter(dataset().take(2).repeat()))) for _ in range(2)]
        return of_two + [float(all_of(iter(dataset().take(2)))) for _ in range(2)]

    expected = looped(tf.function)
    ranks(size)
    np.testing.assert_allclose(looped(wh.function), expected, rtol=1e-5)


@pytest.mark.parametrize("form", ["loop", "branch"])
def test_loops_and_branches_over_optionals_name_what_runs(ranks: Callable[..., None], form: str) -> None:
    """Checks the message: an optional cannot be sent to the other ranks, which are threads here."""

    def looped(function: Any, by_hand: bool) -> list[float]:
        train = trainer()

        @function
        def optionals(iterator: Any) -> Any:
            total, found = 0.0, iterator.get_next_as_optional()
            if form == "branch":
                if found.has_value():
                    total = train(*found.get_value())
                return total
            while found.has_value():
                total += train(*found.get_value())
                found = iterator.get_next_as_optional()
            return total

        step = optionals if by_hand else make_epoch(function, train)
        return [float(step(iter(dataset().take(2)))) for _ in range(2)]

    expected = looped(tf.function, False)
    ranks(2)
    with pytest.raises(wh.PlanError, match=r"for x in iterator(.|\n)*whale run") as caught:
        looped(wh.function, True)
    assert "datasets or iterators" in str(caught.value)
    np.testing.assert_allclose(looped(wh.function, False), expected, rtol=1e-5)


def loop_over_datasets(function: Callable[..., Any]) -> list[float]:
    """Trains in loops over datasets: arguments, captured ones that reshuffle, in another loop, with a break."""
    train, last = trainer(), tf.Variable(0.0)
    shuffled = tf.data.Dataset.from_tensor_slices((X, X[:, :1] * 2)).shuffle(20, seed=3).batch(8)
    words = tf.data.Dataset.from_tensor_slices(
        {"rows": tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]]), "text": ["a", "bb", "ccc"]}
    ).batch(2)

    @function
    def epoch(data: Any) -> Any:
        total, n = 0.0, 0
        for x, y in data:
            total += train(x, y)
            n += 1
        return total + tf.cast(n, tf.float32)

    @function
    def several(most: Any) -> Any:
        n, read = 0, 0.0
        for _ in tf.range(2):
            for x, y in shuffled.take(2):
                last.assign(train(x, y))
                n += 1
                if n >= most:
                    break
            for found in words:
                read += tf.reduce_sum(found["rows"]) + tf.reduce_sum(
                    tf.cast(tf.strings.length(found["text"]), tf.float32)
                )
        return last + read

    losses = [epoch(shuffled), epoch(shuffled), epoch(dataset()), several(3), several(4), several(3)]
    return [float(loss) for loss in losses] + [float(train(x, y)) for x, y in shuffled]


def test_loops_over_datasets_equal_one_device(ranks: Callable[..., None]) -> None:
    expected = loop_over_datasets(tf.function)
    ranks(2)
    np.testing.assert_allclose(loop_over_datasets(wh.function), expected, rtol=1e-5)


def created_at_the_first_call(function: Callable[..., Any]) -> list[float]:
    """A step that creates variables and reads two iterators: it is traced more than once."""
    made: dict[str, tf.Variable] = {}
    batches, numbers = iter(dataset().repeat()), iter(tf.data.Dataset.counter(1, 1))

    @function
    def step(x: Any) -> Any:
        (a, b), number = next(batches), tf.cast(next(numbers), tf.float32)
        if not made:
            made["w"] = tf.Variable(tf.ones((3, 1)))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(a, made["w"]) - b) ** 2) + tf.reduce_mean(tf.matmul(x, made["w"])) / number
        made["w"].assign_sub(0.1 * tape.gradient(loss, made["w"]))
        return loss

    losses = [float(step(X[:8])) for _ in range(4)]
    return [*losses, float(tf.reduce_sum(next(batches)[0])), float(next(numbers))]


def read_in_train_steps() -> list[float]:
    """Reads, in a model's own train_step, an iterator of the model's beside the batch of fit."""

    class Unlabelled(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.rest = keras.layers.Dense(1), iter(dataset().repeat())

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            (x, y), (other, _) = data, next(self.rest)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2) + tf.reduce_mean(tf.abs(self(other)))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return {"loss": loss}

    keras.utils.set_random_seed(3)
    model = Unlabelled()
    model.compile(keras.optimizers.SGD(0.1))
    history = model.fit(X, X[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [*history, float(tf.reduce_sum(model.dense.kernel)), float(tf.reduce_sum(next(model.rest)[0]))]


@pytest.mark.parametrize("case", [created_at_the_first_call, lambda _: read_in_train_steps()])
def test_a_step_that_is_traced_twice_reads_each_batch_once(
    ranks: Callable[..., None], case: Callable[[Any], list[float]]
) -> None:
    expected = case(tf.function)
    ranks(2)
    np.testing.assert_allclose(case(wh.function), expected, rtol=1e-5)


def test_inside_and_outside_of_a_loop_is_an_error(ranks: Callable[..., None]) -> None:
    train = trainer()

    @wh.function
    def step(iterator: Any) -> Any:
        total = train(*next(iterator))
        for _ in tf.range(2):
            total += train(*next(iterator))
        return total

    ranks(2)
    with pytest.raises(Exception, match="inside a loop"):  # AutoGraph puts its own error around it
        step(iter(dataset()))

    @wh.function
    def rest(iterator: Any) -> Any:
        total = train(*next(iterator))
        for x, _ in iterator:
            total += tf.reduce_sum(x)
        return total

    with pytest.raises(ProgramError, match="inside a loop"):
        rest(iter(dataset().take(2)))


def test_without_ranks_that_differ_the_iterator_stays_where_it_is(ranks: Callable[..., None]) -> None:
    """What a step has not read is there for the script."""
    ranks(2)
    train = trainer()
    step = wh.function(lambda it: train(*next(it)))
    iterator = iter(dataset())
    step(iterator)
    np.testing.assert_array_equal(next(iterator)[0], X[8:16])
    step(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
