"""Updates of large variables wait for those who read the old values, and need no memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import tensorflow as tf

import whale as wh
from tests.memory import peaks_above
from tests.programs import Builder
from whale.ir.program import Program
from whale.kernels.updates import LARGE_BYTES, order_in_place_updates


def _program(size: int) -> Program:
    """A variable is read before and after it is updated; the program has the update first."""
    b = Builder()
    w = b.variable("w", (size,))
    one = b.const(1.0)
    old = b.read(w, name="old")
    updated = b.update("AssignSubVariableOp", w, b.op("Mul", old, old, name="square"), name="update")
    new = b.op("Mul", b.read(w, controls=[updated]), one, name="after")
    before = b.op("Neg", b.node("Identity", (old,), (b.held(w),), "alias"), name="before")
    return b.build([new, before], effects=[updated])


def test_an_update_waits_for_readers_that_do_not_wait_for_it() -> None:
    program = order_in_place_updates(_program(LARGE_BYTES // 8))
    assert set(program.by_name["update"].controls) == {"alias", "before"}
    order = [node.name for node in program.nodes]
    assert order.index("before") < order.index("update") < order.index("after")
    small = _program(8)
    assert order_in_place_updates(small).by_name["update"].controls == ()


@pytest.fixture
def _one_rank() -> Iterator[None]:
    wh.init({"communication.in_process_ranks": 1})
    yield
    wh.shutdown()


@pytest.mark.usefixtures("_one_rank")
def test_a_weight_is_not_copied_while_the_gradient_before_it_is_computed() -> None:
    def make() -> Callable[[], tf.Tensor]:
        w = tf.Variable(tf.random.stateless_normal((2048, 2048), (1, 2)) / 64)
        first = tf.Variable(tf.eye(2048))

        @wh.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((x @ first) @ w)
            for v, g in zip((first, w), tape.gradient(loss, (first, w))):
                v.assign_sub(0.1 * g)
            return loss

        return partial(step, tf.ones((8, 2048)))

    whole = 2048 * 2048 * 4
    assert 0.9 * whole < peaks_above(make)[-1] < 2.6 * whole  # two gradients, no more
