"""A line now and then while something takes longer than a user would expect."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_S, LATER_S = 2.0, 10.0


@contextmanager
def told(what: str, of: Callable[[], str] | None = None) -> Iterator[None]:
    """Says ``what`` goes on after two seconds inside, and every ten from then on.

    Args:
      of: what it is busy with at the moment.
    """
    over, start_s = threading.Event(), time.monotonic()

    def tell() -> None:
        wait_s = FIRST_S
        while not over.wait(wait_s):
            now = f", {of()}" if of is not None else ""
            sys.stderr.write(f"whale: {what}: {time.monotonic() - start_s:.0f} s{now}\n")
            wait_s = LATER_S

    thread = threading.Thread(target=tell, name="whale progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
