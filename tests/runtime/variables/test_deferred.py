"""Variables that are born split: parts of initial values equal the whole bit by bit, and nothing whole is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
import whale.runtime.variables.partial_initializers as initial_values
from whale.ir.layout import divide_evenly, shard
from whale.ir.mesh import make_one_axis_tiles
from whale.runtime import context as run_context
from whale.runtime.variables import deferred
from whale.runtime.variables.deferred import find_deferred, restore_from
from whale.runtime.variables.initializer_recording import record
from whale.runtime.variables.partial_initializers import DeferredInitial, record_uniform_value

Start = Callable[..., None]
INPUTS, OUTPUTS = 33, 47
NAMES = (
    "zeros", "ones", "random_normal", "random_uniform", "truncated_normal", "glorot_normal", "glorot_uniform",
    "he_normal", "he_uniform", "lecun_normal", "lecun_uniform", "variance_scaling", "orthogonal", "identity",
)  # fmt: skip


def raw(value: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(value)).view(np.uint8)


@pytest.mark.core
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_an_initial_value_are_those_of_the_whole(name: str) -> None:
    initializer = tf.keras.initializers.get(name)
    for shape in ((INPUTS, OUTPUTS), (3, 3, 5, 29)):
        if name == "identity" and len(shape) > 2:
            continue
        for dtype in ("float32", "float64"):
            initial = record(lambda shape=shape, dtype=dtype: initializer(shape, dtype=dtype))
            assert isinstance(initial, DeferredInitial)
            assert initial.is_divisible == (name not in ("orthogonal", "identity"))
            whole = np.asarray(initializer(shape, dtype=dtype))
            for dim, size in enumerate(shape):
                placement = shard(dim, divide_evenly(size, 3))
                parts = [np.asarray(initial.make_part(make_one_axis_tiles(placement), i)) for i in range(3)]
                assert (raw(np.concatenate(parts, dim)) == raw(whole)).all(), (shape, dtype, dim)


def test_a_large_part_is_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_values, "_BLOCK_BYTES", 3000)
    for draw in (tf.random.stateless_normal, tf.random.stateless_truncated_normal):
        for shape in ((67, 45), (3, 5, 17, 22)):
            initial = record(lambda draw=draw, shape=shape: draw(shape, (1, 2)) * 0.3 + 0.1)
            assert isinstance(initial, DeferredInitial)
            whole = (draw(shape, (1, 2)) * 0.3 + 0.1).numpy()
            for dim, size in enumerate(shape):
                placement = shard(dim, divide_evenly(size, 3))
                parts = [initial.make_part(make_one_axis_tiles(placement), i).numpy() for i in range(3)]
                np.testing.assert_array_equal(np.concatenate(parts, dim), whole)


def test_a_part_in_runs_is_each_run_s_part() -> None:
    initial = record(lambda: tf.random.stateless_normal((24, 64), (1, 2)))
    assert isinstance(initial, DeferredInitial)
    placement = shard(0, (5, 3), 3)
    np.testing.assert_array_equal(
        initial.make_part(make_one_axis_tiles(placement), 1), initial.compute_whole().numpy()[placement.list_indices(1)]
    )


def test_tensors_of_equal_elements_are_made_again() -> None:
    zeros = record_uniform_value(tf.zeros((100, 20)))
    assert zeros is not None
    assert np.asarray(zeros.make_part(make_one_axis_tiles(shard(0, (60, 40))), 1)).shape == (40, 20)
    assert record_uniform_value(tf.concat([tf.zeros((100, 20)), [[-0.0] * 20]], 0)) is None


class Net:
    """Two dense layers under Adam, in float64."""

    def __init__(self) -> None:
        tf.keras.utils.set_random_seed(4)
        sizes = ((INPUTS, OUTPUTS), (OUTPUTS, INPUTS))
        self.layers = [tf.keras.layers.Dense(n, dtype="float64") for _, n in sizes]
        for layer, (before, _) in zip(self.layers, sizes):
            layer.build((None, before))
        self.kernels = [layer.kernel for layer in self.layers]
        self.optimizer = tf.keras.optimizers.Adam(0.01, epsilon=1e-3)
        self.optimizer.build(self.kernels)

    def step(self, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.layers[1](tf.tanh(self.layers[0](x))) - x))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.kernels), self.kernels))
        return loss

    def large(self) -> list[Any]:
        every = [tf_variable(v) for v in (*self.kernels, *self.optimizer.variables)]
        return [v for v in every if v.shape.num_elements() == INPUTS * OUTPUTS]


def tf_variable(v: Any) -> Any:
    return v if isinstance(v, tf.Variable) else v.value


def batch() -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).standard_normal((8, INPUTS)))


def alone() -> tuple[list[np.ndarray], float]:
    net = Net()
    first = [v.numpy() for v in net.large()]
    tf.function(net.step)(batch())
    return first, float(tf.function(net.step)(batch()))


@pytest.mark.core
def test_no_rank_ever_holds_a_split_variable_whole(ranks: Start) -> None:
    first, loss = alone()
    ranks(3)
    with wh.split():
        net = Net()

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with wh.split():
            return net.step(x)

    assert len(net.large()) == 6
    assert all(find_deferred(v) is not None for v in net.large())
    step.plan(batch())
    for variable, whole in zip(net.large(), first):
        parts = variable._whale_parts
        assert find_deferred(variable) is None
        shapes = [p.shape.as_list() for p in parts._parts.values()]
        assert sum(int(np.prod(s)) for s in shapes) == whole.size
        assert max(int(np.prod(s)) for s in shapes) <= 17 / 47 * whole.size
        np.testing.assert_array_equal(parts.gather_whole(), whole)
    step(batch())
    assert float(step(batch())) == pytest.approx(loss, rel=1e-12)


@pytest.mark.core
def test_slots_that_a_step_creates_are_born_split_and_its_names_are_those_of_later_traces(
    ranks: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loss = alone()
    ranks(3)
    with wh.split():
        net = Net()
    net.optimizer = tf.keras.optimizers.Adam(0.01, epsilon=1e-3)
    born, traces, defer = [], [], deferred.defer
    monkeypatch.setattr(deferred, "defer", lambda variable, initial: (born.append(variable), defer(variable, initial)))

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        traces.append(x)
        with wh.split():
            return net.step(x)

    step(batch())
    assert len(traces) == 2

    def names(function: Any) -> list[str]:
        program = function._step((batch(),), {}).compiled.ranks[0]
        return [n.name for n in program.nodes if not n.name.startswith("whale/")]  # exchanges: of the plan

    first = names(step)
    slots = [v for v in net.large() if all(v is not tf_variable(k) for k in net.kernels)]
    assert len(slots) == 4 and all(any(v is one for one in born) for v in slots)
    for slot in slots:
        assert max(p.shape.num_elements() for p in slot._whale_parts._parts.values()) <= 17 / 47 * INPUTS * OUTPUTS
    assert float(step(batch())) == pytest.approx(loss, rel=1e-12)
    assert len(traces) == 2
    assert names(wh.function(step._fn)) == first


def test_what_is_needed_before_a_step_is_made_whole(ranks: Start) -> None:
    first, _ = alone()
    ranks(2, **{"memory.zero": 1})
    net = Net()
    read, assigned, traced, kept = net.large()[:4]
    np.testing.assert_array_equal(read.numpy(), first[0])
    assigned.assign(2 * first[1])
    np.testing.assert_array_equal(assigned, 2 * first[1])
    np.testing.assert_array_equal(tf.function(lambda: traced + 0.0)(), first[2])
    assert [find_deferred(v) is None for v in (read, assigned, traced, kept)] == [True, True, True, False]
    wh.shutdown()
    np.testing.assert_array_equal(kept, first[3])


def test_what_stays_whole_and_little_variables_are_made_without_recording_them(
    ranks: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []
    monkeypatch.setattr(deferred, "record", lambda make, dtype: recorded.append(record(make, dtype)) or recorded[-1])
    ranks(2)
    with wh.replica():
        copied = tf.keras.layers.Dense(32)
        copied.build((None, 64))
    assert not recorded and all(find_deferred(getattr(w, "value", w)) is None for w in copied.weights)
    wh.shutdown()
    ranks(2, **{"mesh.auto_parallel": True})
    small, large, more = (tf.keras.layers.Dense(32) for _ in range(3))
    small.build((None, 64))
    large.build((None, 10_000))  # 1.28 MB
    monkeypatch.setattr(run_context, "_AT_ONCE_BYTES", 64 * 32 * 4)
    more.build((None, 65))
    if int(tf.keras.__version__[0]) > 2:
        assert [find_deferred(tf_variable(layer.kernel)) is None for layer in (small, large, more)] == [
            True,
            False,
            False,
        ]
        assert len(recorded) == 2
    recorded.clear()
    wh.shutdown()
    ranks(2)
    with wh.split():
        layer = tf.keras.layers.Dense(32)
        layer.build((None, 64))
    kernel, bias = (getattr(w, "value", w) for w in layer.weights)
    assert [one.shape for one in recorded if isinstance(one, DeferredInitial)] == [(64, 32)]
    assert find_deferred(kernel) is not None and find_deferred(bias) is None
    if int(tf.keras.__version__[0]) > 2:  # Keras 2 tells no size
        assert len(recorded) == 1


def test_a_value_may_come_from_elsewhere_region_by_region(ranks: Start) -> None:
    ranks(2)
    value = np.arange(INPUTS * OUTPUTS, dtype=np.float32).reshape(INPUTS, OUTPUTS) / 1000
    with wh.split():
        dense = tf.keras.layers.Dense(OUTPUTS, use_bias=False)
        dense.build((None, INPUTS))
    asked = []

    def reader(begin: tuple[int, ...], size: tuple[int, ...]) -> np.ndarray:
        asked.append(size)
        return value[tuple(slice(b, b + n) for b, n in zip(begin, size))]

    restore_from(tf_variable(dense.kernel), reader)

    @wh.function
    def product(x: tf.Tensor) -> tf.Tensor:
        with wh.split(dim=-1):
            return dense(x)

    x = np.ones((4, INPUTS), np.float32)
    np.testing.assert_allclose(product(tf.constant(x)), x @ value, rtol=1e-5)
    assert asked == [(INPUTS, 24), (INPUTS, 23)]


def test_what_cannot_be_recorded_is_run_once(ranks: Start) -> None:
    ranks(2, **{"memory.zero": 1})
    np.random.seed(7)
    drawn = tf.Variable(lambda: np.random.randn(50, 50))
    np.random.seed(7)
    np.testing.assert_array_equal(drawn, np.random.randn(50, 50))
    for _ in range(2):  # the second time, the stream of these seeds goes on
        seeded = tf.Variable(lambda: tf.random.normal((50, 50), seed=3))
        assert find_deferred(seeded) is None


def test_random_numbers_of_version_1_are_part_of_their_stream(ranks: Start) -> None:
    ranks(2, **{"memory.zero": 1})
    tf.random.set_seed(5)
    variables = [tf.Variable(lambda: tf.random.normal((50, 50), stddev=2.0)) for _ in range(2)]
    after = tf.random.uniform((3,))
    assert all(find_deferred(v) is not None and find_deferred(v).is_divisible for v in variables)
    tf.random.set_seed(5)
    for variable in variables:
        np.testing.assert_array_equal(variable, tf.random.normal((50, 50), stddev=2.0))
    np.testing.assert_array_equal(after, tf.random.uniform((3,)))


def test_slots_of_version_1_are_born_split(ranks: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(function: Callable[[Any], Any]) -> tuple[list[np.ndarray], Any]:
        tf.keras.utils.set_random_seed(4)
        kernel = tf.Variable(lambda: tf.random.stateless_normal((INPUTS, OUTPUTS), (1, 2), dtype=tf.float64))
        optimizer = tf.compat.v1.train.AdamOptimizer(0.01, epsilon=1e-3)

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ kernel - 1))
            optimizer.apply_gradients([(tape.gradient(loss, kernel), kernel)])
            return loss

        run = function(step)
        losses = [run(batch()).numpy() for _ in range(3)]
        return losses, [optimizer.get_slot(kernel, name) for name in optimizer.get_slot_names()]

    wanted, _ = trained(tf.function)
    ranks(3, **{"memory.zero": 1, "memory.zero_min_bytes": 0})
    monkeypatch.setattr(DeferredInitial, "compute_whole", None)  # nobody makes one
    found, slots = trained(wh.function)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    for slot in slots:
        assert [part.shape for _, part in sorted(slot._whale_parts._parts.items())] == [(11, OUTPUTS)] * 3


V1_NAMES = (
    "zeros", "ones", "constant", "random_uniform", "random_normal", "truncated_normal", "uniform_unit_scaling",
    "variance_scaling", "orthogonal", "identity", "glorot_uniform", "glorot_normal", "he_normal", "he_uniform",
    "lecun_normal", "lecun_uniform",
)  # fmt: skip


def v1_initializers() -> dict[str, Any]:
    """Initializers of TensorFlow 1 by name."""
    made = tf.compat.v1.initializers
    return {name: made.constant(2.5) if name == "constant" else getattr(made, name)() for name in V1_NAMES}


@pytest.mark.core
def test_parts_of_initial_values_of_version_1_are_those_of_the_whole(ranks: Start) -> None:
    def variables() -> list[tf.Variable]:
        tf.random.set_seed(11)
        return [
            tf.Variable(lambda make=make: make((INPUTS, OUTPUTS), dtype=tf.float32), name=name)
            for name, make in v1_initializers().items()
        ]

    whole = [v.numpy() for v in variables()]
    ranks(3, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    made = variables()

    @wh.function
    def product(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean(tf.square(x @ v)) for v in made])
        for variable, slope in zip(made, tape.gradient(loss, made)):
            variable.assign_sub(slope)
        return loss

    product.plan(tf.ones((4, INPUTS)))
    for name, variable, value in zip(V1_NAMES, made, whole):
        parts = [part.numpy() for _, part in sorted(variable._whale_parts._parts.items())]
        assert [len(part) for part in parts] == [11, 11, 11]
        assert (raw(np.concatenate(parts)) == raw(value)).all(), name


def test_runs_one_after_the_other_leave_one_hook(ranks: Callable[..., None]) -> None:
    """Each begins with a creator of its own: left in place, some hundred of them are a recursion too deep."""

    def hooks() -> int:
        return len(tf.compat.v1.get_default_graph()._variable_creator_stack)

    ranks(2)
    first = hooks()
    wh.shutdown()
    ranks(2)
    assert hooks() == first
