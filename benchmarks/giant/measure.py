"""One line of the table: a program over ranks of this process, its bytes, and how far it is from one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

import whale as wh
from whale.errors import WhaleError
from whale.runtime.context import require_current

# Exchanges that move tensors of the program; comparisons of fingerprints and inputs are none.
MOVING = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Broadcast", "Send")
STEPS = 2
RANKS = 4


@dataclass(frozen=True)
class Scopes:
    """The scopes that a program is written with; on one device they do nothing."""

    replica: Callable[..., AbstractContextManager[Any]] = nullcontext
    split: Callable[..., AbstractContextManager[Any]] = nullcontext
    stage: Callable[..., AbstractContextManager[Any]] = nullcontext
    pipeline: Callable[..., AbstractContextManager[Any]] = nullcontext
    none: Callable[..., AbstractContextManager[Any]] = nullcontext
    tape: Callable[[tf.GradientTape], Any] = lambda tape: tape  # Horovod's sums gradients over its ranks


def _nothing(*args: Any, **more: Any) -> AbstractContextManager[Any]:
    return nullcontext()


ALONE = Scopes(_nothing, _nothing, _nothing, _nothing)
SPREAD = Scopes(wh.replica, wh.split, wh.stage, wh.pipeline)


class Model(Protocol):
    """A program of a line: made anew for one device and for the ranks, of the same values."""

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """What it trains."""

    def step(self, *batch: Any) -> Any:
        """Trains on a batch; its loss."""

    def batch(self, number: int) -> tuple[Any, ...]:
        """The operands of a step."""


@dataclass(frozen=True)
class Line:
    """What is measured.

    Attributes:
      name: of the row.
      make: the program, from its scopes and the type of its numbers.
      wanted: bytes that a step has to move, all ranks together, in float32.
      small: the program in a size that float64 is compared in; None: the same.
    """

    name: str
    make: Callable[[Scopes, Any], Model]
    wanted: int
    ranks: int = RANKS
    config: Mapping[str, Any] = field(default_factory=dict)
    small: Callable[[Scopes, Any], Model] | None = None


@dataclass(frozen=True)
class Found:
    """What a line came to; ``refused`` says why nothing was measured."""

    name: str
    moved: int = 0
    wanted: int = 0
    difference: float = 0.0
    refused: str = ""

    def text(self) -> str:
        """The row of the table."""
        if self.refused:
            return f"| {self.name} | refused: {self.refused} | {mib(self.wanted)} | | |"
        ratio = self.moved / self.wanted if self.wanted else float("inf")
        return f"| {self.name} | {mib(self.moved)} | {mib(self.wanted)} | {ratio:.2f} | {self.difference:.0e} |"


def mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


@contextmanager
def ranks(line: Line) -> Iterator[None]:
    wh.init({"communication.in_process_ranks": line.ranks, **line.config})
    try:
        yield
    finally:
        wh.shutdown()


def measure(line: Line) -> Found:
    """Bytes of the second step in float32, and the difference from one device in float64."""
    try:
        with ranks(line):
            model = line.make(SPREAD, tf.float32)
            moved = moved_by_a_step(wh.function(model.step), model)
        return Found(line.name, moved, line.wanted, difference(line))
    except WhaleError as error:
        return Found(line.name, wanted=line.wanted, refused=str(error).splitlines()[0])


def moved_by_a_step(step: Callable[..., Any], model: Model) -> int:
    """Bytes that all ranks together move in the second step; the first compiles, and sends the variables."""
    step(*model.batch(0))
    before = counted()
    step(*model.batch(1))
    return counted() - before


def counted() -> int:
    """Bytes that all ranks together have moved so far."""
    return sum(sent_by_ranks())


def sent_by_ranks() -> list[int]:
    """Bytes that each rank has sent so far."""
    return [
        sum(c.logical_bytes for c in comm.counters() if c.kind in MOVING and "whale/check" not in c.key)
        for comm in require_current("the measurement").comms
    ]


def difference(line: Line) -> float:
    """Largest difference in losses and weights after some steps, relative to the largest element, in float64."""
    make = line.small or line.make
    expected = _trained(make(ALONE, tf.float64), tf.function)
    with ranks(line):
        found = _trained(make(SPREAD, tf.float64), wh.function)
    worst = 0.0
    for one, other in zip(expected, found):
        worst = max(worst, float(np.max(np.abs(one - other)) / max(np.max(np.abs(one)), 1e-3)))
    return worst


def _trained(model: Model, function: Callable[..., Any]) -> list[np.ndarray]:
    step = function(model.step)
    losses = [np.asarray(step(*model.batch(i))) for i in range(STEPS)]
    return losses + [v.numpy() for v in model.variables]


def sgd(loss: tf.Tensor, tape: tf.GradientTape, variables: Sequence[tf.Variable], rate: float = 0.5) -> None:
    """Plain gradient descent; rows of tables are changed where they lie."""
    for v, slope in zip(variables, tape.gradient(loss, variables)):
        if isinstance(slope, tf.IndexedSlices):
            v.scatter_sub(tf.IndexedSlices(rate * slope.values, slope.indices))
        else:
            v.assign_sub(rate * slope)


def weight(seed: int, *shape: int, dtype: Any, scale: float = 0.1) -> tf.Variable:
    value = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
    return tf.Variable(tf.cast(value, dtype), name=f"w{seed}")
