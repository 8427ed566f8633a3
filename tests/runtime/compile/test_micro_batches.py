"""pipeline.micro_batches: a rank's rows in parts, one after the other; gradients are summed, as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.memory import peaks_above
from tests.runtime.compile.test_zero import batch, trained
from whale.errors import PlanError
from whale.ir.program import Program
from whale.kernels import substitute
from whale.partition.pipeline import microbatches as micro
from whale.partition.pipeline.microbatch_loop import Call, outline

Start = Callable[..., None]


@pytest.fixture
def rolled(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The ranks' programs that are compiled from here on."""
    found: list[Program] = []
    compile_marked = substitute.compile_marked

    def seen(program: Program, on_gpu: bool) -> Program:
        found.append(program)
        return compile_marked(program, on_gpu)

    monkeypatch.setattr(substitute, "compile_marked", seen)
    return found


def functions_called(program: Program) -> list[str]:
    return [n.attrs["f"].name for n in program.nodes if n.op == "WhaleCall"]


@pytest.mark.core
@pytest.mark.parametrize(
    ("count", "micro_batches", "config"),
    one_of(
        2,
        [
            (1, 2, {}),
            (1, 7, {}),
            (2, 4, {"batch.shares": [5, 3]}),
            (2, 2, {"batch.shares": [0, 8]}),
            (3, 7, {"memory.zero": 1, "memory.zero_min_bytes": 0}),
        ],
        several=True,
    ),
)
def test_the_step_is_that_of_one_device(ranks: Start, count: int, micro_batches: int, config: dict[str, Any]) -> None:
    plain, losses = trained(tf.function)
    ranks(count, **{"pipeline.micro_batches": micro_batches}, **config)
    model, found = trained(wh.function)
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-13)
    for value, other in zip(model.values(), plain.values()):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-13)
    assert model.step.plan(*batch(0)).micro_batches == micro_batches
    np.testing.assert_allclose(model.evaluate(*batch(7)), plain.evaluate(*batch(7)), rtol=0, atol=1e-13)


def test_a_micro_batch_costs_a_few_nodes_and_products_are_in_one_function(ranks: Start, rolled: list[Program]) -> None:
    sizes = []
    for micro_batches in (2, 4, 8):
        rolled.clear()
        ranks(2, **{"pipeline.micro_batches": micro_batches})
        trained(wh.function)
        program = rolled[0]  # the step's; then that of the evaluation
        wh.shutdown()
        calls = functions_called(program)
        # 4 rows in 8 parts: four of one row, and four of none.
        assert len(calls) == micro_batches and len(set(calls)) == (1 if micro_batches < 8 else 2)
        assert not any(n.op == "MatMul" for n in program.nodes)
        assert sum(n.op == "MatMul" for n in program.functions[calls[0]].nodes) == 5
        assert not any(n.op == "WhaleAllReduce" for f in program.functions.values() for n in f.nodes)
        sizes.append(len(program.nodes))
    assert sizes[1] - sizes[0] <= 2 * 2 and sizes[2] - sizes[1] <= 2 * 4 + 2


@pytest.mark.parametrize("shares", [[5, 3, 4, 4], [8, 0, 4, 4], [1, 0, 0, 3], [10, 6]], ids=str)
def test_shares_of_ranks_that_need_the_same_rows_are_added_up(
    ranks: Start, rolled: list[Program], shares: list[int]
) -> None:
    """Splits all of a model over pairs of ranks, which read the same rows: the share of a pair counts."""
    generator = np.random.default_rng(3)
    x, y = generator.standard_normal((16, 6)), generator.standard_normal((16, 2))
    first = [generator.standard_normal(shape) for shape in ((6, 8), (8, 2))]

    def trained_split(function: Any, scope: Callable[[], Any]) -> list[Any]:
        weights = [tf.Variable(value) for value in first]

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape, scope():
                loss = tf.reduce_mean(tf.square(tf.tanh(x @ weights[0]) @ weights[1] - y))
            for weight, gradient in zip(weights, tape.gradient(loss, weights)):
                weight.assign_sub(0.1 * gradient)
            return loss

        step = function(step)
        return [*(float(step(tf.constant(x), tf.constant(y))) for _ in range(3)), *(w.numpy() for w in weights)]

    wanted = trained_split(tf.function, contextlib.nullcontext)
    ranks(4, **{"pipeline.micro_batches": 2, "batch.shares": shares, "mesh": wh.Mesh(tensor=2)})
    for value, other in zip(trained_split(wh.function, wh.split), wanted, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-13)
    assert [len(functions_called(program)) for program in rolled] == [2] * 4


@pytest.mark.parametrize("rows", [7, 8, 9])
def test_a_table_may_have_as_many_rows_as_the_batch(ranks: Start, rows: int) -> None:
    """Nothing of its update is taken for rows of the batch."""

    def trained_once(function: Any) -> tuple[float, list[np.ndarray]]:
        table, mean, weight = (
            tf.Variable(np.random.default_rng(seed).standard_normal(shape))
            for seed, shape in enumerate([(rows, 4), (rows, 4), (4, 4)])
        )

        def step(ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(found := tf.gather(table, ids))
                loss = tf.reduce_mean(tf.square(tf.tanh(found @ weight)))
            of_found, of_weight = tape.gradient(loss, [found, weight])
            whole = tf.math.unsorted_segment_sum(of_found, ids, rows)
            mean.assign_add(0.1 * (whole - mean))
            table.assign_sub(0.1 * mean / (tf.sqrt(tf.square(mean)) + 1e-3))
            weight.assign_sub(0.1 * of_weight)
            return loss

        step = function(step)
        losses = [float(step(tf.constant([0, 3, 3, 5, 1, 0, 6, 3]))) for _ in range(2)]
        return losses[-1], [v.numpy() for v in (table, mean, weight)]

    plain_loss, plain = trained_once(tf.function)
    ranks(1, **{"pipeline.micro_batches": 4})
    loss, found = trained_once(wh.function)
    assert loss == pytest.approx(plain_loss, abs=1e-13)
    for value, other in zip(found, plain):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("order", one_of(2, ["F0 F1 F2 B2 B1 B0", "F0 F1 B0 F2 B1 B2"]))
def test_phases_hand_on_what_later_ones_read(
    ranks: Start, rolled: list[Program], monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Cut anywhere in two, and run in the order of a schedule, a step stays what it is."""
    calls = [Call(word[0], int(word[1])) for word in order.split()]

    def in_phases(program: Program, plan: Any, each: set[str]) -> Program:
        names = [n.name for n in program.nodes if n.name in each]
        phase = {name: "F" if i < len(names) // 2 else "B" for i, name in enumerate(names)}
        return outline(program, plan, each, calls, phase)

    monkeypatch.setattr(micro, "outline", in_phases)
    plain, losses = trained(tf.function)
    ranks(2, **{"pipeline.micro_batches": 3, "batch.shares": [5, 3]})
    model, found = trained(wh.function)
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-13)
    for value, other in zip(model.values(), plain.values()):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-13)
    called = functions_called(rolled[0])
    assert len(called) == 6 and len(set(called)) == 4  # 2, 2, 1 rows: two functions for each phase


def test_what_depends_on_inputs_only_is_counted_before(ranks: Start, rolled: list[Program]) -> None:
    """A loss is the mean over the rows that a mask leaves: how many these are is known before the first micro-batch."""

    def trained_once(function: Any) -> tuple[float, np.ndarray]:
        weight = tf.Variable(np.arange(12.0).reshape(3, 4) / 10)

        def step(x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                of_rows = tf.reduce_sum(tf.square(tf.tanh(x @ weight)), 1)
                loss = tf.reduce_sum(of_rows * mask) / tf.reduce_sum(mask)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        x = tf.constant(np.random.default_rng(1).standard_normal((8, 3)))
        return float(function(step)(x, tf.constant([1.0, 0, 1, 1, 0, 0, 0, 1], tf.float64))), weight.numpy()

    loss, weight = trained_once(tf.function)
    for count in (1, 2):
        ranks(count, **{"pipeline.micro_batches": 3})
        found, other = trained_once(wh.function)
        np.testing.assert_allclose(found, loss, rtol=1e-13)
        np.testing.assert_allclose(other, weight, rtol=1e-13)
        assert len(functions_called(rolled[-1])) == 3
        wh.shutdown()


class Normalised:
    """A dense layer, a batch normalisation, and the mean of squares, in float64."""

    def __init__(self, function: Any) -> None:
        tf.keras.utils.set_random_seed(3)
        self.model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((3,), dtype="float64"),
                tf.keras.layers.Dense(4, dtype="float64"),
                tf.keras.layers.BatchNormalization(dtype="float64"),
            ]
        )
        self.step = function(self._step)

    def slopes(self, x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.relu(self.model(x, training=True)) ** 3)
        return tape.gradient(loss, self.model.trainable_variables)

    def _step(self, x: tf.Tensor) -> None:
        for slope, weight in zip(self.slopes(x), self.model.trainable_variables):
            weight.assign_sub(0.1 * slope)


def test_statistics_of_the_batch_are_refused_or_of_each_micro_batch(ranks: Start) -> None:
    x = tf.constant(np.random.default_rng(1).standard_normal((8, 3)))
    ranks(1, **{"pipeline.micro_batches": 2})
    with pytest.raises(PlanError, match="value of all micro-batches is needed") as refused:
        Normalised(wh.function).step(x)
    assert "moments" in str(refused.value) and "batch.norm_statistics=micro-batch" in str(refused.value)
    wh.shutdown()
    ranks(1, **{"pipeline.micro_batches": 2, "batch.norm_statistics": "micro-batch"})
    model = Normalised(wh.function)
    model.step(x)
    by_hand = Normalised(lambda fn: fn)
    parts = [by_hand.slopes(part) for part in (x[:4], x[4:])]
    for slopes, weight in zip(zip(*parts), by_hand.model.trainable_variables):
        weight.assign_sub(0.1 * (slopes[0] + slopes[1]) / 2)
    for weight, other in zip(model.model.trainable_variables, by_hand.model.trainable_variables):
        np.testing.assert_allclose(weight.numpy(), other.numpy(), rtol=0, atol=1e-13)


def test_a_session_accumulates(ranks: Start) -> None:
    def run(session_of: Any) -> list[Any]:
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float64, [None, 3])
            start = tf.constant_initializer(np.arange(12).reshape(3, 4) / 10)
            w = tf.compat.v1.get_variable("w", [3, 4], tf.float64, start, use_resource=True)
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ w)))
            counter = tf.compat.v1.train.get_or_create_global_step()
            train = tf.compat.v1.train.AdamOptimizer(0.1).minimize(loss, counter)
            initialise = tf.compat.v1.global_variables_initializer()
        with session_of(graph) as session:
            session.run(initialise)
            values = np.random.default_rng(2).standard_normal((8, 3))
            losses = [session.run([loss, train], {x: values})[0] for _ in range(3)]
            return [*losses, session.run(w), session.run(counter)]

    plain = run(lambda graph: tf.compat.v1.Session(graph=graph))
    ranks(2, **{"pipeline.micro_batches": 3})
    for value, other in zip(run(lambda graph: wh.Session(graph=graph)), plain):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-13)


def test_activations_are_held_of_one_micro_batch(ranks: Start) -> None:
    rows, width, layers = 2048, 256, 6
    weights = [tf.Variable(tf.random.stateless_normal([width, width], [1, i]) / 16) for i in range(layers)]
    x = tf.random.stateless_normal([rows, width], [2, 3])

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.tanh(y @ weight)
            loss = tf.reduce_mean(tf.square(y))
        for slope, weight in zip(tape.gradient(loss, weights), weights):
            weight.assign_sub(0.01 * slope)
        return loss

    def peak_bytes(micro_batches: int) -> int:
        ranks(1, **{"pipeline.micro_batches": micro_batches})
        peaks = peaks_above(lambda: partial(wh.function(step), x))
        wh.shutdown()
        return peaks[0]

    whole, parts = peak_bytes(1), peak_bytes(8)
    activations = layers * rows * width * 4
    gradients = layers * width * width * 4
    assert whole >= activations
    # An eighth of the activations, and their gradients; the sums come in and go out of each call.
    assert parts <= activations / 8 * 1.7 + 3 * gradients, (whole, parts)


def test_weights_as_large_as_the_batch(ranks: Start) -> None:
    """A gradient with as many rows as the batch is no rows of it, whatever slicing it would cost."""
    ranks(1, **{"pipeline.micro_batches": 4})
    weight = tf.Variable(np.random.default_rng(0).standard_normal((6, 8, 3)))
    slot = tf.Variable(tf.ones((6, 8, 3), tf.float64))

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.einsum("ri,ijk->rjk", x, weight)) ** 2)
        slope = tape.gradient(loss, weight)
        slot.assign_add(slope - slot)
        weight.assign_sub(0.1 * slot)
        return loss

    x = tf.constant(np.random.default_rng(1).standard_normal((8, 6)))
    wanted = weight.numpy()
    with tf.GradientTape() as tape:
        at = tf.Variable(wanted)
        loss = tf.reduce_mean(tf.tanh(tf.einsum("ri,ijk->rjk", x, at)) ** 2)
    wanted = wanted - 0.1 * tape.gradient(loss, at).numpy()
    step(x)
    np.testing.assert_allclose(weight.numpy(), wanted, atol=1e-12)


def test_a_scope_around_some_layers_brings_rows_together(ranks: Start, caplog: pytest.LogCaptureFixture) -> None:
    ranks(2, **{"pipeline.micro_batches": 2})
    first, last = (tf.Variable(tf.ones((8, 8), tf.float64)) for _ in range(2))

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = tf.tanh(x @ first)
            with wh.split():
                loss = tf.reduce_mean(tf.square(h @ last))
        for weight, slope in zip((first, last), tape.gradient(loss, (first, last))):
            weight.assign_sub(slope)
        return loss

    assert step.plan(tf.ones((8, 8), tf.float64)).micro_batches == 2  # each rank has rows of each micro-batch
    with caplog.at_level("INFO", logger="whale"):
        assert step.plan(tf.ones((9, 8), tf.float64)).micro_batches == 3  # the next number that divides the rows
    assert "in 3 micro-batches instead of 2" in caplog.text and "9 of x" in caplog.text


def test_an_input_that_is_read_under_a_scope_goes_in_micro_batches_too(ranks: Callable[..., None]) -> None:
    """It is whole for the ranks of the scope, and has rows of each micro-batch all the same."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(16, 4)), draw.normal(size=(16, 6))
    wanted: list[np.ndarray] = []
    for spread in (False, True):
        w = tf.Variable(np.random.default_rng(1).normal(size=(4, 6)))

        def step(x: tf.Tensor, y: tf.Tensor, w: tf.Variable = w, spread: bool = spread) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with wh.split() if spread else contextlib.nullcontext():
                    h = tf.tanh(x @ w)
                loss = tf.reduce_mean((h - y) ** 2)
            w.assign_sub(tape.gradient(loss, w))
            return loss

        if spread:
            ranks(4, **{"mesh": wh.Mesh(data=2, tensor=2), "pipeline.micro_batches": 4})
        function = wh.function(step) if spread else tf.function(step)
        function(tf.constant(x), tf.constant(y))
        wanted.append(w.numpy())
    np.testing.assert_allclose(wanted[0], wanted[1], atol=1e-14)
    compiled = next(iter(function._steps.values())).compiled
    for program in compiled.ranks:
        assert not {"Tanh", "MatMul", "TanhGrad"} & {n.op for n in program.nodes}, "the whole batch at once"
        assert any(n.op == "Tanh" for body in program.functions.values() for n in body.nodes)


def test_ranks_that_would_wait_for_each_other_around_the_micro_batches_are_refused(ranks: Start) -> None:
    ranks(4, **{"pipeline.micro_batches": 2, "mesh": wh.Mesh(data=2, tensor=2)})
    weights = [tf.Variable(tf.ones((8, 8), tf.float64)) for _ in range(4)]

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for weight, devices in zip(weights, (None, [0], None)):
                with wh.split(devices=devices):
                    x = tf.tanh(x @ weight)
            with wh.replica():
                x = tf.tanh(x @ weights[3])
            loss = tf.reduce_mean(x)
        for weight, slope in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(slope)
        return loss

    with pytest.raises(PlanError, match=r"(?s)different phases of a step.*before its micro-batches"):
        step(tf.ones((8, 8), tf.float64))


def test_a_batch_of_one_row_that_a_mask_takes_out_is_divided_into_micro_batches(ranks: Start) -> None:
    """Masks the rows of a whole batch, then of a last one with a single row, of which one rank has none."""

    def train(function: Any) -> list[np.ndarray]:
        weight = tf.Variable(np.random.default_rng(0).standard_normal((4, 6)))

        @function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.boolean_mask(x @ weight, x[:, 0] > -1) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        x = tf.constant(np.random.default_rng(1).standard_normal((6, 4)))
        return [step(x).numpy(), step(tf.abs(x[:1])).numpy(), tf.convert_to_tensor(weight).numpy()]

    wanted = train(tf.function)
    ranks(2, **{"pipeline.micro_batches": 2})
    for a, b in zip(train(wh.function), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
def test_a_single_row_in_micro_batches_with_biases_in_a_loop_and_a_branch(ranks: Start, count: int) -> None:
    """A rank has one row of the batch: its bodies sum over rows as with more of them, and gather none."""

    def train(function: Any) -> list[np.ndarray]:
        draw = np.random.default_rng(0)
        weight, bias = (tf.Variable(draw.standard_normal(shape)) for shape in ((4, 4), (4,)))

        @function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                h = tf.while_loop(lambda n, h: n < 2, lambda n, h: (n + 1, tf.tanh(h @ weight + bias)), (0, x))[1]
                h = tf.cond(
                    bias[0] > 0.0, lambda: tf.nn.softplus(h @ weight + bias), lambda: tf.tanh(h @ weight) + bias
                )
                loss = tf.reduce_mean(h**2)
            for variable, slope in zip((weight, bias), tape.gradient(loss, (weight, bias))):
                variable.assign_sub(0.1 * slope)
            return loss

        x = tf.constant(draw.standard_normal((2, 4)))
        values = [step(x[:rows]).numpy() for rows in (count, 1)]
        return [*values, *(tf.convert_to_tensor(variable).numpy() for variable in (weight, bias))]

    wanted = train(tf.function)
    ranks(count, **{"pipeline.micro_batches": 2})
    for a, b in zip(train(wh.function), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
def test_a_single_row_in_micro_batches_is_cut_into_windows_and_joined(ranks: Start, count: int) -> None:
    """Windows stand in the first dimension, beside the rows: those of a rank's single row are of one micro-batch."""

    def train(function: Any) -> list[np.ndarray]:
        draw = np.random.default_rng(0)
        weight = tf.Variable(draw.standard_normal((4, 4)))

        @function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                h = x @ weight
                windows = tf.reshape(tf.transpose(tf.reshape(h, [-1, 2, 2, 4]), [0, 2, 1, 3]), [-1, 2, 4])
                windows = tf.nn.softmax(tf.matmul(windows, windows, transpose_b=True)) @ windows
                joined = tf.transpose(tf.reshape(windows, [-1, 2, 2, 4]), [0, 2, 1, 3])
                loss = tf.reduce_mean((h + tf.reshape(joined, [-1, 4, 4])) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        x = tf.constant(draw.standard_normal((2, 4, 4)))
        return [*(step(x[:rows]).numpy() for rows in (count, 1)), tf.convert_to_tensor(weight).numpy()]

    wanted = train(tf.function)
    ranks(count, **{"pipeline.micro_batches": 2})
    for a, b in zip(train(wh.function), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
