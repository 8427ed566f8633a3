"""Sets up the logger ``whale``, which adds the rank to each record.

Lines go to stderr as ``whale: text``, from the level of ``WHALE_DEBUG_LOG`` (key ``debug.log``) on. They are not
propagated to the root logger, which would print them again; ``logging.getLogger("whale").propagate = True`` does that.

``log_while_running`` logs that an operation is still running, if it takes longer than a user would expect.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from whale.errors import ClusterError
from whale.started import process_place

LEVELS = ("debug", "info", "warning", "error")
LEVEL_VARIABLE = "WHALE_DEBUG_LOG"
log = logging.getLogger("whale")
FIRST_S, _LATER_S = 2.0, 10.0


class _ToStderr(logging.Handler):
    """Writes records to the ``sys.stderr`` of the moment, which tests and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        sys.stderr.write(f"whale: {self.format(record)}\n")
        sys.stderr.flush()


def _with_rank(record: logging.LogRecord) -> bool:
    """Adds ``rank`` to a record, for users' own handlers and formats; None if the launcher's variables contradict
    each other.
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


@contextmanager
def log_while_running(what: str) -> Iterator[None]:
    """Logs that ``what`` is still running after two seconds inside, and then every ten seconds."""
    over, start_s = threading.Event(), time.monotonic()

    def tell() -> None:
        wait_s = FIRST_S
        while not over.wait(wait_s):
            log.info(f"{what}: {time.monotonic() - start_s:.0f} s")
            wait_s = _LATER_S

    thread = threading.Thread(target=tell, name="whale progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
