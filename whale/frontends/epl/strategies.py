"""Implements ``epl.replicate`` and ``epl.split``; the operations built inside of one such scope form a task graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from whale.capture.attrs import SCOPE_ATTR
from whale.errors import PlanError
from whale.frontends.epl.known import require_env

PREFIX = "epl_"  # operations carry the scope attribute "epl_<number of their task graph>"


class WrongScopeError(PlanError, RuntimeError):
    """Raised if strategies are nested in a wrong way. It is also a RuntimeError, which EPL raises and scripts may
    catch.
    """


class Strategy:
    """Represents how the part of a model that is built inside of ``with strategy:`` is distributed.

    Args:
      device_count: number of devices of one replica of this part; None: not specified.
      name: a label for messages.
    """

    kind = ""

    def __init__(self, device_count: int | None = None, name: str | None = None) -> None:
        if device_count is not None and (not isinstance(device_count, int) or device_count < 1):
            raise PlanError(
                f"epl.{self.kind} cannot have this number of devices",
                given=f"device_count={device_count!r}",
                expected="a positive integer, or None",
                action="pass a positive device_count, or leave it out",
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
    """Represents data parallelism: each replica computes its own rows of the batch."""

    kind = "replicate"


class Split(Strategy):
    """Represents tensor parallelism: weights and activations are split over the devices."""

    kind = "split"


def replicate(device_count: int | None = None, name: str | None = None) -> Replicate:
    """Returns a scope for data parallelism: ``with epl.replicate(1):``.

    If a model has one such scope, the batch is divided over all devices. Several scopes are the stages of a pipeline,
    in the order in which they are opened, and the whole pipeline is replicated as often as the devices allow.

    Args:
      device_count: number of devices that share the rows of one replica; None: 1.
      name: a label for messages.
    """
    return Replicate(device_count, name)


def split(device_count: int | None = None, name: str | None = None) -> Split:
    """Returns a scope for tensor parallelism: ``with epl.split():``.

    Args:
      device_count: number of devices over which tensors are split; None: all.
      name: a label for messages.
    """
    return Split(device_count, name)


class StrategyContext:
    """Holds the strategies that are open at the present point of the script.

    Attributes:
      state: the open strategies, the innermost last.
      default_strategy: the strategy of code outside of all scopes; None if the script has set none.
    """

    def __init__(self) -> None:
        self.state: list[Strategy] = []
        self.default_strategy: Strategy | None = None
        self._default_scope: AbstractContextManager[None] | None = None

    @property
    def replicate_strategy(self) -> Strategy | None:
        """Returns the outermost open Replicate, or None."""
        return next((s for s in self.state if isinstance(s, Replicate)), None)

    @property
    def split_strategy(self) -> Strategy | None:
        """Returns the outermost open Split, or None."""
        return next((s for s in self.state if isinstance(s, Split)), None)

    def __bool__(self) -> bool:
        return bool(self.state)

    @contextmanager
    def enter(self, strategy: Strategy) -> Iterator[None]:
        """Adds a task graph for ``strategy``, and marks what is built inside of the context as part of it.

        The default strategy does not apply inside of the context.

        Raises:
          PlanError: the strategies are nested in a wrong way, one is entered twice, or ``auto.auto_parallel`` is set.
        """
        known = require_env(f"epl.{strategy.kind}()")
        if known.config.auto.auto_parallel:
            raise _make_auto_error(strategy)
        open_now = [s for s in self.state if not s.is_default]
        if open_now and (isinstance(open_now[-1], Split) or isinstance(strategy, Replicate)):
            raise WrongScopeError(
                "these strategies cannot be nested",
                given=f"{strategy!r} inside of {open_now[-1]!r}",
                expected="scopes one after the other, or epl.split inside of epl.replicate",
                action="end the outer scope before the inner one begins",
            )
        if any(s is strategy for s in open_now):
            raise WrongScopeError(
                "a strategy is entered again inside of itself",
                given=repr(strategy),
                expected="one `with` block per strategy object at a time",
                action="call epl.replicate() or epl.split() for a new strategy",
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
        """Starts a new task graph with this strategy for code outside of all scopes.

        Raises:
          PlanError: the strategy is not ``epl.replicate(...)``, or ``auto.auto_parallel`` is set.
        """
        known = require_env("epl.set_default_strategy()")
        if not isinstance(strategy, Replicate):
            raise PlanError(
                "epl.set_default_strategy does not accept this strategy",
                given=repr(strategy),
                expected="epl.replicate(...)",
                action="put the code that is to be split into `with epl.split():`",
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
        """Ends the default strategy: code outside of all scopes belongs to no task graph from now on."""
        if self._default_scope is not None:
            self._default_scope.__exit__(None, None, None)
            self._default_scope = None
        if self.default_strategy is not None:
            self.default_strategy.is_default = False
            self.state[:] = [s for s in self.state if s is not self.default_strategy]
            self.default_strategy = None


@contextmanager
def mark_graph(mark: str | None) -> Iterator[None]:
    """Marks operations built inside of the context, in the default graph, as part of a task graph.

    Args:
      mark: ``epl_<number of the task graph>``; None: the operations belong to no task graph.
    """
    graph = tf.compat.v1.get_default_graph()
    value = None if mark is None else attr_value_pb2.AttrValue(s=mark.encode())
    # TensorFlow fails if an attribute is to be removed that is not set.
    changes = {SCOPE_ATTR: value} if value is not None or SCOPE_ATTR in graph._attr_scope_map else {}
    with graph._attr_scope(changes):
        yield


def _make_auto_error(strategy: Strategy) -> PlanError:
    return PlanError(
        "auto.auto_parallel cannot be combined with epl.replicate and epl.split",
        given=f"auto.auto_parallel=True and {strategy!r}",
        expected="one of the two",
        action="remove the setting auto.auto_parallel, or all epl.replicate and epl.split scopes",
    )
