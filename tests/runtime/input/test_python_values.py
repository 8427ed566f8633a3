"""Settings of Python that a trace reads and changes: where a step is traced again, they are as for the first trace."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import gc
import types
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
scale: dict[str, Any] = {"by": 1.0, "of": tf.sin}


def shift(x: Any) -> Any:
    return x + 1.0


class Mode(enum.Enum):
    LINEAR = 1
    SQUARE = 2


@dataclasses.dataclass(frozen=True)
class Options:
    rate: float = 0.5
    sizes: tuple[float, ...] = (1.0, 2.0)


@dataclasses.dataclass(slots=True)
class Slotted:
    rate: float = 0.5


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


class Hidden:
    """Shows no class, as a lazy object whose value cannot be made yet."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("not made yet")


def test_what_does_not_show_its_class_is_left_alone() -> None:
    owner = Owner()
    hidden: list[Any] = [weakref.proxy(Owner.__new__(Owner)), weakref.proxy(owner), Hidden()]

    class Holder:
        dead, later, lazy = hidden

        def __init__(self) -> None:
            self.dead, self.later, self.lazy = hidden
            self.listed, self.named, self.n = [hidden], {"a": hidden[0], "b": [hidden[2]]}, 1

    holder = Holder()
    values = PythonValues(lambda: (holder, hidden))
    del owner
    gc.collect()
    holder.n, holder.listed, holder.named = 2, [hidden[1]], {"a": hidden[2]}
    with values.put_back():
        assert holder.n == 1
    assert (holder.n, holder.listed, list(holder.named)) == (2, [hidden[1]], ["a"])


def test_objects_are_not_kept() -> None:
    owner = Owner()
    values, gone = PythonValues(functools.partial(Owner.step, weakref.proxy(owner))), weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    with values.put_back():
        pass


class Network(tf.Module):
    """Reads settings of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(2.0)
        self.number, self.whole, self.bounds = np.float32(1.0), np.int64(2), (0.5, tf.tanh)
        self.mode, self.options, self.slotted = Mode.LINEAR, Options(), Slotted()
        self.space, self.more = types.SimpleNamespace(rate=1.0), collections.OrderedDict(rate=1.0)
        self.mask, self.names, self.listed, self.sizes = np.ones(3), {"a"}, [1.0, (2.0,)], {"a": 1.0}
        self.mixed = {"rate": 1.0, "weight": self.weight}
        self.nested, self.activation = {"a": [{"rate": 1.0}]}, keras.layers.Activation("tanh")
        self.function, self.method = (lambda x: x * 2.0), self.keep

    def keep(self, x: Any) -> Any:
        return x * self.weight

    def square(self, x: Any) -> Any:
        return x * x

    def __call__(self, x: Any) -> Any:
        x = x * self.number * float(self.whole) * self.bounds[0] + self.bounds[1](x)
        x = (
            x
            * (3.0 if self.mode is Mode.SQUARE else 1.0)
            * self.options.rate
            * self.options.sizes[0]
            * self.slotted.rate
        )
        x = (
            x
            + self.space.rate
            + self.more["rate"] * tf.constant(self.mask, tf.float32) * (2.0 if "b" in self.names else 1.0)
        )
        x = x * self.listed[0] * self.listed[1][0] + self.sizes["a"] * self.nested["a"][0]["rate"]
        x = x * self.mixed["rate"] + scale["by"] * scale["of"](x)
        return self.method(self.function(shift(self.activation(x))))


def _replace_shift(network: Network) -> None:
    globals()["shift"] = lambda x: x - 5.0


CHANGES: dict[str, Callable[[Network], Any]] = {
    "numbers of NumPy": lambda n: setattr(n, "number", np.float32(3.0)),
    "integers of NumPy": lambda n: setattr(n, "whole", np.int64(5)),
    "tuples": lambda n: setattr(n, "bounds", (2.0, tf.nn.relu)),
    "enumerations": lambda n: setattr(n, "mode", Mode.SQUARE),
    "frozen options": lambda n: setattr(n, "options", dataclasses.replace(n.options, rate=7.0)),
    "options with slots": lambda n: setattr(n.slotted, "rate", 7.0),
    "namespaces": lambda n: setattr(n.space, "rate", 7.0),
    "ordered dictionaries": lambda n: n.more.__setitem__("rate", 7.0),
    "arrays": lambda n: n.mask.__imul__(4.0),
    "other arrays": lambda n: setattr(n, "mask", n.mask * 4.0),
    "sets": lambda n: n.names.add("b"),
    "lists": lambda n: n.listed.__setitem__(1, (9.0,)),
    "dictionaries": lambda n: n.sizes.__setitem__("a", 9.0),
    "dictionaries with variables": lambda n: n.mixed.__setitem__("rate", 9.0),
    "nested ones": lambda n: n.nested["a"][0].__setitem__("rate", 9.0),
    "layers' activations": lambda n: setattr(n.activation, "activation", keras.activations.relu),
    "functions": lambda n: setattr(n, "function", lambda x: x * 9.0),
    "methods": lambda n: setattr(n, "method", n.square),
    "globals that methods read": lambda n: scale.update(by=9.0, of=tf.cos),
    "functions that methods call": _replace_shift,
}


def test_settings_of_all_kinds_are_as_they_were() -> None:
    first = shift
    for name, change in CHANGES.items():
        network, x = Network(), tf.constant([0.3, 0.2, -0.4])
        values, before = PythonValues(lambda: network(x)), network(x)  # noqa: B023
        change(network)
        changed = network(x)
        assert not np.array_equal(changed, before), name
        for _ in range(2):
            with values.put_back():
                np.testing.assert_array_equal(network(x), before, name)
            np.testing.assert_array_equal(network(x), changed, name)
        scale.update(by=1.0, of=tf.sin)
        globals()["shift"] = first


def test_what_holds_a_variable_or_itself_stays() -> None:
    owner = types.SimpleNamespace(held=(tf.Variable(1.0),), ring=[])
    owner.ring.append(owner)
    values = PythonValues(lambda: owner)
    new = owner.held, owner.ring = (tf.Variable(2.0),), [3]
    with values.put_back():
        assert (owner.held, owner.ring) == new


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


class Weighted(keras.Model):
    """Has settings that are changed while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)
        self.scale, self.options, self.weighted, self.mask = np.float32(1.0), Options(), {"a": 1.0}, np.ones(4)

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x) * self.scale * self.options.rate * self.weighted["a"]
        return self.out(hidden * tf.constant(self.mask, tf.float32))


def train_while_settings_change() -> Any:
    keras.utils.set_random_seed(3)
    model = Weighted()

    def change(batch: int, logs: Any) -> None:
        if batch == 2:  # the next batch is the last, and smaller
            model.scale, model.options = np.float32(2.0), Options(3.0)
            model.weighted["a"] = 5.0
            model.mask *= 2.0

    model.compile("sgd", "mse")
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=change)
    losses = model.fit(X, X[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=[callback]).history["loss"]
    return [losses, *model.get_weights(), model.scale, model.options.rate, model.weighted["a"], model.mask]


def test_settings_that_change_while_keras_trains(ranks: Callable[..., None]) -> None:
    expected = train_while_settings_change()
    ranks(2)
    for found, wanted in zip(train_while_settings_change(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
