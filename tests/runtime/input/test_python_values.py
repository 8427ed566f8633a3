"""Values of Python that a trace reads and changes: where a step is traced again, they are those of the first trace."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale as wh
from whale.runtime.input.python_values import PythonValues

X = np.random.default_rng(0).normal(size=(27, 6)).astype("float32")
count = 0


class Owner:
    calls = 0

    def __init__(self) -> None:
        self.n, self.flag, self.seen, self.named = 1, True, [1, 2], {"a": 1.0}
        self.mask: Any = None
        self.late: Any = None
        self.ring = self

    def step(self) -> tuple[Any, ...]:
        global count
        found = self.n, self.flag, list(self.seen), dict(self.named), Owner.calls, count, hasattr(self, "new")
        self.n, self.flag, self.late = self.n + 1, False, self.ring
        self.seen.append(3)
        self.named["b"] = 2.0
        self.new = 5
        Owner.calls += 1
        count += 1
        return found


def make_closure() -> tuple[Callable[[], tuple[int, list[int]]], Callable[[], tuple[int, list[int]]]]:
    n, held = 0, [7]

    def step() -> tuple[int, list[int]]:
        nonlocal n
        n += 1
        held[0] += 1
        return n, list(held)

    return step, lambda: (n, list(held))


def test_objects_globals_and_classes_are_as_they_were_and_stay_as_they_are() -> None:
    owner = Owner()
    step = functools.partial(Owner.step, weakref.proxy(owner))
    values, first = PythonValues(step), owner.step()
    now = dict(vars(owner)), list(owner.seen), dict(owner.named), Owner.calls, count
    for _ in range(2):
        with values.put_back():
            assert owner.step() == first
            assert owner.late is not None  # no value that may be computed again
        assert (dict(vars(owner)), list(owner.seen), dict(owner.named), Owner.calls, count) == now


def test_cells_are_as_they_were() -> None:
    step, look = make_closure()
    values = PythonValues(step)
    assert step() == (1, [8])
    with values.put_back():
        assert step() == (1, [8])
    assert look() == (1, [8])


def test_tensors_of_another_trace_give_way_and_variables_do_not() -> None:
    owner = Owner()
    values = PythonValues(owner.step)
    with tf.Graph().as_default():
        owner.mask = tf.ones([2])
    owner.late = tf.Variable(1.0)
    with values.put_back():
        assert owner.mask is None and isinstance(owner.late, tf.Variable)
    assert owner.mask is not None


class Refusing:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no {name}")


def test_objects_that_refuse_to_be_asked_are_left_alone() -> None:
    refusing, n = Refusing(), [1]
    values = PythonValues(lambda: (refusing, n))
    n[0] = 2
    with values.put_back():
        assert n == [1]
    assert n == [2]


def test_objects_are_not_kept() -> None:
    owner = Owner()
    values, gone = PythonValues(functools.partial(Owner.step, weakref.proxy(owner))), weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    with values.put_back():
        pass


class Counting(keras.Model):
    """Begins its layer with its first batch, and changes itself at each trace, which one process has one of."""

    def __init__(self) -> None:
        super().__init__()
        self.traces, self.first = 0, True
        self.hidden, self.out = keras.layers.Dense(4), keras.layers.Dense(1)
        self.shift = self.add_weight(shape=(4,), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        if self.first and isinstance(hidden, tf.Tensor):
            self.shift.assign(tf.reduce_mean(hidden, 0))
            self.first = False
        return self.out(hidden - self.shift)

    def train_step(self, data: Any) -> Any:
        self.traces += 1
        return {**super().train_step(data), "traces": tf.constant(self.traces)}


def train_counting() -> tuple[list[Any], Any]:
    keras.utils.set_random_seed(3)
    model = Counting()
    model(X[:1])
    model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((X, X[:, :1]))
    found = model.fit(rows.batch(6), epochs=2, verbose=0).history
    model.hidden.trainable = False  # for a trace that comes later
    found |= {f"again {key}": value for key, value in model.fit(rows.batch(5), verbose=0).history.items()}
    return [*found.items(), ("traces", model.traces)], [np.asarray(w) for w in model.weights]


def train_step_of_many_sizes(function: Callable[..., Any]) -> list[float]:
    n = 0

    @function(reduce_retracing=True)
    def step(x: Any) -> Any:
        nonlocal n
        n += 1
        return tf.reduce_sum(x) * n

    return [float(step(tf.constant(X[:rows]))) for rows in (6, 6, 3, 4, 5, 7, 4)] + [float(n)]


def test_steps_are_traced_again_as_one_process_traced_them(ranks: Callable[..., None]) -> None:
    (said, weights), sizes = train_counting(), train_step_of_many_sizes(tf.function)
    ranks(2)
    (found, own), mine = train_counting(), train_step_of_many_sizes(wh.function)
    for (name, value), (other, wanted) in zip(found, said, strict=True):
        assert name == other
        np.testing.assert_allclose(value, wanted, rtol=1e-5, err_msg=name)
    for one, wanted in zip(own, weights, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mine, sizes, rtol=1e-5)
