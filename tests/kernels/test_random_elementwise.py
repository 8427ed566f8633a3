"""Random programs of arithmetic: in few operations they give the values of the program as written."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from whale.kernels.elementwise import ELEMENTWISE

Tensor = Any
SHAPE = (6, 5, 40)
PARTS = ((5, 40), (40,), (1, 1, 40), (6, 5, 1), (6, 1, 1), (), (6, 1, 40), (1, 5, 1))


pytestmark = pytest.mark.usefixtures("one_rank_without_grappler")


def statements(seed: int, x: Tensor, parts: list[Tensor], over: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """As many operations as a seed says; the same ones each time. ``over``: axes of means."""
    draw = random.Random(seed)
    whole = [x, tf.tanh(x)]
    small = list(parts)

    def operand() -> Tensor:
        return draw.choice(whole) if draw.random() < 0.6 else draw.choice(small)

    for _ in range(draw.randrange(15, 60)):
        kind = draw.randrange(16)
        left = draw.choice(whole)
        if kind < 7:
            op = draw.choice([tf.add, tf.subtract, tf.multiply, tf.maximum, tf.minimum, tf.math.squared_difference])
            pair = [left, operand()]
            made = op(*(pair if draw.random() < 0.5 else pair[::-1]))
        elif kind < 9:
            made = draw.choice([tf.negative, tf.abs, tf.square, tf.nn.relu, tf.nn.relu6, tf.identity])(left)
        elif kind == 9:
            made = left / (tf.abs(operand()) + tf.constant(1.0, x.dtype))
        elif kind == 10:
            made = tf.add_n([left, draw.choice(whole)])  # of three, TensorFlow begins with one whose memory it may take
        elif kind == 11:
            made = tf.tile(draw.choice([p for p in small if p.shape == (6, 5, 1)]), (1, 1, 40))
            if draw.random() < 0.6:  # of scalars, and of what is tiled in the same way
                made = tf.negative(made) * draw.choice([one for one in (*small, made) if one.shape in ((), SHAPE)])
        elif kind == 12:  # what only the whole tensor tells
            small.append(tf.reduce_mean(tf.tanh(left), draw.choice(over), keepdims=True))
            continue
        elif kind == 13:
            made = tf.raw_ops.ReluGrad(gradients=left, features=draw.choice(whole))
        elif kind == 14:
            made = tf.sin(left)
        else:
            part = draw.choice(small)
            made = tf.cond(tf.reduce_sum(part) > 0, lambda a=left, b=part: a * b + a, lambda a=left, b=part: a - b * b)
        whole.append(tf.clip_by_value(made, -9, 9) if draw.random() < 0.2 else made)
    return whole[-3:] + small[-2:]


def results(
    function: Callable[..., Any], seed: int, dtype: str, over: Sequence[tuple[int, ...]]
) -> tuple[list[np.ndarray], Any, tuple[Any, ...]]:
    generator = np.random.default_rng(seed)
    x = tf.constant(generator.normal(size=SHAPE), dtype)
    parts = [tf.constant(generator.normal(size=shape), dtype) for shape in PARTS]
    step = function(lambda x, *parts: statements(seed, x, list(parts), over))
    return [value.numpy() for value in step(x, *parts)], step, (x, *parts)


@pytest.mark.parametrize("first", one_of(6, range(0, 24, 4)))
def test_values_have_the_bits_of_the_program_as_written(first: int) -> None:
    operations = lines = repeated = 0
    for seed in range(first, first + 4):
        dtype = ("float64", "float32")[seed % 2]
        expected, *_ = results(tf.function, seed, dtype, ((2,), (0, 1, 2)))
        found, step, given = results(wh.function, seed, dtype, ((2,), (0, 1, 2)))
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected], f"seed {seed}"
        program = step._step(given, {}).compiled.ranks[0]
        graphs = (program, *program.functions.values())
        made = [node for graph in graphs for node in graph.nodes if node.op == ELEMENTWISE]
        operations += len(made)
        lines += sum(len(node.attrs["program"]) for node in made)
        repeated += sum(" r" in line or " c" in line for node in made for line in node.attrs["program"])
    assert operations > 10 and lines > 3 * operations and repeated > 8


@pytest.mark.parametrize("first", one_of(6, range(100, 124, 4)))
def test_sums_are_those_of_the_program_as_written_but_for_rounding(first: int) -> None:
    sums = 0
    for seed in range(first, first + 4):
        over = ((0, 1), (0, 1), (2,))
        expected, *_ = results(tf.function, seed, "float64", over)
        found, step, given = results(wh.function, seed, "float64", over)
        for one, other in zip(found, expected):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10, err_msg=f"seed {seed}")
        program = step._step(given, {}).compiled.ranks[0]
        sums += sum(node.attrs["S"] for node in program.nodes if node.op == ELEMENTWISE)
    assert sums > 0
