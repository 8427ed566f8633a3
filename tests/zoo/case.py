"""What every program of the zoo looks like to the harness that runs it.

A `Case` builds a `Program`: a training step with its variables and its deterministic batches. What wraps the step
(`tf.function` for the reference) comes in through `Setting`, so the same source is the reference and the
distributed run, and no file of the zoo knows the library under test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

BATCH = 8
SEED = 7

Batch = Mapping[str, np.ndarray]

FLAVOURS = ("keras3", "keras2")


def flavour() -> str:
    """`keras3` or `keras2`: what `tf.keras` is in this process."""
    # Only Keras 3 has backend-neutral ops; not every release of tf.keras says its version.
    return "keras3" if hasattr(tf.keras, "ops") else "keras2"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a case is built.

    Attributes:
        dtype: `float32` or `float64`: of parameters, inputs and loss.
        optimizer: a name that `optimizers.py` knows.
        function: wraps a TF2 step, as `tf.function` does.
        session: makes a TF1 session from a graph, as `tf.compat.v1.Session` does.
        scope: entered around the building of the model and around the step's body.
        gradients: whether the step also returns its dense gradients.
    """

    dtype: str = "float32"
    optimizer: str = "sgd"
    function: Callable[[Callable[..., Any]], Any] = tf.function
    session: Callable[[tf.Graph], Any] = lambda graph: tf.compat.v1.Session(graph=graph)
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    gradients: bool = True


@dataclass(frozen=True, slots=True)
class Program:
    """A built program.

    Attributes:
        step: for TF2 the wrapped step; for TF1 a function of the same arguments that runs the session.
        inputs: names of the batch's arrays in the order of the step's arguments.
        make_batch: a batch from a random generator.
        read_variables: name -> value of every variable (model, optimizer slots, counters), in creation order.
        learning_rate: of the optimizer; part of the error's denominator.
        plan: plan(batch) of the library under test; None in a plain run.
        close: releases the session.
    """

    step: Callable[..., Mapping[str, Any]]
    inputs: tuple[str, ...]
    make_batch: Callable[[np.random.Generator], dict[str, np.ndarray]]
    read_variables: Callable[[], dict[str, np.ndarray]]
    learning_rate: float
    plan: Callable[[Batch], Any]
    close: Callable[[], None] = lambda: None

    def run_step(self, batch: Batch) -> dict[str, np.ndarray]:
        """One training step on a global batch.

        Returns:
            `loss` (scalar); `gradient/<name>` (dense gradients); `rows/<name>` (one value per row of the batch, in
            its order); other scalars are metrics.
        """
        result = self.step(*(batch[name] for name in self.inputs))
        return {name: np.asarray(value) for name, value in result.items()}

    def variables(self) -> dict[str, np.ndarray]:
        """Global values of all variables, in creation order; each name starts with its number, so that none repeats."""
        return self.read_variables()

    def batches(self, count: int) -> list[dict[str, np.ndarray]]:
        """The first `count` batches: always the same ones."""
        generator = np.random.default_rng(SEED)
        return [self.make_batch(generator) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Case:
    """One program of the zoo.

    Attributes:
        name: unique.
        build: makes the program; called with random seeds already set.
        optimizers: those that the case is run with.
        dtypes: those that the case is run with.
        flavours: which Keras the process may have.
        products: the program has matrix products or convolutions over the batch, so a plan must split them.
        rows_commute: permuting the rows of a batch does not change the mathematical result (false for dropout).
        row_inputs: inputs whose dimension 0 is the batch.
        steps: how many steps a run takes.
        least_split_fraction: share of the FLOPs in products that a plan with several ranks must divide; less than the
            usual 0.9 only where the case says why.
        heavy: takes several seconds to trace; a sample of the matrix takes few of its runs.
    """

    name: str
    build: Callable[[Setting], Program]
    optimizers: tuple[str, ...] = ("sgd", "adam")
    dtypes: tuple[str, ...] = ("float32", "float64")
    flavours: tuple[str, ...] = FLAVOURS
    products: bool = True
    rows_commute: bool = True
    row_inputs: tuple[str, ...] = ("x", "y")
    steps: int = 4
    least_split_fraction: float = 0.9
    heavy: bool = False


def build(case: Case, setting: Setting) -> Program:
    """Builds a case from a clean Keras state with fixed seeds."""
    tf.keras.backend.clear_session()
    tf.keras.backend.set_floatx(setting.dtype)
    # Keras 3 remembers the policy of the first layer made in the process; floatx alone would not change it.
    tf.keras.mixed_precision.set_global_policy(setting.dtype)
    tf.keras.utils.set_random_seed(SEED)
    return case.build(setting)


def permuted(case: Case, batch: Batch, order: np.ndarray) -> dict[str, np.ndarray]:
    """The batch with its rows in another order."""
    return {name: value[order] if name in case.row_inputs else value for name, value in batch.items()}


def numbered(variables: Sequence[Any], values: Sequence[Any]) -> dict[str, np.ndarray]:
    """Values by a name that starts with the variable's position (Keras 2 repeats names)."""
    return {
        f"{index:03d} {getattr(variable, 'path', variable.name)}": np.asarray(value)
        for index, (variable, value) in enumerate(zip(variables, values, strict=True))
    }


def function_program(
    setting: Setting,
    step: Callable[..., Mapping[str, Any]],
    inputs: Sequence[str],
    make_batch: Callable[[np.random.Generator], dict[str, np.ndarray]],
    variables: Callable[[], Sequence[Any]],
    learning_rate: float,
) -> Program:
    """A TF2 program from an unwrapped step; `variables` is asked late: a step may create some at its first call."""
    function = setting.function(step)

    def read() -> dict[str, np.ndarray]:
        found = variables()
        return numbered(found, [variable.numpy() for variable in found])

    return Program(
        step=function,
        inputs=tuple(inputs),
        make_batch=make_batch,
        read_variables=read,
        learning_rate=learning_rate,
        plan=lambda batch: function.plan(*(batch[name] for name in inputs)),
    )


def graph_program(
    setting: Setting,
    graph: tf.Graph,
    fetches: Mapping[str, tf.Tensor],
    train: tf.Operation,
    placeholders: Mapping[str, tf.Tensor],
    make_batch: Callable[[np.random.Generator], dict[str, np.ndarray]],
    learning_rate: float,
) -> Program:
    """A TF1 program: starts a session and runs the initialisers."""
    with graph.as_default():
        variables = tf.compat.v1.global_variables()
        initialise = tf.compat.v1.global_variables_initializer()
    session = setting.session(graph)
    session.run(initialise)
    wanted = {"values": dict(fetches), "train": train}

    def feeds(values: Sequence[np.ndarray]) -> dict[tf.Tensor, np.ndarray]:
        return dict(zip(placeholders.values(), values, strict=True))

    return Program(
        step=lambda *values: session.run(wanted, feeds(values))["values"],
        inputs=tuple(placeholders),
        make_batch=make_batch,
        read_variables=lambda: numbered(variables, session.run(variables)),
        learning_rate=learning_rate,
        plan=lambda batch: session.plan(wanted, feeds([batch[name] for name in placeholders])),
        close=session.close,
    )
