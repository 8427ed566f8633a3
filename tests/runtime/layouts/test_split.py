"""Programs with split scopes over ranks of one process: as one device, with less movement, in the expected layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

import whale as wh
from tests.draws import one_of
from tests.oracle.metric import difference, limit
from tests.zoo.case import Setting, build
from tests.zoo.catalogue import case_named
from whale.errors import PlanError
from whale.ir.layout import P_SUM, B, Shard
from whale.ir.mesh import make_one_axis_tiles
from whale.ir.plan import Plan
from whale.runtime.start import check_replicas
from whale.runtime.variables import split_variable

Values = dict[str, np.ndarray]
CLASSES, WIDTH, ROWS = 2000, 24, 16


@pytest.fixture(autouse=True)
def double() -> Any:
    tf.keras.backend.clear_session()
    tf.keras.backend.set_floatx("float64")
    tf.keras.mixed_precision.set_global_policy("float64")
    yield
    tf.keras.backend.set_floatx("float32")
    tf.keras.mixed_precision.set_global_policy("float32")


class Classifier:
    """Features, and a classifier of many classes, with clipped gradients and an evaluation step."""

    def __init__(self, function: Any = tf.function, features: Any = contextlib.nullcontext,
                 classes: Any = contextlib.nullcontext, adam: bool = False):  # fmt: skip
        tf.keras.utils.set_random_seed(5)
        layers, optimizers = tf.keras.layers, tf.keras.optimizers
        self.hidden, self.last = layers.Dense(WIDTH, activation="tanh"), layers.Dense(CLASSES)
        self.hidden.build((None, 6))
        self.last.build((None, WIDTH))
        self.weights = self.hidden.trainable_variables + self.last.trainable_variables
        self.optimizer = optimizers.Adam(0.01, epsilon=1e-3) if adam else optimizers.SGD(0.5, momentum=0.9)
        self.optimizer.build(self.weights)

        def predict(x: tf.Tensor) -> tf.Tensor:
            with features():
                h = self.hidden(x)
            with classes():
                return self.last(h)

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                logits = predict(x)
                with classes():
                    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
                    loss = tf.reduce_mean(loss)
            slopes, _ = tf.clip_by_global_norm(tape.gradient(loss, self.weights), 0.5)
            self.optimizer.apply_gradients(zip(slopes, self.weights))
            return loss

        def evaluate(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            logits = predict(x)
            with classes():
                right = tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int32), y)
                return tf.reduce_mean(tf.cast(right, tf.float64))

        self.step, self.evaluate = function(step), function(evaluate)

    def batch(self, number: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(number)
        return generator.normal(size=(rows, 6)), generator.integers(4, size=rows).astype(np.int32)

    def variables(self) -> list[Any]:
        kept = self.optimizer.variables
        return [*self.hidden.variables, *self.last.variables, *(kept() if callable(kept) else kept)]

    def values(self) -> Values:
        return {f"variable/{i}": np.asarray(v) for i, v in enumerate(self.variables())}

    def train(self) -> Values:
        """Steps, an evaluation in between, a smaller batch, and weights that the script changes."""
        found = {f"loss/{i}": np.asarray(self.step(*self.batch(i))) for i in range(3)}
        found["right"] = np.asarray(self.evaluate(*self.batch(0)))
        found["smaller"] = np.asarray(self.step(*self.batch(3, ROWS - 5)))
        kernel = self.last.kernel
        kernel.assign(kernel.numpy() * 0.5)
        found["changed"] = np.asarray(self.step(*self.batch(4)))
        return found | self.values()


def moves(plan: Plan) -> list[tuple[str, str]]:
    return [(str(r.source), str(r.target)) for r in plan.reshards if r.bytes]


@pytest.mark.parametrize("adam", [False, True], ids=["momentum", "adam"])
@pytest.mark.parametrize("count", one_of(3, [2, 3, 4]))
@pytest.mark.core
def test_a_classifier_of_many_classes(ranks: Callable[..., None], count: int, adam: bool) -> None:
    expected = Classifier(adam=adam).train()
    ranks(count)
    spread = Classifier(wh.function, wh.replica, wh.split, adam)
    found = spread.train()
    check_replicas()
    worst = difference(expected, found, 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    plan = spread.step.plan(*spread.batch(0))
    assert plan.split_flops_fraction == 1.0
    assert plan.logical_bytes * 20 < Classifier(wh.function).step.plan(*spread.batch(0)).logical_bytes
    held = {name: p for name, p in plan.variables.items() if isinstance(p, Shard)}
    assert len(held) == (6 if adam else 4)  # the classifier's weight and bias, and the optimizer's variables for them
    assert all(sum(p.sizes) == CLASSES for p in held.values())


def test_code_outside_of_all_scopes_divides_rows(ranks: Callable[..., None]) -> None:
    """Neither features nor their gradients join the split scope whose tensors they exchange."""
    ranks(2)
    scoped, bare = Classifier(wh.function, wh.replica, wh.split), Classifier(wh.function, classes=wh.split)
    plans = [c.step.plan(*c.batch(0)) for c in (scoped, bare)]
    assert plans[0].logical_bytes == plans[1].logical_bytes
    assert sorted(map(str, plans[0].variables.values())) == sorted(map(str, plans[1].variables.values()))


def test_a_transformer_under_one_scope_sums_twice_forward_and_twice_backward_in_each_layer(
    ranks: Callable[..., None],
) -> None:
    """Megatron-LM's layout: attention by heads, the feed-forward layers by columns and then rows."""
    ranks(2, **{"batch.random": "global"})
    program = build(case_named("gpt"), Setting("float64", "sgd", wh.function, scope=wh.split, gradients=False))
    plan = program.plan(program.batches(1)[0])
    sums = [r.ref.node for r in plan.reshards if r.source == P_SUM and r.target == B and r.bytes > 100]
    backward = [name for name in sums if "gradient_tape" in name or name.startswith("AddN")]
    layers = 2
    assert len(sums) - len(backward) == 2 * layers, sums
    assert len(backward) == 2 * layers + 1, sums  # one for the words of the last layer, which are split as well
    assert sum("attention_output" in name for name in sums) == layers
    assert plan.split_flops_fraction == 1.0
    weights = {name: p for name, p in plan.variables.items() if isinstance(p, Shard)}
    assert len(weights) >= 8 * layers


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "scatter"])
def test_an_embedding_whose_vocabulary_is_split(ranks: Callable[..., None], sparse: bool) -> None:
    """Rows too narrow to be cut: each rank looks up, and updates, the words that it has."""

    def train(function: Any, scope: Any) -> Values:
        table = tf.Variable(np.random.default_rng(0).normal(size=(50, 3)), name="table")
        out = tf.Variable(np.random.default_rng(1).normal(size=(3, 8)), name="out")

        @function
        def step(words: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with scope():
                    rows = tf.nn.embedding_lookup(table, words)
                loss = tf.reduce_mean(tf.square(tf.matmul(tf.reduce_sum(rows, axis=1), out)))
            slopes = tape.gradient(loss, [table, out])
            out.assign_sub(0.1 * slopes[1])
            if sparse:
                table.scatter_sub(tf.IndexedSlices(0.1 * slopes[0].values, slopes[0].indices))
            else:
                table.assign_sub(0.1 * tf.convert_to_tensor(slopes[0]))
            return loss

        words = [np.random.default_rng(i).integers(50, size=(8, 5)) for i in range(3)]
        found = {f"loss/{i}": np.asarray(step(w)) for i, w in enumerate(words)}
        if scope is wh.split:
            assert [str(p) for p in step.plan(words[0]).variables.values()] == ["S(0)[13,13,12,12]"]
        return found | {"variable/table": table.numpy(), "variable/out": out.numpy()}

    expected = train(tf.function, contextlib.nullcontext)
    ranks(4)
    worst = difference(expected, train(wh.function, wh.split), 0.1)
    assert worst.error <= limit("float64", 0.0), worst


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_does_not_lie_in_the_whole_ones_memory(dim: int) -> None:
    """A variable of it would hold on to all of that."""
    whole = tf.ones((4, 4))
    parts = [split_variable.cut_part(whole, make_one_axis_tiles(Shard(dim, (2, 2))), i) for i in range(2)]
    assert not any(np.shares_memory(memoryview(whole), memoryview(part)) for part in parts)  # type: ignore[arg-type]


def test_a_split_variable_is_read_and_changed_as_a_whole(ranks: Callable[..., None], tmp_path: Path) -> None:
    ranks(3)
    spread = Classifier(wh.function, wh.replica, wh.split)
    kernel = spread.last.kernel
    kernel = getattr(kernel, "value", kernel) if not isinstance(kernel, tf.Variable) else kernel
    before = kernel.numpy().copy()
    spread.step(*spread.batch(0))
    after = kernel.numpy()
    assert after.shape == (WIDTH, CLASSES) and not np.array_equal(before, after)
    assert isinstance(kernel, tf.Variable) and np.array_equal(np.asarray(tf.identity(kernel)), after)
    held = gen_resource_variable_ops.read_variable_op(vars(kernel)["_handle"], kernel.dtype)
    assert np.size(held) == 1, "between steps only the parts take memory"
    np.testing.assert_allclose(tf.nn.l2_loss(kernel), np.sum(after**2) / 2, rtol=1e-12)
    kernel.assign_add(np.ones_like(after))
    np.testing.assert_array_equal(kernel.numpy(), after + 1)
    spread.evaluate(*spread.batch(0))
    np.testing.assert_array_equal(kernel.numpy(), after + 1)
    manager = wh.CheckpointManager(tf.train.Checkpoint(kernel=kernel), str(tmp_path), max_to_keep=1)
    path = manager.save()
    spread.step(*spread.batch(1))
    plain = tf.Variable(np.zeros_like(after))
    tf.train.Checkpoint(kernel=plain).restore(path).assert_consumed()
    np.testing.assert_array_equal(plain.numpy(), after + 1)
    manager.restore_or_initialize()
    np.testing.assert_array_equal(kernel.numpy(), after + 1)
    spread.evaluate(*spread.batch(0))
    np.testing.assert_array_equal(kernel.numpy(), after + 1)


def test_labels_that_are_no_class_give_nan(ranks: Callable[..., None]) -> None:
    ranks(2)
    spread = Classifier(wh.function, wh.replica, wh.split)
    x, y = spread.batch(0)
    y[3] = CLASSES
    assert np.isnan(float(spread.step(x, y)))


def test_mistakes_name_what_to_do(ranks: Callable[..., None]) -> None:
    ranks(2)
    wide = Classifier(wh.function, wh.replica, lambda: wh.split(dim=3))
    with pytest.raises(PlanError, match=r"dim=3 of \[16, 2000\](.|\n)*one of dimensions \[1\]"):
        wide.step(*wide.batch(0))

    @wh.function
    def nothing(x: tf.Tensor) -> tf.Tensor:
        with wh.split():
            return tf.nn.relu(x)

    with pytest.raises(PlanError, match="no product or lookup that reads a variable"):
        nothing(np.ones((4, 4)))
    weight = tf.Variable(np.eye(4), name="weight")

    def product(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x @ weight)

    @wh.function
    def branch(x: tf.Tensor) -> tf.Tensor:
        with wh.split():
            return tf.cond(tf.reduce_sum(weight) > 0.0, lambda: product(x), lambda: x)

    @wh.function
    def loop(x: tf.Tensor) -> tf.Tensor:
        with wh.split():
            return tf.while_loop(lambda n, h: n < 2, lambda n, h: (n + 1, product(h)), (0, x))[1]

    for step, op in ((branch, "If"), (loop, "While")):
        with pytest.raises(PlanError, match=rf"\({op}\): products are in the bodies of branches and loops"):
            step(np.ones((4, 4)))


class Layers(tf.Module):
    """Two layers, of which a scope divides the first over one axis and the second over another."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.one = tf.Variable(draw.normal(size=(6, 10)), name="one")
        self.two = tf.Variable(draw.normal(size=(10, 4)), name="two")

    def loss(self, x: tf.Tensor, first: Any, second: Any) -> tf.Tensor:
        with first:
            h = tf.tanh(x @ self.one)
        with second:
            return tf.reduce_mean((h @ self.two) ** 2)


@pytest.mark.parametrize(
    ("mesh", "rows"), [("data=2,tensor=2,expert=2", 8), ("tensor=2,data=2,expert=2", 7), ("expert=2,tensor=3", 5)]
)
def test_layers_over_axes_of_their_own(ranks: Callable[..., None], mesh: str, rows: int) -> None:
    """Equal to one device; each rank holds the part of its coordinate; a second program finds them there."""
    x = np.random.default_rng(1).normal(size=(rows, 6))
    alone = Layers()
    nothing = contextlib.nullcontext()
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = alone.loss(tf.constant(x), nothing, nothing)
        for v, slope in zip((alone.one, alone.two), tape.gradient(loss, (alone.one, alone.two))):
            v.assign_sub(0.1 * slope)
    sizes = wh.Mesh.parse(mesh)
    ranks(int(np.prod(list(sizes.values()))), mesh=sizes)
    model = Layers()

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            found = model.loss(x, wh.split(), wh.split(axis="expert"))
        for v, slope in zip((model.one, model.two), tape.gradient(found, (model.one, model.two))):
            v.assign_sub(0.1 * slope)
        return found

    for _ in range(2):
        found = step(tf.constant(x))
    np.testing.assert_allclose(found, loss, rtol=1e-12)
    np.testing.assert_allclose(model.one.numpy(), alone.one.numpy(), rtol=1e-12)
    np.testing.assert_allclose(model.two.numpy(), alone.two.numpy(), rtol=1e-12)
    assert len(model.one._whale_parts.tiles.cuts[0].sizes) == sizes["tensor"]
    assert len(model.two._whale_parts.tiles.cuts[0].sizes) == sizes["expert"]
    evaluated = wh.function(lambda x: model.loss(x, nothing, nothing))(tf.constant(x))
    np.testing.assert_allclose(evaluated, alone.loss(tf.constant(x), nothing, nothing), rtol=1e-12)


def test_steps_without_scopes_may_come_before_those_that_divide_weights(ranks: Callable[..., None]) -> None:
    """Takes an evaluation and a warm-up first, which use the weights whole; the optimizer has its slots by then."""

    def train(function: Any, scope: Any) -> list[np.ndarray]:
        generator = np.random.default_rng(0)
        weights = [tf.Variable(generator.standard_normal((6, 6))) for _ in range(2)]
        optimizer = tf.keras.optimizers.Adam(0.1)
        optimizer.build(weights)

        def loss_of(x: tf.Tensor, inside: Any) -> tf.Tensor:
            hidden = tf.tanh(x @ weights[0])
            with inside():
                return tf.reduce_mean(tf.tanh(hidden @ weights[1]) ** 2)

        @function
        def evaluate(x: tf.Tensor) -> tf.Tensor:
            return loss_of(x, contextlib.nullcontext)

        def make_step(inside: Any) -> Any:
            def step(x: tf.Tensor) -> tf.Tensor:
                with tf.GradientTape() as tape:
                    loss = loss_of(x, inside)
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
                return loss

            return function(step)

        warm_up, step = make_step(contextlib.nullcontext), make_step(scope)
        found = []
        for rows in (8, 6, 8):
            x = tf.constant(generator.standard_normal((rows, 6)))
            found += [one(x).numpy() for one in (evaluate, warm_up, step)]
            weights[1].assign(weights[1] * 0.9)
        if scope is wh.split:
            assert [type(p) for p in step.plan(x).variables.values()].count(Shard) == 3  # the weight and its slots
        return [*found, *(weight.numpy() for weight in weights)]

    wanted = train(tf.function, contextlib.nullcontext)
    ranks(2)
    for number, (a, b) in enumerate(zip(train(wh.function, wh.split), wanted, strict=True)):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13, err_msg=str(number))


def test_an_exchange_whose_result_one_rank_does_not_need_is_carried_out(ranks: Callable[..., None]) -> None:
    """Adds two numbers to a variable of which each rank holds one: the first does not need the largest of all."""

    def train(function: Any) -> list[np.ndarray]:
        generator = np.random.default_rng(0)
        weight, seen = tf.Variable(generator.standard_normal((3, 4))), tf.Variable([0, 0], dtype=tf.int64)

        @function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight) ** 2)
            weight.assign_sub(0.05 * tape.gradient(loss, weight))
            seen.assign_add([tf.shape(x, tf.int64)[0], tf.reduce_max(tf.cast(x * 10, tf.int64))])
            return loss

        losses = [step(tf.constant(generator.standard_normal((7, 3)))) for _ in range(2)]
        return [*(loss.numpy() for loss in losses), tf.convert_to_tensor(weight).numpy(), tf.convert_to_tensor(seen)]

    wanted = train(tf.function)
    ranks(2, **{"memory.zero": 1, "memory.zero_min_bytes": 0})
    for a, b in zip(train(wh.function), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_rows_are_taken_where_columns_are_split_and_only_the_run_knows_how_many(ranks: Callable[..., None]) -> None:
    """Takes as many rows of a product, divided by columns, as there are different ids: three of six, then two."""

    def train(function: Any, scope: Callable[[], Any]) -> list[np.ndarray]:
        weight = tf.Variable(np.random.default_rng(0).standard_normal((3, 4)))

        @function
        def step(x: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
            count = tf.size(tf.unique(ids)[0])
            with tf.GradientTape() as tape:
                with scope():
                    y = x @ weight
                    loss = tf.reduce_sum(tf.slice(y, [0, 0], tf.stack([count, 4])) ** 2)
            weight.assign_sub(0.05 * tape.gradient(loss, weight))
            return loss

        x = tf.constant(np.random.default_rng(1).standard_normal((6, 3)))
        losses = [step(x, tf.constant(ids)) for ids in ([4, 4, 2, 2, 1, 4], [3, 3, 3, 3, 2, 2])]
        return [*(loss.numpy() for loss in losses), tf.convert_to_tensor(weight).numpy()]

    wanted = train(tf.function, contextlib.nullcontext)
    ranks(2)
    for a, b in zip(train(wh.function, lambda: wh.split(dim=-1)), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_the_loss_of_masked_rows_is_computed_where_their_classes_lie(ranks: Callable[..., None]) -> None:
    """Classifies rows that a mask takes out, as masked language models do: no rank has all of the logits."""
    draw = np.random.default_rng(0)
    batches = [(draw.standard_normal((10, 6)), draw.integers(0, 40_000, 10), draw.random(10) < 0.5) for _ in range(2)]

    def train(function: Any, scope: Callable[[], Any]) -> tuple[list[np.ndarray], Any]:
        generator = np.random.default_rng(1)
        weights = [tf.Variable(generator.standard_normal(shape)) for shape in ((6, 8), (8, 40_000))]

        @function
        def step(x: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                h, labels = tf.boolean_mask(tf.tanh(x @ weights[0]), mask), tf.boolean_mask(labels, mask)
                with scope():
                    logits = h @ weights[1]
                    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
                    likeliest = tf.argmax(logits, -1)
            for weight, slope in zip(weights, tape.gradient(loss, weights)):
                weight.assign_sub(0.1 * slope)
            return loss, likeliest

        found = [part.numpy() for batch in batches for part in step(*map(tf.constant, batch))]
        return [*found, *(tf.convert_to_tensor(weight).numpy() for weight in weights)], step

    wanted, _ = train(tf.function, contextlib.nullcontext)
    ranks(2)
    found, step = train(wh.function, wh.split)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    moved = step.plan(*map(tf.constant, batches[0])).reshards
    assert any("SoftmaxCrossEntropy" in r.ref.node for r in moved) and all(r.bytes < 40_000 for r in moved), moved


def test_loops_over_rows_that_a_mask_takes_out_are_followed_by_weights_that_are_gathered(
    ranks: Callable[..., None],
) -> None:
    """Scans masked rows in front of a weight under ZeRO 3: the list of rows stays whole, as it cannot be sent."""

    def train(function: Any) -> list[np.ndarray]:
        weight = tf.Variable(np.random.default_rng(0).standard_normal((4, 6)))

        @function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                rows = tf.scan(lambda state, row: 0.5 * state + tf.tanh(row), tf.boolean_mask(x, x[:, 0] > 0))
                loss = tf.reduce_mean((rows @ weight) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        x = np.random.default_rng(1).standard_normal((5, 4))
        return [step(tf.constant(x)).numpy(), step(tf.constant(-x)).numpy(), tf.convert_to_tensor(weight).numpy()]

    wanted = train(tf.function)
    ranks(2, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    for a, b in zip(train(wh.function), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("shares", one_of(2, [(8, 0), (0, 8), (5, 3)]))
def test_sums_of_later_gradients_join_no_earlier_ones_where_ranks_have_no_rows(
    ranks: Callable[..., None], shares: tuple[int, int]
) -> None:
    """Trains layer by layer in each step: a rank without rows gives zeros to every sum, and all are ready at once."""

    def train(function: Any, split: Any, replica: Any) -> list[np.ndarray]:
        draw = np.random.default_rng(0)
        shared, *weights = (tf.Variable(draw.normal(size=(4, 4))) for _ in range(4))

        @function
        def step(h: tf.Tensor) -> tf.Tensor:
            total = tf.constant(0.0, tf.float64)
            for weight in weights:
                with tf.GradientTape() as tape:
                    with split():
                        hidden = h @ shared
                    with replica():
                        loss = tf.reduce_mean((hidden @ weight) ** 2)
                weight.assign_sub(0.05 * tape.gradient(loss, weight))
                with replica():
                    h = tf.tanh(h @ weight)
                total += loss
            return total

        losses = [step(tf.constant(draw.normal(size=(8, 4)))).numpy() for _ in range(2)]
        return [*losses, *(tf.convert_to_tensor(weight).numpy() for weight in weights)]

    wanted = train(tf.function, contextlib.nullcontext, contextlib.nullcontext)
    ranks(4, mesh=wh.Mesh(tensor=2), **{"batch.shares": shares})
    for a, b in zip(train(wh.function, wh.split, wh.replica), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
