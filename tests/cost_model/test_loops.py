"""Loops whose number of turns follows from the program count as often as they run: as if they were written out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import tensorflow as tf

from cost_model.ops import program_work
from whale.capture.function import capture_function
from whale.ir.program import Program
from whale.passes.pipeline import PlanContext, normalise

TURNS, ROWS, WIDTH = 7, 3, 5


def captured(step: Callable[..., tf.Tensor], *shape: int) -> Program:
    found = capture_function(step, [tf.TensorSpec(shape, tf.float32, "x")], {})
    return normalise(found.program, PlanContext(size=1))


def products(program: Program) -> tuple[int, float]:
    """(how many, FLOPs) of the matrix products that run."""
    flops = [w.flops for n, w in program_work(program) if "MatMul" in n.op]
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
    counts = [Counter(n.op for n, _ in program_work(p)) for p in (loop, chain)]
    assert counts[0]["Tanh"] == counts[1]["Tanh"] == TURNS and counts[0]["TanhGrad"] == counts[1]["TanhGrad"] == TURNS
    moved = [
        sum(w.moved_bytes for n, w in program_work(p) if "MatMul" in n.op or "Tanh" in n.op) for p in (loop, chain)
    ]
    assert moved[0] == moved[1]


def test_keras_recurrent_layers_and_their_unrolled_twins() -> None:
    found = []
    for unroll in (False, True):
        layer = tf.keras.layers.LSTM(4, unroll=unroll)
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
