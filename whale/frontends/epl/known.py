"""Holds the only ``Env`` of the process, so that modules of EPL can read it without importing each other."""

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

    Args:
      what: the call that needs it, for the error's text.

    Raises:
      ClusterError: ``epl.init`` was not called.
    """
    if holder.env is None or not holder.env.is_ready:
        raise ClusterError(
            f"{what} is used before epl.init()",
            given="no call of epl.init() so far",
            expected=f"epl.init() before {what}",
            action="call epl.init() at the start of the script",
        )
    return holder.env
