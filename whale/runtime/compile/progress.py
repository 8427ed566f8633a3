"""Logs progress lines while an operation takes longer than a user would expect."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from whale.log import log

FIRST_S, LATER_S = 2.0, 10.0


@contextmanager
def log_while_running(what: str) -> Iterator[None]:
    """Logs that ``what`` is still running after two seconds inside, and every ten seconds from then on."""
    over, start_s = threading.Event(), time.monotonic()

    def tell() -> None:
        wait_s = FIRST_S
        while not over.wait(wait_s):
            log.info(f"{what}: {time.monotonic() - start_s:.0f} s")
            wait_s = LATER_S

    thread = threading.Thread(target=tell, name="whale progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
