"""Switches Python's cyclic garbage collector off during passes over large graphs.

Such passes make many small objects and no cycles; the collector would only walk them again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suspend_garbage_collection() -> Iterator[None]:
    """Switches the cyclic collector off inside the block, and restores it afterwards.

    What was made inside is of the oldest generation then, as if it had lived through collections. Else the first ones
    afterwards would walk all of it: a second for the graph of a step of 12,000 operations.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what a script froze stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
