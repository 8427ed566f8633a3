"""Sets up the logger ``whale``, which adds the rank to each record.

Lines go to stderr as ``whale: text``, from the level of ``WHALE_DEBUG_LOG`` (key ``debug.log``) on. They are not
propagated to the root logger, which would print them again; ``logging.getLogger("whale").propagate = True`` does that.
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
    """A handler that writes to the present ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        sys.stderr.write(f"whale: {self.format(record)}\n")
        sys.stderr.flush()


def _with_rank(record: logging.LogRecord) -> bool:
    """Adds ``rank`` to a record, for users' own handlers and formats; None if the launcher's variables contradict each
    other.
    """
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
