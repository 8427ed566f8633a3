"""A function runs on other threads than TensorFlow's, and as many as it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

import whale_ops

THREADS = 3


def run_with_threads(call: Any, threads: int) -> Any:
    """Returns what runs a ``tf.function`` without arguments with other threads than TensorFlow's."""
    concrete = call.get_concrete_function()
    types, shapes = [one.dtype for one in concrete.outputs], [one.shape for one in concrete.outputs]
    name = concrete.function_def.signature.name
    body = attr_value_pb2.NameAttrList(name=name)
    ops = whale_ops.load_ops()

    def run(concrete: Any = concrete) -> Any:  # which keeps it alive
        captured = concrete.captured_inputs
        return ops.whale_call(args=captured, Tout=types, f=name, bodies=[body], shapes=shapes, threads=threads)

    return tf.function(run, autograph=False)


def _spent_ticks() -> dict[str, int]:
    """Returns the processor time of each thread of this process, in ticks of the clock."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[task.name] = int(fields[11]) + int(fields[12])
    return found


def test_a_call_computes_on_borrowed_threads() -> None:
    x = tf.random.stateless_normal((1500, 1500), (1, 2)) / 40
    product = tf.function(lambda: tf.exp(x @ x), autograph=False)
    expected = product()
    borrowing = run_with_threads(product, THREADS)
    before = _spent_ticks()
    for _ in range(4):
        (found,) = borrowing()
    after = _spent_ticks()
    new = [after[thread] for thread in after.keys() - before.keys()]
    others = sum(after[thread] - before[thread] for thread in after.keys() & before.keys())
    assert len(new) == 2 * THREADS, new  # a pool for operations, and one within them
    assert sum(new) > 2 * others, (new, others)  # who waits does so on threads that were there
    tf.debugging.assert_near(found, expected, rtol=1e-4)
