"""wh.stage: each rank runs the nodes of its stage, and the result is that of one device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import PlanError
from whale.ir.plan import plan_from_json
from whale.runtime.context import require_current

Start = Callable[..., None]
Stage = Callable[..., Any]
ROWS, WIDTH, CLASSES = 8, 6, 5


def weight(number: int, *shape: int) -> tf.Variable:
    return tf.Variable(np.random.default_rng(number).standard_normal(shape) * 0.4, name=f"w{number}")


class Chain:
    """Four layers in stages, with a skip connection past the middle ones, two losses and clipped gradients."""

    def __init__(self, stage: Stage, stages: int = 4) -> None:
        self.weights = [weight(i, WIDTH, WIDTH) for i in range(3)] + [weight(3, WIDTH, CLASSES)]
        self.optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        self.groups = np.array_split(np.arange(4), stages)
        self.stage = stage

    def losses(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        h, first, side = x, x, tf.constant(0.0, tf.float64)
        for group in self.groups:
            with self.stage():
                for i in group:
                    h = tf.tanh(h @ self.weights[i])
                    first = h if i == 0 else first
                    if i == 2:
                        h = h + first
                    if i == 1:
                        side = 0.1 * tf.reduce_mean(h**2)
        return tf.reduce_mean((h - y) ** 2), side

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            main, side = self.losses(x, y)
            loss = main + side
        slopes, norm = tf.clip_by_global_norm(tape.gradient(loss, self.weights), 0.3)
        self.optimizer.apply_gradients(zip(slopes, self.weights))
        return loss, side, norm


class Tied:
    """An embedding at the first stage, which the last stage reads again to tell the classes apart."""

    def __init__(self, stage: Stage) -> None:
        self.weights = [weight(0, CLASSES, WIDTH), weight(1, WIDTH, WIDTH)]
        self.optimizer = tf.keras.optimizers.Adam(0.01, epsilon=1e-3)
        self.stage = stage

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        table, middle = self.weights
        tokens = tf.argmax(y, axis=1)
        with tf.GradientTape() as tape:
            with self.stage():
                h = tf.nn.embedding_lookup(table, tokens) + x
            with self.stage():
                h = tf.tanh(h @ middle)
            with self.stage():
                logits = tf.matmul(h, table, transpose_b=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tokens, logits))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.weights), self.weights))
        return loss, tf.reduce_sum(h)


class Towers:
    """Two towers side by side, joined by a contrastive loss over the whole batch; one side is not trained."""

    def __init__(self, stage: Stage) -> None:
        self.weights = [weight(0, WIDTH, 4), weight(1, CLASSES, 4), weight(2, 4, 4)]
        self.optimizer = tf.keras.optimizers.SGD(0.1)
        self.stage = stage

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            with self.stage():
                images = tf.tanh(x @ self.weights[0])
            with self.stage():
                texts = tf.stop_gradient(tf.tanh(y @ self.weights[1]))
            with self.stage():
                logits = tf.matmul(images @ self.weights[2], texts, transpose_b=True)
                loss = tf.reduce_mean(tf.nn.log_softmax(logits) * -tf.eye(ROWS, dtype=tf.float64))
        trained = [self.weights[0], self.weights[2]]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained))
        return loss, logits


def batch(number: int) -> tuple[tf.Tensor, tf.Tensor]:
    generator = np.random.default_rng(number)
    return tf.constant(generator.standard_normal((ROWS, WIDTH))), tf.constant(
        generator.standard_normal((ROWS, CLASSES))
    )


def trained(model: Any, function: Any) -> tuple[list[np.ndarray], Any]:
    """Every result and every variable of three steps, and the step."""
    model.optimizer.build(model.weights)
    step = function(model.step)
    found = [value.numpy() for i in range(3) for value in step(*batch(i))]
    return found + [tf.convert_to_tensor(v).numpy() for v in (*model.weights, *model.optimizer.variables)], step


def assert_equals_one_device(
    ranks: Start, make: Callable[[Stage], Any], count: int, sends: bool = True, **config: Any
) -> Any:
    wanted, _ = trained(make(contextlib.nullcontext), tf.function)
    ranks(count, **config)
    found, step = trained(make(wh.stage), wh.function)
    for number, (a, b) in enumerate(zip(found, wanted)):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13, err_msg=str(number))
    wh.check_replicas()
    plan = step.plan(*batch(0))
    assert bool(plan.edges) == sends and plan_from_json(plan.to_json()) == plan
    return plan


@pytest.mark.core
@pytest.mark.parametrize(("stages", "count"), [(2, 2), (3, 3), (4, 4), (2, 4), (4, 2)])
def test_a_chain_equals_one_device(ranks: Start, stages: int, count: int) -> None:
    plan = assert_equals_one_device(ranks, lambda stage: Chain(stage, stages), count)
    assert sorted(r for group in plan.stage_groups for r in group.ranks) == list(range(count))


@pytest.mark.parametrize(("model", "count"), [(Tied, 3), (Tied, 6), (Towers, 3), (Towers, 6)])
def test_other_graphs_of_stages_equal_one_device(ranks: Start, model: Any, count: int) -> None:
    assert_equals_one_device(ranks, model, count)


def test_four_ranks_make_two_replicas_of_two_stages(ranks: Start) -> None:
    plan = assert_equals_one_device(ranks, lambda stage: Chain(stage, 2), 4)
    assert [group.ranks for group in plan.stage_groups] == [(0, 2), (1, 3)]
    assert plan.split_flops_fraction == 1.0


def test_a_stage_has_its_own_nodes_and_variables_only(ranks: Start) -> None:
    from whale.partition.pipeline.stage_programs import cut

    ranks(4)
    model = Chain(wh.stage)
    _, step = trained(model, wh.function)
    compiled = step._step(batch(0), {}).compiled
    parts = cut(compiled.program, compiled.plan.stage_groups)
    own = [{v.name for v in part.program.variables if v.name.startswith("w")} for part in parts]
    assert [sorted(names)[0].partition(":")[0] for names in own] == ["w0", "w1", "w2", "w3"]
    assert all(len(names) == 1 for names in own)
    for rank in compiled.ranks:
        assert sum(n.op == "MatMul" for n in rank.nodes) <= 3


def on(ranks: list[list[int]], stage: Stage) -> Stage:
    """``stage`` on these ranks, in turn."""
    order = itertools.cycle(ranks)
    return (lambda: stage(devices=next(order))) if stage is wh.stage else stage


@pytest.mark.parametrize(
    ("make", "groups", "micro_batches"),
    [
        (lambda stage: Chain(stage, 2), [[0, 1], [4, 2, 3]], 1),
        (lambda stage: Chain(stage, 3), [[0, 1, 2], [5], [3, 4]], 2),
        (lambda stage: Chain(stage, 2), [[0], [1, 2, 3]], 3),  # 4 micro-batches of 2 rows, on 1 and on 3 ranks
        (Tied, [[0], [1, 2], [3, 4, 5]], 2),
        (Towers, [[0, 1], [2], [3, 4, 5]], 1),
    ],
)
def test_stages_on_unequal_numbers_of_ranks(ranks: Start, make: Any, groups: list, micro_batches: int) -> None:
    count = sum(map(len, groups))
    setting = {"pipeline.micro_batches": micro_batches}
    plan = assert_equals_one_device(ranks, lambda stage: make(on(groups, stage)), count, **setting)
    assert [list(group.ranks) for group in plan.stage_groups] == groups
    assert plan.split_flops_fraction == 1.0
    assert ROWS % plan.micro_batches == 0 and plan.micro_batches >= micro_batches


def test_devices_are_those_that_the_script_names(ranks: Start) -> None:
    order = iter([1, 0])
    plan = assert_equals_one_device(
        ranks, lambda stage: Chain(lambda: stage(**({"devices": [next(order)]} if stage is wh.stage else {})), 2), 2
    )
    assert [group.ranks for group in plan.stage_groups] == [(1,), (0,)]


@pytest.mark.parametrize(
    ("stages", "count", "groups"), [(3, 4, [(0, 3), (1,), (2,)]), (3, 2, [(0,), (1,)]), (2, 3, [(0, 2), (1,)])]
)
def test_ranks_that_make_no_whole_pipelines(ranks: Start, stages: int, count: int, groups: list) -> None:
    plan = assert_equals_one_device(ranks, lambda stage: Chain(stage, stages), count)
    assert [group.ranks for group in plan.stage_groups] == groups


@contextlib.contextmanager
def split_stage() -> Iterator[None]:
    with wh.stage(), wh.split():
        yield


def test_batches_of_another_size_under_split_scopes_in_stages_of_two_ranks_and_one(ranks: Start) -> None:
    def train(stage: Stage, function: Any) -> list[np.ndarray]:
        model = Chain(stage, 2)
        step = function(model.step)
        found = [value.numpy() for rows in (ROWS, ROWS - 2) for value in step(*(t[:rows] for t in batch(rows)))]
        return found + [tf.convert_to_tensor(v).numpy() for v in (*model.weights, *model.optimizer.variables)]

    wanted = train(contextlib.nullcontext, tf.function)
    ranks(3)
    scopes = itertools.cycle([wh.stage, split_stage])

    def second_is_split() -> Any:
        return next(scopes)()

    for number, (a, b) in enumerate(zip(train(second_is_split, wh.function), wanted, strict=True)):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13, err_msg=str(number))


def test_a_stage_inside_a_stage(ranks: Start) -> None:
    ranks(2)
    with pytest.raises(PlanError, match="stage is entered inside another"), wh.stage(), wh.stage():
        pass

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with wh.stage(), wh.stage():
            return x

    # AutoGraph would make a StagingError of it, with a page of frames.
    with pytest.raises(PlanError, match=r"^wh\.stage is .* wh\.stage\n  at: test_stages\.py:\d+\n  given: .* stage_"):
        step(tf.ones([4, 2]))


def test_evaluation_without_scopes_reads_what_stages_hold(ranks: Start) -> None:
    ranks(2)
    model = Chain(wh.stage, 2)
    trained(model, wh.function)
    model.stage = contextlib.nullcontext
    x, y = batch(7)
    np.testing.assert_allclose(wh.function(model.losses)(x, y)[0], model.losses(x, y)[0], rtol=1e-12)
    assert all(h.ranks != frozenset({1}) for h in require_current().variables._homes.values())


def test_ranks_of_one_process_hold_what_processes_hold(ranks: Start) -> None:
    """Every variable on the two ranks of its stage, and on the first rank, whose variable is the script's."""
    ranks(4)
    model = Chain(wh.stage, 2)
    x = tf.constant(np.random.default_rng(7).standard_normal((ROWS, WIDTH)))
    y = tf.constant(np.random.default_rng(8).standard_normal((ROWS, CLASSES)))
    step = wh.function(model.step)
    step(x, y)
    held = [2, 2, 3, 3]
    of_each = [8 * WIDTH * n for n in (WIDTH, WIDTH, WIDTH, CLASSES)]
    owner = require_current().variables
    for weight, count, n_bytes in zip(model.weights, held, of_each):
        entry = owner._entries[id(weight._handle)]
        found = [entry.variable, *entry.copies]
        assert sum(_holds(v, n_bytes) for v in found) == count
    step(x, y)
    other = wh.function(lambda: sum(tf.reduce_sum(w) for w in model.weights))  # every rank reads them
    np.testing.assert_allclose(other(), sum(float(tf.reduce_sum(w)) for w in model.weights), rtol=1e-12)
    model.weights[3].assign(tf.zeros_like(model.weights[3]))
    np.testing.assert_allclose(other(), sum(float(tf.reduce_sum(w)) for w in model.weights), rtol=1e-12)
    wh.check_replicas()


def _holds(variable: tf.Variable, n_bytes: int) -> bool:
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return int(tf.size(value)) * 8 == n_bytes
