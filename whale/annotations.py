"""The scopes that a user puts around model code."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any


class replica(ContextDecorator):
    """``with wh.replica():`` (or ``@wh.replica()``): the batch is divided over the devices.

    Every device has all variables of the code inside, and computes its share of the batch; gradients are summed. The
    shares are as equal as possible, or those of ``replica.shares``.

    Args:
      devices: ranks that take part; None means all.

    Raises:
      ClusterError: entered before ``wh.init``.
      PlanError: entered with devices that are not all ranks.
    """

    def __init__(self, devices: Iterable[int] | None = None) -> None:
        self.devices = None if devices is None else tuple(devices)
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> replica:
        from whale.runtime.scopes import entered

        scope = entered("replica", self.devices)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)
