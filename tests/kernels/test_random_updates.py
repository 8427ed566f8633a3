"""Random programs that read and write variables: updates together leave the values of the program as written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from whale.kernels import updates
from whale.kernels.updates import UPDATE
from whale.passes.elementwise import units
from whale.passes.normalize import collapse_updates

Tensor = Any
SHAPES = ((3, 4), (3, 4), (6,), (6,), (1,), ())


pytestmark = pytest.mark.usefixtures("one_rank_without_grappler")


def statements(seed: int, variables: list[tf.Variable], x: Tensor) -> Tensor:
    """Runs as many statements as a seed says on variables; the same ones each time."""
    draw = random.Random(seed)
    known: dict[tuple[int, ...], list[Tensor]] = {
        v.shape: [tf.reduce_sum(x) * tf.ones(v.shape, x.dtype)] for v in variables
    }
    scalars: list[Tensor] = [tf.constant(0.5, x.dtype), tf.reduce_mean(x)]

    def operand(shape: tuple[int, ...]) -> Tensor:
        if draw.random() < 0.3:
            return draw.choice(scalars)
        here = [v for v in variables if v.shape == shape]
        return draw.choice(here).read_value() if draw.random() < 0.4 else draw.choice(known[shape])

    def arithmetic(shape: tuple[int, ...]) -> Tensor:
        left = draw.choice([*known[shape], *(v.read_value() for v in variables if v.shape == shape)])
        kind = draw.randrange(12)
        if kind == 0:
            return tf.sqrt(tf.abs(left))
        if kind == 1:
            return tf.math.rsqrt(tf.square(left) + tf.constant(0.5, x.dtype))
        if kind == 2:
            return tf.add_n([left, draw.choice(known[shape]), left])
        if kind == 3:
            return left / (tf.abs(draw.choice(known[shape])) + tf.constant(1.0, x.dtype))
        op = draw.choice([tf.add, tf.subtract, tf.multiply, tf.maximum, tf.minimum])
        row = kind > 7 and len(shape) == 2
        pair = [left, draw.choice(known[shape])[draw.randrange(shape[0])] if row else operand(shape)]
        return tf.tanh(op(*(pair if draw.random() < 0.7 else pair[::-1]))) if draw.random() < 0.2 else op(*pair)

    for _ in range(draw.randrange(10, 40)):
        variable = draw.choice(variables)
        kind = draw.randrange(10)
        if kind < 4:
            known[variable.shape].append(arithmetic(variable.shape))
        elif kind < 8:
            write = draw.choice([variable.assign, variable.assign_add, variable.assign_sub])
            write(tf.clip_by_value(arithmetic(variable.shape), -3, 3) * tf.constant(0.25, x.dtype))
        else:  # what only the whole tensor tells, on which what follows depends
            scalars.append(tf.tanh(tf.reduce_sum(draw.choice([variable.read_value(), *known[variable.shape]]))))
    return tf.add_n([tf.reduce_sum(values[-1]) for values in known.values()])


def values_after(function: Callable[..., Any], seed: int, dtype: str) -> tuple[list[bytes], Any]:
    generator = np.random.default_rng(seed)
    variables = [tf.Variable(generator.normal(size=s), dtype=dtype) for s in SHAPES]
    step = function(lambda x: statements(seed, variables, x))
    x = tf.constant(generator.normal(size=(2, 3)), dtype)
    results = [step(x).numpy().tobytes() for _ in range(2)]
    return [*results, *(v.numpy().tobytes() for v in variables)], step


@pytest.mark.core
@pytest.mark.parametrize("first", one_of(2, [0, 6]))
def test_values_are_those_of_the_program_as_written(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = with_rows = 0
    for seed in range(first, first + 6):
        monkeypatch.setattr(updates, "LARGE_BYTES", (1, 1 << 20)[seed // 2 % 2])
        monkeypatch.setattr(units, "LARGE_BYTES", (1, 1 << 20)[seed // 2 % 2])
        monkeypatch.setattr(units, "LONG", 2)
        monkeypatch.setattr(collapse_updates, "MANY", (1 << 20, 1, 1)[seed % 3])
        dtype = ("float64", "float32")[seed % 2]
        expected, _ = values_after(lambda step: step, seed, dtype)
        found, step = values_after(wh.function, seed, dtype)
        assert found == expected, f"seed {seed}"
        program = step._step((tf.zeros((2, 3), dtype),), {}).compiled.ranks[0]
        written = [node for node in program.nodes if node.op == UPDATE]
        together += len(written)
        with_rows += any(" r" in line for node in written for line in node.attrs["program"])
    assert together > 5 and with_rows > 0


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_rows_are_read_again_for_each_row_of_a_large_variable(dtype: str) -> None:
    generator = np.random.default_rng(0)
    first, row, short = (generator.normal(size=s) for s in ((3, 70, 1300), (1, 1300), (70, 1)))
    found = []
    for function in (tf.function, wh.function):
        variable = tf.Variable(first, dtype=dtype)

        @function
        def step(row: Tensor, short: Tensor, variable: tf.Variable = variable) -> None:
            slope = row * variable + short * variable
            variable.assign_sub(tf.constant(0.1, dtype) * slope / (tf.abs(row) + tf.constant(1.0, dtype)))

        for _ in range(3):
            step(tf.constant(row, dtype), tf.constant(short, dtype))
        found.append(variable.numpy().tobytes())
    assert found[0] == found[1]
    program = step._step((tf.constant(row, dtype), tf.constant(short, dtype)), {}).compiled.ranks[0]
    (written,) = (node for node in program.nodes if node.op == UPDATE)
    assert [line for line in written.attrs["program"] if " r" in line] == ["Mul t0 r0 o0", "Div t0 t0 r1"]
