"""Errors of exchanges in a step become CommErrors; others stay as they are, and the other ranks hear of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
import whale_ops
from tests.launcher.helpers import Launcher, run_alone
from whale.distributed.faults import raise_comm_error
from whale.runtime.context import require_current

pytestmark = pytest.mark.core
v1 = tf.compat.v1
Start = Callable[..., None]
X = np.ones((8, 4), np.float32)
BAD = np.full((8, 4), np.nan, np.float32)
HUGE = 1 << 22  # two vectors of it make a matrix of 64 TiB


def checked(x: Any) -> Any:
    """A layer that an author called WhaleNet, and that says so when it fails."""
    with tf.name_scope("WhaleNet"):
        return tf.reduce_sum(tf.debugging.check_numerics(x, "WhaleNet was given no numbers"))


def heard() -> str:
    """Returns what the last rank hears when it exchanges something."""
    with pytest.raises(wh.CommError) as caught:
        [*require_current("a test").comms][-1].allgather_bytes("heard", b"", 20.0)  # as it is, not connected anew
    return str(caught.value)


@pytest.mark.parametrize("config", [{}, {"pipeline.micro_batches": 2}], ids=["step", "micro-batches"])
def test_an_error_of_a_layer_stays_whatever_the_layer_is_called(ranks: Start, config: dict[str, Any]) -> None:
    ranks(2, **config)
    step = wh.function(checked)
    assert float(step(X)) == X.size
    with pytest.raises(tf.errors.InvalidArgumentError, match="WhaleNet was given no numbers"):
        step(BAD)
    assert heard().startswith("rank 0 failed: InvalidArgumentError: ")
    assert float(step(X)) == X.size


CAUGHT = """
import sys
import numpy as np, tensorflow as tf
if "plain" not in sys.argv:
    import whale as wh
    wh.init()
rows = np.random.default_rng(0).normal(size=(5, 6, 4))
rows[1, 5, 0], rows[2, 0, 1], rows[3, 5, 1] = 100, np.nan, np.nan  # of all ranks, of the first, of the last
w = tf.Variable(np.ones((4, 2)))
@tf.function if "plain" in sys.argv else wh.function
def step(x):
    tf.debugging.assert_less(tf.reduce_max(x), tf.constant(50.0, tf.float64), "too large")
    noise = tf.random.uniform((), seed=3, dtype=tf.float64)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.debugging.check_numerics(x @ w, "no number") ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss
caught = 0
for x in [*rows, *rows]:
    try:
        step(tf.constant(x))
    except tf.errors.InvalidArgumentError as error:
        assert "too large" in error.message or "no number" in error.message
        caught += 1
print("SAID", caught, *(f"{value:.12f}" for value in w.numpy().ravel()))
"""


def test_a_run_goes_on_after_an_error_that_all_ranks_catch(launcher: Launcher) -> None:
    script = launcher.script(CAUGHT)
    plain = run_alone(launcher, script)
    found = launcher.run("-np", "2", script)
    assert found.returncode == 0, found.stderr
    said = [line.partition("SAID ")[2].strip() for line in found.stdout.splitlines() if "SAID " in line]
    assert said[0].startswith("6 ")
    assert said == [plain.partition("SAID ")[2].strip()] * 2


def test_an_error_of_a_layer_in_a_session(ranks: Start) -> None:
    ranks(2)
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, (8, 4))
        total = checked(x)
        with wh.Session() as session:
            assert session.run(total, {x: X}) == X.size
            with pytest.raises(tf.errors.InvalidArgumentError, match="WhaleNet was given no numbers"):
                session.run(total, {x: BAD})
    assert heard().startswith("rank 0 failed: InvalidArgumentError: ")


@pytest.mark.parametrize(
    ("compute", "kind"),
    [
        (
            lambda ops: ops.whale_einsum(tf.ones((HUGE, 1)), tf.ones((1, HUGE)), equation="ab,bc->ac"),
            tf.errors.ResourceExhaustedError,
        ),
        (lambda ops: ops.whale_sparse_cross_entropy(tf.ones((2, 3)), [0, 3]), tf.errors.InvalidArgumentError),
    ],
    ids=["out of memory", "wrong operand"],
)
def test_an_error_of_an_own_kernel_that_computes_is_this_ranks(
    ranks: Start, compute: Callable[[Any], Any], kind: type[tf.errors.OpError]
) -> None:
    ranks(2)
    with pytest.raises(kind) as caught:
        compute(whale_ops.load_ops())
    assert "Whale" in caught.value.message
    raise_comm_error(caught.value, require_current("a test"))
    assert heard().startswith(f"rank 0 failed: {kind.__name__}: ")


@pytest.mark.parametrize("config", [{}, {"pipeline.micro_batches": 2}], ids=["step", "micro-batches"])
@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda comm: comm.abort("the disk of rank 1 is full"), "^the disk of rank 1 is full$"),
        (lambda comm: comm.leave(1.0), "^(rank 1 has left the run|no communicator )"),
    ],
    ids=["aborted", "left"],
)
def test_an_exchange_that_fails_is_a_comm_error(
    ranks: Start, end: Callable[[Any], Any], said: str, config: dict[str, Any]
) -> None:
    ranks(2, **config)
    step = wh.function(checked)
    step(X)
    end(require_current("a test").comms[1])
    with pytest.raises(wh.CommError, match=said):
        step(X)


def test_an_exchange_that_fails_in_a_session_is_a_comm_error(ranks: Start) -> None:
    ranks(2)
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, (8, 4))
        total = checked(x)
        with wh.Session() as session:
            session.run(total, {x: X})
            require_current("a test").comms[1].abort("the disk of rank 1 is full")
            with pytest.raises(wh.CommError, match="the disk of rank 1 is full"):
                session.run(total, {x: X})
