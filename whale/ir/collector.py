"""Switches Python's cyclic garbage collector off during passes over large graphs.

Such passes make many small objects and no cycles; the collector would only walk them again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_script_has_frozen = False  # objects; found out once, as counting them goes through all


@contextmanager
def suspend_garbage_collection() -> Iterator[None]:
    """Switches the cyclic collector off inside the block, and restores it afterwards.

    What was made inside is of the oldest generation then, as if it had lived through collections. Else the first ones
    afterwards would walk all of it: a second for the graph of a step of 12,000 operations.
    """
    global _script_has_frozen
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _script_has_frozen = _script_has_frozen or gc.get_freeze_count() > 0
            if not _script_has_frozen:  # else they would be thawed
                gc.freeze()
                gc.unfreeze()
            gc.enable()
