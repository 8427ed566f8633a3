"""Modules of other packages that are loaded otherwise than they are by themselves."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Callable, Collection, Sequence
from types import ModuleType

Load = Callable[[ModuleType], None]


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: has what other finders find be loaded by ``load(how it is loaded, module)``.

    Attributes:
      names: of the modules.
    """

    def __init__(self, names: Collection[str], load: Callable[[Load, ModuleType], None]) -> None:
        self.names, self._load = tuple(names), load
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See importlib: the specification of one of the modules, which is loaded so; else None."""
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
        spec.loader.exec_module = lambda module: self._load(load, module)  # type: ignore[method-assign]
        return spec
