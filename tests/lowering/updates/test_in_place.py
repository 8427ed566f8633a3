"""Updates of large variables wait for those who read the old values, and need no memory of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

import whale as wh
from tests.programs import Builder
from whale.ir.program import Program
from whale.lowering.updates.fuse import UPDATE
from whale.lowering.updates.in_place import LARGE_BYTES, in_place
from whale_ops.memory import memory, reset_peak


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
    program = in_place(_program(LARGE_BYTES // 8), UPDATE)
    assert set(program.by_name["update"].controls) == {"alias", "before"}
    order = [node.name for node in program.nodes]
    assert order.index("before") < order.index("update") < order.index("after")
    small = _program(8)
    assert in_place(small, UPDATE).by_name["update"].controls == ()


@pytest.fixture
def _one_rank() -> Iterator[None]:
    wh.init({"communication.transport": "in-process", "cluster.ranks": 1})
    yield
    wh.shutdown()


@pytest.mark.usefixtures("_one_rank")
def test_a_weight_is_not_copied_while_the_gradient_before_it_is_computed() -> None:
    w = tf.Variable(tf.random.stateless_normal((2048, 2048), (1, 2)) / 64)
    first = tf.Variable(tf.eye(2048))

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ first) @ w)
        for v, g in zip((first, w), tape.gradient(loss, (first, w))):
            v.assign_sub(0.1 * g)
        return loss

    x = tf.ones((8, 2048))
    step(x)
    whole = 2048 * 2048 * 4
    for _ in range(3):
        before = memory().live_bytes
        reset_peak()
        step(x)
        assert memory().peak_bytes - before < 2.6 * whole  # two gradients, no more
