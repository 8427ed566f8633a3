"""Runs programs of one device on random values, to measure how long whole steps, operations and kernels take."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from whale.distributed.gpus import await_gpus
from whale.errors import ProgramError
from whale.ir.ops import ROW_LOOKUPS, VIEWS
from whale.ir.program import Program, Ref
from whale.ir.values import TensorType, find_numpy_dtype, require_static_shape
from whale.kernels.nn import CROSS_ENTROPY
from whale.runtime.compile.function_calls import make_function_call
from whale.runtime.compile.tensorflow_functions import load_ops, lower_to_function

ROUNDS = 5
LEAST_S = 1e-3  # seconds of a round, which repeats short calls
OF_CLASSES = frozenset(("SparseSoftmaxCrossEntropyWithLogits", CROSS_ENTROPY))
# Ops that indices pass through on their way to a table (Keras adds the number of rows to negative indices).
_HANDS_ON = VIEWS | frozenset("Cast Slice StridedSlice Split SplitV Unpack SelectV2 AddV2".split())
_tags = itertools.count()


def draw_value(t: TensorType, generator: np.random.Generator) -> tf.Tensor:
    """Returns a tensor of random values for a type; unknown sizes become 0."""
    shape = tuple(d or 0 for d in t.shape or ())
    if t.dtype == "bool":
        return tf.constant(generator.random(shape) > 0.5)
    scale = 0.05 if t.dtype.startswith(("float", "bfloat", "complex")) else 2.0
    return tf.constant((scale * generator.random(shape)).astype(find_numpy_dtype(t.dtype)))


def compile_program_alone(
    program: Program, values: Sequence[Any], outputs: int = 0, threads: int = 0
) -> Callable[[], Any]:
    """Returns a callable that runs a program of one device on the same arguments each time.

    Args:
      values: the program's arguments, then the handles of its variables.
      outputs: number of results.
      threads: number of threads on cores that other ranks lend; 0: TensorFlow's own threads.
    """
    load_ops([program])
    lowered = lower_to_function([program], f"whale_measured_{next(_tags)}", threads=(threads,))
    context = tf_context.context()
    context.ensure_initialized()
    for definition in lowered.definitions:
        context.add_function_def(definition)
    call, arguments = make_function_call(lowered.name, outputs), list(values)
    return lambda: call(arguments)


def measure_call_s(call: Callable[[], Any]) -> float:
    """Returns the seconds of a call, as the median of several rounds of repeated calls."""
    start_s = time.perf_counter()
    call()
    await_gpus()
    once_s = time.perf_counter() - start_s
    repeats = max(1, min(200, int(LEAST_S / max(once_s, 1e-6))))
    rounds = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        for _ in range(repeats):
            call()
        await_gpus()
        rounds.append((time.perf_counter() - start_s) / repeats)
    return statistics.median(rounds)


def compile_whole_step(program: Program) -> Callable[[], Any]:
    """Returns a callable that runs a program of one device on random values and new variables.

    Raises:
      ProgramError: as ``draw_operands``.
    """
    values, variables = draw_operands(program)
    run = compile_program_alone(program, [*values, *(v.handle for v in variables)], len(program.outputs))

    def call(variables: Sequence[tf.Variable] = variables) -> Any:  # which keeps them alive
        return run()

    return call


def draw_operands(program: Program) -> tuple[list[tf.Tensor], list[tf.Variable]]:
    """Returns random arguments for a program of one device, and new variables with random values.

    Raises:
      ProgramError: the program takes an argument that is not a numeric tensor with a static shape.
    """
    generator = np.random.default_rng(0)
    values: list[tf.Tensor] = []
    for name in program.inputs:
        (t,) = program.by_name[name].outputs
        if t.dtype in ("variant", "string", "resource") or not t.is_static:
            raise ProgramError(
                "the step takes an argument for which no random values can be made",
                given=f"{name}: {t}",
                expected="tensors of numbers with static shapes",
                action="leave the script out: `whale profile` without it measures the machine",
            )
        if t.dtype.startswith(("int", "uint")):
            bound = _find_bound(program, Ref(name))
            values.append(
                tf.constant(generator.integers(bound, size=require_static_shape(t)).astype(find_numpy_dtype(t.dtype)))
            )
        else:
            values.append(draw_value(t, generator))
    return values, [tf.Variable(draw_value(v.type, generator)) for v in program.variables]


def _find_bound(program: Program, ref: Ref) -> int:
    """Returns the upper bound for random values of an integer argument: the rows of the tables that it indexes, or the
    number of classes of a loss; else 2.
    """
    found, waiting, seen = [], [ref], {ref}
    while waiting:
        one = waiting.pop()
        for node, place in program.consumers.get(one, ()):
            first = program.find_type(node.inputs[0])
            if node.op in ROW_LOOKUPS and place == 1:
                variable = program.variable_of.get(node.inputs[0].node)
                found.append((variable.type if variable else first).shape)
            elif node.op in OF_CLASSES and place == 1:
                found.append((first.shape or ())[-1:])
            elif node.op in _HANDS_ON:
                following = [Ref(node.name, k) for k in range(len(node.outputs))]
                waiting += [r for r in following if r not in seen]
                seen.update(following)
    return min((shape[0] or 2 for shape in found if shape), default=2)
