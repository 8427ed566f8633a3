"""Updates that are traced once for many variables give the bits of updates that are traced one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.capture import function as capturing
from whale.capture.function import capture_function
from whale.ir.ops import CALLS
from whale.passes.normalize import collapse_updates

keras: Any = tf.keras
_Adam: Any = keras.optimizers.Adam
pytestmark = pytest.mark.skipif(not hasattr(keras, "ops"), reason="only Keras 3's updates are traced so")

_WIDTH, _LAYERS, _STEPS = 4, 4, 3
_MANY = 9  # layers for which also the decay of weights and their averages are traced once: they have few operations
_SCHEDULE: dict[str, Any] = {"initial_learning_rate": 0.1, "decay_steps": 2, "decay_rate": 0.5}


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    wh.shutdown()


def _schedule() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(**_SCHEDULE)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(_schedule(), momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(lambda: tf.constant(0.01, tf.float64)),
    "amsgrad": lambda: keras.optimizers.Adam(_schedule(), amsgrad=True, global_clipnorm=0.5),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "lazy": lambda: wh.optimizers.lazy(keras.optimizers.Adam(0.01)),
}
if hasattr(keras.optimizers, "Muon"):
    OPTIMIZERS["muon"] = lambda: keras.optimizers.Muon(0.01)
SINGLE = ("muon",)  # that compute in float32 only


def _variables(dtype: str = "float64", layers: int = _LAYERS) -> list[Any]:
    """Matrices and vectors of two shapes each, one scalar for each layer, and a table."""
    random = np.random.default_rng(3)
    shapes = [(_WIDTH, _WIDTH), (_WIDTH,), ()] * layers + [(1, _WIDTH), (9, _WIDTH)]
    names = {2: "kernel", 1: "bias", 0: "scale"}
    return [keras.Variable(random.normal(size=n, scale=0.5), dtype=dtype, name=names[len(n)]) for n in shapes]


def _loss(variables: list[Any], x: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    *layers, last, table = [variable.value for variable in variables]
    y = x + tf.gather(table, ids)
    for i in range(len(layers) // 3):
        weight, bias, scale = layers[3 * i : 3 * i + 3]
        y = y + tf.tanh(y @ weight + bias) * scale
    return tf.reduce_mean(tf.square(tf.reduce_sum(y * last, axis=-1) - 1.0))


def _batch(step: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(step)
    return random.normal(size=(8, _WIDTH)).astype(dtype), random.integers(0, 9, 8)


def _train(
    optimizer: Any,
    wrap: Callable[[Any], Any],
    dtype: str = "float64",
    layers: int = _LAYERS,
    scope: Callable[[], Any] = nullcontext,
) -> list[np.ndarray]:
    """Trains with two updates a step, the loss in ``scope``; returns the losses, the weights and the optimizer's
    state.
    """
    variables = _variables(dtype, layers)
    optimizer.build(variables)

    def step(x: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        for _ in range(2):
            with tf.GradientTape() as tape:
                with scope():
                    loss = _loss(variables, x, ids)
                whole = optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss
            optimizer.apply_gradients(zip(tape.gradient(whole, [v.value for v in variables]), variables))
        return loss

    call = wrap(tf.autograph.experimental.do_not_convert(step))
    losses = [np.asarray(call(*map(tf.constant, _batch(i, dtype)))) for i in range(_STEPS)]
    return [*losses, *[tf.convert_to_tensor(v.value).numpy() for v in (*variables, *optimizer.variables)]]


@contextmanager
def _one_by_one() -> Iterator[None]:
    yield


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_optimizers_give_what_tensorflow_gives(name: str) -> None:
    wh.init()
    dtype, bound = ("float32", 1e-5) if name in SINGLE else ("float64", 1e-10)
    once = _train(OPTIMIZERS[name](), wh.function, dtype)
    plain = _train(OPTIMIZERS[name](), tf.function, dtype)
    for own, one in zip(once, plain, strict=True):
        np.testing.assert_allclose(own, one, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", ["adam", "sgd", "accumulated"])
def test_bits_are_those_of_updates_that_are_traced_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wh.init()
    once = _train(OPTIMIZERS[name](), wh.function)
    monkeypatch.setattr(capturing, "trace_updates_once", _one_by_one)
    for own, one in zip(once, _train(OPTIMIZERS[name](), wh.function), strict=True):
        np.testing.assert_array_equal(own, one)


def _calls(optimizer: Any, layers: int = _LAYERS) -> int:
    """Returns how many updates of a step are calls of functions."""
    variables = _variables(layers=layers)
    optimizer.build(variables)

    def step(x: tf.Tensor, ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = _loss(variables, x, ids)
        optimizer.apply_gradients(zip(tape.gradient(loss, [v.value for v in variables]), variables))

    program = capture_function(tf.autograph.experimental.do_not_convert(step), _batch(0)).program
    return sum(node.op in CALLS for node in program.nodes)


def test_the_first_update_of_a_kind_is_traced_by_itself() -> None:
    # Of three kinds with six variables each; the other two variables have shapes of their own.
    assert _calls(keras.optimizers.Adam(0.01)) == 3 * (_LAYERS - 1)
    assert _calls(keras.optimizers.SGD(0.01)) == 0  # some operations each, for which no function is worth while


class RatesOfTheirOwn(_Adam):
    """Updates that depend on more of a variable than its shape: a rate of its own."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate * (1 + self._get_variable_index(variable)))


class AssignsItsOwn(_Adam):
    """Assignments that do something of their own."""

    def assign_sub(self, variable: Any, value: Any) -> None:
        super().assign_sub(variable, 2 * value)


def test_updates_of_others_are_traced_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _calls(RatesOfTheirOwn(0.01)) == 0
    assert _calls(AssignsItsOwn(0.01)) == 0
    own = keras.optimizers.Adam(0.01)
    own.update_step = lambda gradient, variable, rate: variable.assign_sub(gradient)
    assert _calls(own) == 0
    changed = keras.optimizers.Adam.update_step

    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        changed(self, gradient, variable, learning_rate * (1 + self._get_variable_index(variable)))

    monkeypatch.setattr(keras.optimizers.Adam, "update_step", update_step)
    assert _calls(keras.optimizers.Adam(0.01)) == 0


def test_rates_of_variables_stay_their_own() -> None:
    wh.init()
    own, plain = _train(RatesOfTheirOwn(0.01), wh.function), _train(RatesOfTheirOwn(0.01), tf.function)
    for one, other in zip(own, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def _exclude(optimizer: Any) -> Any:
    """Leaves the biases without decay."""
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


_AVERAGED: dict[str, Any] = {"use_ema": True, "ema_momentum": 0.9}
# What is done to weights before and after their update.
AROUND: dict[str, Callable[[], Any]] = {
    "decayed": lambda: _exclude(keras.optimizers.AdamW(_schedule(), weight_decay=0.1, clipnorm=0.1)),
    "decayed by hand": lambda: keras.optimizers.SGD(lambda: tf.constant(0.01, tf.float64), weight_decay=0.1),
    "averaged": lambda: keras.optimizers.Adam(0.01, **_AVERAGED, global_clipnorm=0.5),
    "overwritten": lambda: keras.optimizers.SGD(_schedule(), **_AVERAGED, ema_overwrite_frequency=3),
    "all": lambda: _exclude(
        keras.optimizers.AdamW(
            _schedule(), weight_decay=0.1, **_AVERAGED, ema_overwrite_frequency=2, gradient_accumulation_steps=2
        )
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_decay_and_averages_give_what_tensorflow_gives(name: str) -> None:
    wh.init()
    once = _train(AROUND[name](), wh.function, layers=_MANY)
    for own, one in zip(once, _train(AROUND[name](), tf.function, layers=_MANY), strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", AROUND)
def test_bits_of_decay_and_averages_are_those_of_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wh.init()
    once = _train(AROUND[name](), wh.function, layers=_MANY)
    monkeypatch.setattr(capturing, "trace_updates_once", _one_by_one)
    for own, one in zip(once, _train(AROUND[name](), wh.function, layers=_MANY), strict=True):
        np.testing.assert_array_equal(own, one)


@pytest.mark.parametrize("name", ["decayed", "all"])
@pytest.mark.parametrize(
    ("scope", "config"),
    [
        (nullcontext, {"memory.zero": 1, "memory.zero_min_bytes": 0}),
        (nullcontext, {"memory.zero": 3, "memory.zero_min_bytes": 0}),
        (lambda: wh.split(), {}),
    ],
    ids=["zero 1", "zero 3", "split"],
)
def test_decay_and_averages_of_divided_weights_are_those_of_one_device(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, name: str, scope: Any, config: dict[str, Any]
) -> None:
    monkeypatch.setattr(collapse_updates, "MANY", 1)  # so that each is planned as one operation
    plain = _train(AROUND[name](), tf.function, layers=_MANY)
    ranks(2, **config)
    for own, one in zip(_train(AROUND[name](), wh.function, layers=_MANY, scope=scope), plain, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-10, atol=1e-10)


class CountedRate(_Adam):
    """A learning rate that code of the script decides anew whenever it is asked, as decay does for each variable."""

    asked = 0

    @property
    def learning_rate(self) -> Any:
        self.asked += 1
        return tf.constant(0.01 * self.asked, tf.float64)


def test_decay_and_averages_are_traced_once_where_only_handles_differ() -> None:
    each = 3 * (_MANY - 1)  # variables of three kinds but the first of each
    assert _calls(keras.optimizers.SGD(0.01, weight_decay=0.1), _MANY) == each
    excluded = _exclude(keras.optimizers.SGD(0.01, weight_decay=0.1))
    assert _calls(excluded, _MANY) == 2 * (_MANY - 1)  # all but the biases
    assert _calls(keras.optimizers.SGD(0.01, **_AVERAGED), _MANY) == each
    assert _calls(keras.optimizers.AdamW(0.01, **_AVERAGED), _MANY) == 3 * each
    assert _calls(keras.optimizers.SGD(lambda: tf.constant(0.01), weight_decay=0.1), _MANY) == 0
    assert _calls(CountedRate(0.01, weight_decay=0.1), _MANY) == each  # of the update, not of the decay


def test_methods_of_optimizers_are_keras_own_after_a_trace() -> None:
    kind = keras.optimizers.Adam
    names = ("_distributed_tf_update_step", "_apply_weight_decay", "_update_model_variables_moving_average")
    before = {name: [vars(one).get(name) for one in kind.__mro__] for name in names}
    _calls(keras.optimizers.AdamW(0.01, **_AVERAGED), 1)
    assert {name: [vars(one).get(name) for one in kind.__mro__] for name in names} == before


def test_a_call_of_an_update_does_not_infer_shapes_again() -> None:
    """Inferring copies all constants that TensorFlow knows of the graph, for each variable."""
    optimizer = keras.optimizers.Adam(0.01)
    variables = _variables()
    optimizer.build(variables)

    def step(x: tf.Tensor, ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = _loss(variables, x, ids)
        optimizer.apply_gradients(zip(tape.gradient(loss, [v.value for v in variables]), variables))

    trace = capturing.trace_function(tf.autograph.experimental.do_not_convert(step), _batch(0))
    calls = [node for node in trace._graph.as_graph_def().node if node.op in CALLS]
    infers = [node for node in calls if not node.attr["_disable_call_shape_inference"].b]
    assert len(calls) == 3 * (_LAYERS - 1) and len(infers) == 3  # the first of each kind
