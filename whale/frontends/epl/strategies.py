"""Implements ``epl.replicate`` and ``epl.split``: what is built inside is a task graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from whale.capture.attrs import SCOPE_ATTR
from whale.errors import PlanError
from whale.frontends.epl.known import require_env

PREFIX = "epl_"  # of the mark that operations carry: the task graph's number follows


class WrongScopeError(PlanError, RuntimeError):
    """The error for invalid nesting of strategies; scripts for the library expect a RuntimeError."""


class Strategy:
    """The strategy of a part of a model; a context manager around its code.

    Args:
      device_count: devices for one replica of it.
      name: what a person calls it.
    """

    kind = ""

    def __init__(self, device_count: int | None = None, name: str | None = None) -> None:
        if device_count is not None and (not isinstance(device_count, int) or device_count < 1):
            raise PlanError(
                "a task graph cannot have so many devices",
                given=f"device_count={device_count!r}",
                expected="a positive integer, or None",
                action="correct device_count",
            )
        self.device_count = device_count
        self.name = name or type(self).__name__
        self.index: int | None = None
        self.is_default = False
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Strategy:
        scope = require_env(f"epl.{self.kind}()").strategy_context.enter(self)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)

    def __repr__(self) -> str:
        return f"{self.name}(device_count={self.device_count}, index={self.index})"


class Replicate(Strategy):
    """The strategy that divides the batch: each replica computes rows of its own."""

    kind = "replicate"


class Split(Strategy):
    """The strategy that divides tensors over the devices."""

    kind = "split"


def replicate(device_count: int | None = None, name: str | None = None) -> Replicate:
    """Opens a task graph whose replicas compute rows of the batch: ``with epl.replicate(1):``.

    With a single one, the batch is divided over all devices. Several are stages of a pipeline, in this order; the whole
    pipeline is replicated as often as the devices allow.

    Args:
      device_count: devices that share the rows of one replica; None: 1.
      name: a label for people.
    """
    return Replicate(device_count, name)


def split(device_count: int | None = None, name: str | None = None) -> Split:
    """Opens a task graph whose tensors are divided over devices: ``with epl.split():``.

    Args:
      device_count: how many; None: all.
      name: a label for people.
    """
    return Split(device_count, name)


class StrategyContext:
    """The open strategies: ``state``, the innermost last, and the default strategy."""

    def __init__(self) -> None:
        self.state: list[Strategy] = []
        self.default_strategy: Strategy | None = None
        self._default_scope: AbstractContextManager[None] | None = None

    @property
    def replicate_strategy(self) -> Strategy | None:
        """Returns the open replicate strategy."""
        return next((s for s in self.state if isinstance(s, Replicate)), None)

    @property
    def split_strategy(self) -> Strategy | None:
        """Returns the open split strategy."""
        return next((s for s in self.state if isinstance(s, Split)), None)

    def __bool__(self) -> bool:
        return bool(self.state)

    @contextmanager
    def enter(self, strategy: Strategy) -> Iterator[None]:
        """Opens a new task graph; the default strategy is suspended until its end."""
        known = require_env(f"epl.{strategy.kind}()")
        if known.config.auto.auto_parallel:
            raise _make_auto_error(strategy)
        open_now = [s for s in self.state if not s.is_default]
        if open_now and (isinstance(open_now[-1], Split) or isinstance(strategy, Replicate)):
            raise WrongScopeError(
                "a strategy inside another one",
                given=f"{strategy!r} in {open_now[-1]!r}",
                expected="strategies beside each other, or a split in a replicate",
                action="end the outer scope before",
            )
        if any(s is strategy for s in open_now):
            raise WrongScopeError(
                "a strategy that is entered twice",
                given=repr(strategy),
                expected="one scope",
                action="call epl.replicate or epl.split again",
            )
        task_graph = known.default_graph.add_task_graph(strategy, open_now[-1] if open_now else None)
        before = list(self.state)
        self.state[:] = [*open_now, strategy]
        try:
            with mark_graph(PREFIX + str(task_graph.index)):
                yield
        finally:
            self.state[:] = before

    def set_default(self, strategy: Any) -> None:
        """Starts a new task graph with this strategy for code outside of other scopes.

        Raises:
          PlanError: the strategy is not a replicate; or task graphs are chosen automatically.
        """
        known = require_env("epl.set_default_strategy()")
        if not isinstance(strategy, Replicate):
            raise PlanError(
                "code outside of scopes cannot have this strategy",
                given=repr(strategy),
                expected="epl.replicate(...)",
                action="enter epl.split where the code is that it is for",
            )
        if known.config.auto.auto_parallel:
            raise _make_auto_error(strategy)
        self.end_default()
        strategy.is_default = True
        self.default_strategy = strategy
        self.state.append(strategy)
        if not tf.executing_eagerly():
            task_graph = known.default_graph.add_task_graph(strategy, None)
            self._default_scope = mark_graph(PREFIX + str(task_graph.index))
            self._default_scope.__enter__()

    def end_default(self) -> None:
        """Ends the default strategy: operations built from now on have none."""
        if self._default_scope is not None:
            self._default_scope.__exit__(None, None, None)
            self._default_scope = None
        if self.default_strategy is not None:
            self.default_strategy.is_default = False
            self.state[:] = [s for s in self.state if s is not self.default_strategy]
            self.default_strategy = None


@contextmanager
def mark_graph(mark: str | None) -> Iterator[None]:
    """Marks operations built inside, in the default graph, as part of a task graph; None: of none."""
    graph = tf.compat.v1.get_default_graph()
    value = None if mark is None else attr_value_pb2.AttrValue(s=mark.encode())
    # TensorFlow takes away only what is there.
    changes = {SCOPE_ATTR: value} if value is not None or SCOPE_ATTR in graph._attr_scope_map else {}
    with graph._attr_scope(changes):
        yield


def _make_auto_error(strategy: Strategy) -> PlanError:
    return PlanError(
        "the script has a task graph, although task graphs are chosen automatically",
        given=f"auto.auto_parallel with {strategy!r}",
        expected="one of the two",
        action="leave auto.auto_parallel out, or the strategies",
    )
