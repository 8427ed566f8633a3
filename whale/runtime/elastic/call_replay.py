"""Records calls that communicate, so that the remaining ranks can repeat them after a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tensorflow as tf

from whale.capture.sharded import ShardedTensor
from whale.distributed.ranks import Ranks
from whale.errors import ClusterError
from whale.passes.analysis.batch import rows_of_ranks

# Attribute of a tensor that a rank has read while it was the only one: (weak reference to the iterator, number of the
# batch, number of the tensor in it), like ``ShardedTensor.source``, to cut rows if other ranks join.
ALONE = "_whale_source"

_T = TypeVar("_T")


@dataclass
class CallProgress:
    """Holds how far this rank has come in the script.

    Attributes:
      calls: number of calls that communicated, steps or not.
      steps: number of steps taken.
      results: flat results of the latest step.
      returned: result of the latest call that was not a step.
    """

    calls: int = 0
    steps: int = 0
    results: Any = None
    returned: Any = None


@dataclass
class ReplayStep:
    """Represents a call that took a step, recorded so that it can be repeated if the ranks go back to the state before
    it.

    Attributes:
      number: of the step: how many steps the rank had taken after it.
      take: the function that the call ran, which takes ``args`` and ``kwargs``.
      args: positional arguments of the call.
      kwargs: keyword arguments of the call.
      drawn: batches that the step read from iterators itself.
      rewritten: (variable, value) pairs that the script has assigned since the step, to be assigned again.
    """

    number: int
    take: Callable[[Any, Any], Any]
    args: Any
    kwargs: Any
    drawn: list[Any]
    rewritten: Sequence[tuple[tf.Variable, tf.Tensor]] = ()


@dataclass
class CallLog:
    """Records this rank's calls, with the data needed to repeat the latest one; used by ``Elastic.retry``.

    Attributes:
      again: takes a tensor or a part of a batch, and returns this rank's rows of it under the present division of rows;
        applied to arguments when a call is repeated.
      at: how far this rank has come.
      undone: a step of an earlier call whose effects were undone, so that it must be taken again first; None: there is
        none.
    """

    again: Callable[[Any], Any]
    at: CallProgress = field(default_factory=CallProgress)
    undone: ReplayStep | None = None
    _last: ReplayStep | None = None
    _steps_before: int = 0  # steps taken before the call that goes on
    _drawn: list[Any] = field(default_factory=list)  # batches of that call
    _drawn_again: int = 0

    def begin(self) -> None:
        """Prepares for a new call: forgets the batches that the previous one has read."""
        self._drawn, self._drawn_again, self._steps_before = [], 0, self.at.steps

    def prepare_again(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Prepares for repeating the call, and returns its arguments with rows cut for the present ranks."""
        self._drawn_again = 0
        return tf.nest.map_structure(self.again, (args, kwargs))  # type: ignore[no-any-return]

    def record_step(self, take: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> None:
        """Records that the present call has taken a step, which may have to be repeated."""
        self._last = ReplayStep(self.at.steps, take, args, kwargs, self._drawn)

    def draw_batch(self, draw: Callable[[], _T]) -> _T:
        """Returns a batch that a step reads from an iterator itself: the next one, or in a repeated call the same one
        again.
        """
        if self._drawn_again < len(self._drawn):
            known = self._drawn[self._drawn_again]
            self._drawn[self._drawn_again] = tf.nest.map_structure(self.again, known, expand_composites=True)
        else:
            self._drawn.append(draw())
        self._drawn_again += 1
        return self._drawn[self._drawn_again - 1]  # type: ignore[no-any-return]

    def go_back(self, steps: int, rewritten: Callable[[], Sequence[tuple[tf.Variable, tf.Tensor]]]) -> None:
        """Records that the ranks have gone back to the state after ``steps`` steps, at most one less than now; the
        caller has restored the variables already.

        Args:
          rewritten: returns the (variable, value) pairs that the script has assigned since the latest step.
        """
        if self.at.steps > steps:
            if self.undone is None and self.at.steps == self._steps_before:  # an earlier call took it
                assert self._last is not None
                self.undone, self.undone.rewritten = self._last, rewritten()
                self.at.calls -= 1
            self.at.steps = steps

    def redo(self) -> tuple[int, int]:
        """Repeats the step whose effects were undone, if there is one.

        Returns:
          the numbers of calls and of steps that this rank has completed by now.
        """
        step = self.undone
        if step is None:
            return self.at.calls, self.at.steps
        if self.at.steps < step.number:
            mine, self._drawn, self._drawn_again = self._drawn, step.drawn, 0
            try:
                step.args, step.kwargs = tf.nest.map_structure(self.again, (step.args, step.kwargs))
                step.take(step.args, step.kwargs)
            finally:
                step.drawn, self._drawn, self._drawn_again = self._drawn, mine, 0
        self.undone, self._last = None, step
        self.at.calls += 1
        self._steps_before = self.at.steps  # it is an earlier call's
        for variable, value in step.rewritten:
            variable.assign(value)
        return self.at.calls, self.at.steps


def wrap_in_scopes(scopes: list[Any], take: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wraps ``take`` so that it always runs in the scopes that are entered now, even if it is repeated from a place
    with others.

    Args:
      scopes: the run's list of entered scopes, changed in place during a call.
    """
    entered = list(scopes)

    def run_inside(args: Any, kwargs: Any) -> Any:
        around, scopes[:] = list(scopes), entered
        try:
            return take(args, kwargs)
        finally:
            scopes[:] = around

    return run_inside


def cut_rows_again(context: Ranks, value: Any) -> Any:
    """Returns this rank's rows of a batch under the present division; other values, and batches whose division is
    unchanged, are returned as they are.

    Raises:
      ClusterError: the script made the part itself, so that the other ranks' rows cannot be read again.
    """
    if type(value) is not ShardedTensor:
        reference, *place = getattr(value, ALONE, None) or (lambda: None, 0, 0)
        iterator = reference() if context.size > 1 else None
        return value if iterator is None else iterator.read_again(place[0])[place[1]]
    if len(value.sizes) == context.size:
        rows = sum(value.sizes)
        if value.source is None or value.sizes == rows_of_ranks(rows, context.size, context.config["batch.shares"]):
            return value
    if value.source is None:
        raise ClusterError(
            "rows of a batch are lost with the rank that had read them",
            given="a wh.ShardedTensor that was made by the script",
            expected="batches of a wh.shard dataset, or whole batches, which can be divided anew",
            action="pass batches of wh.shard(dataset) to the step",
        )
    iterator, position, leaf = value.source
    return iterator.read_again(position)[leaf]
