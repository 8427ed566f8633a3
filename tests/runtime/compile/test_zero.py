"""memory.zero: the optimizer's state is sharded, updates are computed in parts, the result is that of one device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from whale.errors import ConfigError, PlanError
from whale.ir.layout import B, Shard
from whale.ir.mesh import find_tiles
from whale.ir.plan_text import format_plan
from whale.runtime.context import require_current
from whale_ops.memory import DeviceMemory

Start = Callable[..., None]
ROWS, INPUTS, HIDDEN, OUTPUTS = 8, 7, 16, 10


class Model:
    """Two dense layers under Adam with clipped gradients, in float64."""

    def __init__(self, function: Any) -> None:
        tf.keras.utils.set_random_seed(3)
        layers = [tf.keras.layers.Dense(n, dtype="float64") for n in (HIDDEN, OUTPUTS)]
        layers[0].build((None, INPUTS))
        layers[1].build((None, HIDDEN))
        self.weights = [w for layer in layers for w in layer.trainable_variables]
        self.optimizer = tf.keras.optimizers.Adam(0.01, epsilon=1e-3, weight_decay=0.01)
        self.optimizer.build(self.weights)

        def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(tf.square(layers[1](tf.tanh(layers[0](x))) - y))

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(x, y)
            slopes, _ = tf.clip_by_global_norm(tape.gradient(loss, self.weights), 0.5)
            self.optimizer.apply_gradients(zip(slopes, self.weights))
            return loss

        self.step, self.evaluate = function(step), function(loss_of)

    def values(self) -> list[np.ndarray]:
        return [tf.convert_to_tensor(v).numpy() for v in (*self.weights, *self.optimizer.variables)]


def batch(number: int) -> tuple[tf.Tensor, tf.Tensor]:
    generator = np.random.default_rng(number)
    return tf.constant(generator.standard_normal((ROWS, INPUTS))), tf.constant(
        generator.standard_normal((ROWS, OUTPUTS))
    )


def trained(function: Any) -> tuple[Model, list[float]]:
    model = Model(function)
    losses = [float(model.step(*batch(i))) for i in range(3)]
    return model, [*losses, float(model.evaluate(*batch(9)))]


@pytest.mark.core
@pytest.mark.parametrize(("count", "level"), one_of(2, [(2, 1), (3, 2), (2, 3), (3, 3)], several=True))
def test_a_step_equals_that_of_one_device(ranks: Start, count: int, level: Any) -> None:
    one, losses_of_one = trained(tf.function)
    ranks(count, **{"memory.zero": level, "memory.zero_min_bytes": 0})
    model, losses = trained(wh.function)
    np.testing.assert_allclose(losses, losses_of_one, rtol=1e-13)
    for name, value, other in zip([w.name for w in model.weights], model.values(), one.values()):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-14, err_msg=name)


def test_the_state_lies_split_and_nothing_more_is_moved(ranks: Start) -> None:
    ranks(2, **{"memory.zero": 1, "memory.zero_min_bytes": 0})
    model, _ = trained(wh.function)
    plan = model.step.plan(*batch(0))
    moved = Counter(f"{type(r.source).__name__}>{type(r.target).__name__}" for r in plan.reshards if r.bytes)
    # Of two kernels and two biases: the gradient is scattered, what comes of it is gathered. The norm, and the loss.
    assert (moved["Partial>Shard"], moved["Shard>Replicate"], moved["Partial>Replicate"]) == (4, 4, 2)
    assert sum(moved.values()) == 10
    wh.shutdown()
    ranks(2)
    whole, _ = trained(wh.function)
    assert plan.logical_bytes <= whole.step.plan(*batch(0)).logical_bytes + 2 * 8


def test_weights_are_gathered_for_each_use_and_not_before(ranks: Start) -> None:
    ranks(2, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    model, _ = trained(wh.function)
    plan = model.step.plan(*batch(0))
    gathered = Counter(
        r.ref.node.partition("/whale_use")[0] for r in plan.reshards if r.target == B and isinstance(r.source, Shard)
    )
    # The first kernel is used in the forward product only, the second one in the backward product too.
    assert sorted(gathered.values()) == [1, 1, 1, 2], gathered
    for v in (*model.weights, *model.optimizer.variables[2:]):
        assert getattr(v, "value", v)._whale_parts.tiles.cuts[0].dim == 0
    program = model.step._step(batch(0), {}).compiled.program
    paced = [n for n in program.nodes if n.marks.gathered_at_use and n.controls]
    assert len(paced) == 1  # of three products, the third waits for the first
    forward = next(n for n in program.nodes if n.op == "MatMul")
    assert paced[0].controls == (forward.name,)


def looped(function: Any) -> tuple[list[float], Any, tf.Variable]:
    """Losses of three steps with weights that a loop and a branch inside it read, and two branches outside."""
    w, v = (tf.Variable(tf.random.stateless_normal((6, 6), (i, 2), dtype=tf.float64) * 0.3) for i in range(2))

    @function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = x
            for i in tf.range(3):
                y = tf.tanh(y @ w)
                if i > 1:
                    y = y @ v
                else:
                    y = y - y @ v
            loss = tf.reduce_mean(tf.square(y))
        for variable, slope in zip((w, v), tape.gradient(loss, [w, v])):
            variable.assign_sub(0.1 * slope)
        return loss

    x = tf.random.stateless_normal((ROWS, 6), (5, 5), dtype=tf.float64)
    return [float(step(x)) for _ in range(3)], step.plan(x) if function is wh.function else None, w


@pytest.mark.parametrize("micro_batches", one_of(2, [1, 2]))
def test_weights_that_loops_read_are_gathered_in_front_of_them(ranks: Start, micro_batches: int) -> None:
    losses_of_one, _, one = looped(tf.function)
    ranks(3, **{"memory.zero": 3, "memory.zero_min_bytes": 0, "pipeline.micro_batches": micro_batches})
    losses, plan, w = looped(wh.function)
    np.testing.assert_allclose(losses, losses_of_one, rtol=1e-13)
    np.testing.assert_allclose(w.numpy(), one.numpy(), rtol=0, atol=1e-15)
    assert all(isinstance(p, Shard) for p in plan.variables.values()) and len(plan.variables) == 2
    assert all(r.graph == "" for r in plan.reshards if r.bytes)


def test_a_weight_that_cannot_lie_split_is_named(ranks: Start) -> None:
    ranks(2, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    w = tf.Variable(tf.ones((4, 4)))

    @wh.function
    def updated(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = x @ w
            w.assign(w * 0.5)
        return tf.reduce_sum(x)

    with pytest.raises(PlanError, match=r"(?s)a weight cannot be sharded.*which uses Variable \[4, 4\].*loop"):
        updated(tf.ones((8, 4)))


def fill_queue(function: Callable[..., Any]) -> list[np.ndarray]:
    """Two steps that train a weight and write into a queue at indices, and into a slice of a bank."""
    weight, queue = (
        tf.Variable(tf.reshape(tf.range(12.0, dtype=tf.float64), (6, 2))),
        tf.Variable(tf.ones((8, 2), tf.float64)),
    )
    bank, latest = tf.Variable(tf.ones((4, 2), tf.float64)), tf.Variable(tf.ones((8,), tf.float64))

    @function
    def step(x: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
        key = tf.stop_gradient(x @ weight)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weight) @ tf.transpose(tf.concat([queue, bank], 0)))
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        queue.scatter_nd_update((at + tf.range(4))[:, None] % 8, key)
        bank[:2].assign(key[1:3])
        latest.scatter_max(tf.IndexedSlices(key[:, 0] * latest[3], (at + tf.range(4)) % 8))
        return loss + latest[0]

    losses = [step(tf.sin(tf.reshape(tf.range(24.0, dtype=tf.float64), (4, 6))), at) for at in (3, 7)]
    return [np.asarray(value) for value in (*losses, weight, queue, bank, latest)]


def test_buffers_that_steps_write_at_indices_stay_whole(ranks: Start) -> None:
    alone = fill_queue(tf.function)
    ranks(2, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    for one, found in zip(alone, fill_queue(wh.function), strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-13)


def test_functions_that_are_no_steps_take_whole_weights_and_datasets_say_what_to_do(ranks: Start) -> None:
    ranks(2, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    w = tf.Variable(tf.reshape(tf.range(8.0), (4, 2)))

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ w)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    total = tf.function(lambda: tf.reduce_sum(w * w))
    double = tf.function(lambda: w.assign(w * 2.0))
    x = tf.ones((4, 4))
    begun = iter(tf.data.Dataset.from_tensors(x).repeat(3).map(lambda x: x @ w))
    next(begun)
    step(x)
    value = np.arange(8.0).reshape(4, 2) - 4
    assert float(total()) == np.sum(value**2)
    double()
    assert float(step(x)) == 4 * np.sum(2 * value)
    assert float(total()) == np.sum((2 * value - 4) ** 2)
    with pytest.raises(PlanError, match=r"(?s)dataset's function.*MapDataset.*\[4, 2\].*memory.zero=2"):
        iter(tf.data.Dataset.from_tensors(x).map(lambda x: x @ w))
    with pytest.raises(PlanError, match=r"(?s)dataset's function.*MapDataset.*\[4, 2\].*memory.zero=2"):
        next(begun)
    assert len(list(tf.data.Dataset.from_tensors(x).map(lambda x: 2 * x))) == 1


def test_the_report_of_memory_counts_parts(ranks: Start) -> None:
    ranks(2, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    model, _ = trained(wh.function)
    report = wh.memory_report()
    weights = 8 * (INPUTS * HIDDEN + HIDDEN + HIDDEN * OUTPUTS + OUTPUTS)
    assert report.variables["parameters"] == weights  # two ranks, and each weight once
    if tf.__version__ >= "2.16":  # Keras 2 has a learning rate that updates read
        assert report.variables["optimizer state"] == 2 * weights
    predicted = report.predicted["step"]
    assert predicted["gradients"] + predicted["gathered"] + predicted["activations"] > 0
    assert "parameters" in str(report) and report.resident_bytes <= report.resident_peak_bytes
    plan = wh.plan(model.step, *batch(0))  # for the ranks of the run
    assert "Memory at most" in format_plan(plan) and len(plan.memory["optimizer state"]) == 2


def test_a_report_says_what_it_has_not_measured(ranks: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(2)
    for peak, said in ((0, "allocated                not measured: no tensor has had 256"), (1 << 20, "1.0 MiB")):
        monkeypatch.setattr("whale_ops.memory.read_memory", lambda peak=peak: DeviceMemory(0, peak))
        report = wh.memory_report()
        assert (report.allocated_bytes is None) == (report.not_allocated != "") == (peak == 0)
        assert said in str(report), report


def test_each_rank_holds_its_part_of_the_state(ranks: Start) -> None:
    ranks(3, **{"memory.zero": 1, "memory.zero_min_bytes": 0})
    model, _ = trained(wh.function)
    held = require_current().variables._split
    moments = [v for v in model.optimizer.variables if len(v.shape) > 0]
    state = sum(np.prod(v.shape) for v in moments)
    for rank in range(3):
        mine = sum(int(np.prod(parts._parts[rank].shape)) for parts in held)
        assert mine <= state / 3 + sum(v.shape[-1] for v in moments), (mine, state)
    assert sum(int(np.prod(p.shape)) for parts in held for p in parts._parts.values()) >= state


@pytest.mark.parametrize("level", [1, 3])
def test_on_a_mesh_state_lies_over_all_axes(ranks: Start, level: int) -> None:
    def losses(function: Any, scope: Callable[[], Any]) -> tuple[list[float], Any]:
        tf.keras.utils.set_random_seed(1)
        layers = [tf.keras.layers.Dense(16, "tanh", dtype="float64") for _ in range(3)]
        for layer in layers:
            layer.build((None, 16))
        weights = [w for layer in layers for w in layer.trainable_variables]
        optimizer = tf.keras.optimizers.Adam(0.01, epsilon=1e-3)
        optimizer.build(weights)

        @function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                y = layers[0](x)
                with scope():
                    y = layers[1](y)
                loss = tf.reduce_mean(tf.square(layers[2](y)))
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return loss

        x = tf.random.stateless_normal((ROWS, 16), (1, 2), dtype=tf.float64)
        return [float(step(x)) for _ in range(3)], find_tiles(step.plan(x)) if function is wh.function else {}

    wanted, _ = losses(tf.function, contextlib.nullcontext)
    ranks(4, **{"memory.zero": level, "memory.zero_min_bytes": 0, "mesh": wh.Mesh(tensor=2)})
    found, placed = losses(wh.function, wh.split)
    np.testing.assert_allclose(found, wanted, rtol=1e-13)
    # Two moments of six weights; at level 3 the weights as well.
    assert len(placed) >= (12 if level == 1 else 18)
    # All matrices do, be it because their layer is under a split scope; of that layer's bias one axis divides all.
    over_both = [tiles for tiles in placed.values() if tiles.count == 4]
    assert len(over_both) >= (10 if level == 1 else 15)
    assert all(tiles.axes == ("data", "tensor") for tiles in over_both)


def test_small_state_stays_whole(ranks: Start) -> None:
    ranks(2, **{"memory.zero": 1, "memory.zero_min_bytes": 8 * HIDDEN * OUTPUTS})
    model, _ = trained(wh.function)
    placed = model.step.plan(*batch(0)).variables
    assert len(placed) == (2 if tf.__version__ >= "2.16" else 3), placed  # Keras 2 updates the weight in the same op
    assert all(isinstance(p, Shard) for p in placed.values())


def test_a_checkpoint_of_split_state_loads_without(ranks: Start, tmp_path: Path) -> None:
    ranks(2, **{"memory.zero": 1, "memory.zero_min_bytes": 0})
    model, _ = trained(wh.function)
    path = wh.CheckpointManager(
        tf.train.Checkpoint(weights=model.weights, optimizer=model.optimizer), str(tmp_path), max_to_keep=2
    ).save()
    wanted = model.values()
    wh.shutdown()
    other = Model(tf.function)
    tf.train.Checkpoint(weights=other.weights, optimizer=other.optimizer).restore(path).expect_partial()
    for value, whole in zip(other.values(), wanted):
        np.testing.assert_array_equal(value, whole)


def test_levels(ranks: Start) -> None:
    with pytest.raises(ConfigError, match="expected: int, at least 0 and at most 3"):
        wh.Config({"memory.zero": 4})
