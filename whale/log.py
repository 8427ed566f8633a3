"""Sets up the logger ``whale``: what Whale has to say to whoever runs a script, each record with the rank.

Lines go to stderr as ``whale: text``, from the level that ``WHALE_DEBUG_LOG`` (key ``debug.log``) says. They are not
handed on to the root logger, which would print them once more; ``logging.getLogger("whale").propagate = True`` does.
"""

from __future__ import annotations

import logging
import os
import sys

from whale.errors import ClusterError
from whale.started import process_place

LEVELS = ("debug", "info", "warning", "error")
LEVEL_VARIABLE = "WHALE_DEBUG_LOG"

log = logging.getLogger("whale")


class _ToStderr(logging.Handler):
    """A handler that writes to what ``sys.stderr`` is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        sys.stderr.write(f"whale: {self.format(record)}\n")
        sys.stderr.flush()


def _with_rank(record: logging.LogRecord) -> bool:
    """Gives a record its ``rank``, for users' own handlers and formats; None where the launcher contradicts itself."""
    try:
        record.rank = process_place().rank
    except ClusterError:
        record.rank = None
    return True


def set_level(name: str) -> None:
    """Sets the level, one of `LEVELS`, below which records are dropped."""
    log.setLevel(name.upper())


if not log.handlers:
    log.addHandler(_ToStderr())
    log.addFilter(_with_rank)
    log.propagate = False
    # A wrong name is refused where the configuration is read.
    set_level(name if (name := os.environ.get(LEVEL_VARIABLE, "")) in LEVELS else "info")
