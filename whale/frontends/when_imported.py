"""Changes other packages' modules once they are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import ModuleType

from whale.imports import Finder, Load


def change_when_imported(names: Collection[str], change: Callable[[ModuleType], None]) -> None:
    """Changes modules of these names: now those that are loaded, others when they are. Safe to repeat."""

    def load_and_change(load: Load, module: ModuleType) -> None:
        load(module)
        change(module)

    for name in names:
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            change(module)
    if not any(isinstance(finder, Finder) and finder.names == tuple(names) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(names, load_and_change))
