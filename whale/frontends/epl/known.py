"""Holds the one ``Env`` of the process, for all modules that ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whale.errors import ClusterError


@dataclass
class _Holder:
    env: Any = None


holder = _Holder()


def require_env(what: str) -> Any:
    """Returns the ``Env`` of the process.

    Raises:
      ClusterError: ``epl.init`` was not called; names ``what``.
    """
    if holder.env is None or not holder.env.is_ready:
        raise ClusterError(
            f"{what} needs the library to be started",
            given="no epl.init() so far",
            expected="epl.init() before it",
            action="call epl.init() at the start of the script",
        )
    return holder.env
