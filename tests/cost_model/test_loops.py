"""Loops whose number of turns follows from the program count as often as they run: as if they were written out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
import tensorflow as tf

from cost_model.graph.machine import make_measured_machine
from cost_model.graph.predict import Ran, predict_ranks
from cost_model.graph.unroll_loops import unroll
from cost_model.kernels.loop_counts import count_executions
from cost_model.kernels.op_work import iterate_work
from tests.cost_model.test_captured import TABLE
from whale.capture.function import capture_function
from whale.errors import PlanError
from whale.ir.program import Node, Program, Ref, make_const
from whale.ir.values import Func, TensorType
from whale.partition.spmd import partition_for_rank
from whale.passes.pass_manager import make_plan, normalise
from whale.passes.settings import PlanSettings

TURNS, ROWS, WIDTH = 7, 3, 5
MACHINE = make_measured_machine(TABLE, 1)


def captured(step: Callable[..., tf.Tensor], *shape: int) -> Program:
    found = capture_function(step, [tf.TensorSpec(shape, tf.float32, "x")], {})
    return normalise(found.program, PlanSettings(size=1))


def products(program: Program) -> tuple[int, float]:
    """(how many, FLOPs) of the matrix products that run."""
    flops = [w.flops for n, w in iterate_work(program) if "MatMul" in n.op]
    return len(flops), sum(flops)


def test_a_recurrent_step_does_what_its_unrolled_twin_does() -> None:
    w, u, start = (tf.Variable(tf.ones(s)) for s in ((WIDTH, WIDTH), (WIDTH, WIDTH), (1, WIDTH)))

    def cell(x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x @ w + h @ u)

    def trained(states: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Program:
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(states(x, tf.tile(start, (ROWS, 1)))))
            for variable, slope in zip((w, u, start), tape.gradient(loss, (w, u, start))):
                variable.assign_sub(slope)
            return loss

        return captured(step, TURNS, ROWS, WIDTH)

    def looped(x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, h: i < TURNS, lambda i, h: (i + 1, cell(x[i], h)), (0, h))[1]

    def unrolled(x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
        for i in range(TURNS):
            h = cell(x[i], h)
        return h

    loop, chain = trained(looped), trained(unrolled)
    assert any(n.op in ("While", "StatelessWhile") for n in loop.nodes)
    # Of each turn two products forward; backward two for the weights and one for the state.
    assert products(loop) == products(chain) == (5 * TURNS, 5 * TURNS * 2 * ROWS * WIDTH * WIDTH)
    counts = [Counter(n.op for n, _ in iterate_work(p)) for p in (loop, chain)]
    assert counts[0]["Tanh"] == counts[1]["Tanh"] == TURNS and counts[0]["TanhGrad"] == counts[1]["TanhGrad"] == TURNS
    moved = [
        sum(w.moved_bytes for n, w in iterate_work(p) if "MatMul" in n.op or "Tanh" in n.op) for p in (loop, chain)
    ]
    assert moved[0] == moved[1]


def test_keras_recurrent_layers_and_their_unrolled_twins() -> None:
    found = []
    for is_unrolled in (False, True):
        layer = tf.keras.layers.LSTM(4, unroll=is_unrolled)
        layer.build((ROWS, TURNS, WIDTH))
        program = captured(lambda x, layer=layer: layer(x), ROWS, TURNS, WIDTH)  # type: ignore[misc]
        found.append(products(program))
    assert found[0] == found[1] and found[0][1] == TURNS * 2 * ROWS * (WIDTH + 4) * 16


@pytest.mark.parametrize(
    ("goes_on", "turned", "start", "count"),
    [
        (lambda i, n, x: i < n, lambda i, n, x: (i + 3, n, x @ x), (0, 10), 4),
        (lambda i, n, x: (i > n) & (i > -100), lambda i, n, x: (i - 1, n + 1, x @ x), (9, 0), 5),
        (lambda i, n, x: i < n, lambda i, n, x: (i * 2, n, x @ x), (1, 1), 0),
        (lambda i, n, x: i < n, lambda i, n, x: (i + tf.cast(tf.norm(x), tf.int32), n, x @ x), (0, 9), 1),
        (lambda i, n, x: tf.norm(x) < 9.0, lambda i, n, x: (i, n, x @ x), (0, 9), 1),
    ],
    ids=["steps", "two counters", "none", "a step that data decides", "an end that data decides"],
)
def test_how_often(goes_on: Callable, turned: Callable, start: tuple[int, int], count: int) -> None:
    program = captured(lambda x: tf.while_loop(goes_on, turned, (*start, x))[2], 4, 4)
    assert products(program)[0] == count


def test_a_loop_inside_a_loop() -> None:
    def inner(x: tf.Tensor, n: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda j, x: j < n, lambda j, x: (j + 1, x @ x), (0, x))[1]

    def step(x: tf.Tensor) -> tf.Tensor:
        n = tf.constant(3)
        return tf.while_loop(lambda i, n, x: i < 2, lambda i, n, x: (i + 1, n, inner(x, n)), (0, n, x))[2]

    assert products(captured(step, 4, 4))[0] == 6


def trained(layers: Callable[[tf.Tensor], tf.Tensor], variables: list[tf.Variable], *shape: int) -> Program:
    """A step of gradient descent on the sum of squares."""

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layers(x)))
        for variable, slope in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(slope)
        return loss

    return captured(step, *shape)


def recurrent(turns: int, rows: int, unroll: bool = False, layers: int = 1) -> Program:
    made = [tf.keras.layers.LSTM(64, unroll=unroll, return_sequences=i + 1 < layers) for i in range(layers)]
    for layer in made:
        layer.build((rows, turns, 64))
    variables = [getattr(v, "value", v) for layer in made for v in layer.trainable_weights]
    return trained(lambda x: reduce(lambda x, layer: layer(x), made, x), variables, rows, turns, 64)


def predicted(program: Program) -> Ran:
    return predict_ranks(
        [partition_for_rank(program, make_plan(program, PlanSettings(size=1)), 0, "", None)], MACHINE, plays=2
    ).ranks[0]


@pytest.mark.parametrize("layers", [1, 2])  # the gradient of the second one's input is stacked up as well
def test_a_loops_time_and_memory_are_those_of_its_unrolled_twin(layers: int) -> None:
    loop, chain = (predicted(recurrent(12, 256, unroll, layers)) for unroll in (False, True))
    assert loop.compute_s == pytest.approx(chain.compute_s, rel=0.1)
    assert loop.end_s == pytest.approx(chain.end_s, rel=0.1)
    assert loop.asked_bytes == pytest.approx(chain.asked_bytes, rel=0.1)


def test_what_a_loop_stacks_up_for_its_gradient_is_held() -> None:
    short, long = (predicted(recurrent(turns, 256)) for turns in (12, 24))
    # Of each turn: four gates, the state's tanh, cell and output; the gates' sums are a buffer of their own until they
    # are used. Inputs (64 wide as well) lie in one transposed tensor; they come as an argument besides.
    item = 256 * 64 * 4
    assert 12 * 8 * item <= long.asked_bytes - short.asked_bytes <= 12 * 13 * item
    assert long.compute_s == pytest.approx(2 * short.compute_s, rel=0.1)


@pytest.mark.parametrize(
    "layers",
    [
        lambda w, x: tf.scan(lambda h, one: tf.tanh(one @ w + h), x, tf.zeros((ROWS, WIDTH))),
        lambda w, x: tf.map_fn(lambda one: one @ w, x),
        lambda w, x: tf.foldl(lambda h, one: h @ w + one, x),
    ],
    ids=["scan", "map", "fold"],
)
def test_other_loops_over_the_parts_of_a_tensor(layers: Callable[..., tf.Tensor]) -> None:
    w = tf.Variable(tf.ones((WIDTH, WIDTH)))
    program = trained(lambda x: layers(w, x), [w], TURNS, ROWS, WIDTH)
    played = unroll(program)
    assert not any(n.op in ("While", "StatelessWhile") or "Reserve" in n.op for n in played.nodes)
    assert sum(n.op == "MatMul" for n in played.nodes) == products(program)[0] >= 2 * (TURNS - 1)
    assert predicted(program).end_s > 0


def test_a_loop_or_branch_that_data_decide_is_refused_and_says_what_to_do() -> None:
    by_data = captured(lambda x: tf.while_loop(lambda x: tf.norm(x) < 9.0, lambda x: (x @ x,), (x,))[0], 4, 4)
    with pytest.raises(
        PlanError,
        match=r"this loop(.|\n)*number of iterations of .* depends on data(.|\n)*next: give sequences a fixed",
    ):
        predicted(by_data)
    branch = captured(lambda x: tf.cond(tf.norm(x) > 1.0, lambda: x @ x, lambda: x), 4, 4)
    with pytest.raises(PlanError, match=r"cannot predict the time and memory of this branch(.|\n)*tf.where"):
        predicted(branch)


def test_a_plan_counts_what_loops_do_as_often_as_they_do_it() -> None:
    program = recurrent(TURNS, 8)
    assert make_plan(program, PlanSettings(size=2)).total_flops == products(program)[1]


def test_a_function_that_many_call_is_gone_through_once_and_counted_for_each() -> None:
    def calls(name: str, of: str, times: int) -> Program:
        start = make_const("start", np.zeros(()))
        nodes = [start]
        for i in range(times):
            nodes.append(
                Node(f"call_{i}", "WhaleCall", (Ref("start"),), (), {"f": Func(of)}, (TensorType("float64", ()),))
            )
        return Program(name, tuple(nodes), (), (), (Ref("start"),), ())

    depth, times = 12, 5  # 5 ** 12 calls, were each gone through
    functions = {f"f{i}": calls(f"f{i}", f"f{i + 1}", times) for i in range(depth)}
    functions[f"f{depth}"] = calls(f"f{depth}", "", 0)
    main = calls("main", "f0", times)
    found = count_executions(Program(main.name, main.nodes, (), (), main.outputs, (), functions))
    assert found == Counter({f"f{i}": times ** (i + 1) for i in range(depth + 1)})
