"""Changes of other packages' modules, made once they are imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from types import ModuleType


def when_imported(names: Collection[str], change: Callable[[ModuleType], None]) -> None:
    """Has modules of these names changed: now those that are loaded, others when they are. Safe to repeat."""
    for name in names:
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            change(module)
    if not any(isinstance(finder, _Finder) and finder.names == tuple(names) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(tuple(names), change))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: has what other finders find changed once it is loaded."""

    def __init__(self, names: tuple[str, ...], change: Callable[[ModuleType], None]) -> None:
        self.names, self._change = names, change
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See importlib: the specification of the module, whose loading ends with the change; else None."""
        if fullname not in self.names or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
