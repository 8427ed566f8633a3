"""Switches Python's cyclic garbage collector off during compiler passes over large graphs.

Passes allocate many small objects and create no reference cycles, so every collection during a pass would scan the
whole graph and free nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_script_has_frozen = False  # True once the script was seen to have called gc.freeze(); counting frozen objects is slow


@contextmanager
def suspend_garbage_collection() -> Iterator[None]:
    """Switches the cyclic garbage collector off inside the ``with`` block, and back on afterwards if it was on before.

    On exit, objects made inside the block are moved to the collector's oldest generation. Otherwise the next few young
    collections would scan all of them: about a second for the graph of a training step with 12,000 operations.
    """
    global _script_has_frozen
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _script_has_frozen = _script_has_frozen or gc.get_freeze_count() > 0
            if not _script_has_frozen:  # unfreeze() would also release what the script has frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
