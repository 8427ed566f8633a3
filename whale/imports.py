"""Hooks into Python's import: changes how modules of other packages load, and creates modules that re-export names."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

Load = Callable[[ModuleType], None]


class Finder(importlib.abc.MetaPathFinder):
    """Finds some modules as usual, but changes how they are executed.

    Args:
        names: full names of the modules.
        load: called as ``load(usual load function, module)`` in place of the module's usual execution.
    """

    def __init__(self, names: Collection[str], load: Callable[[Load, ModuleType], None]) -> None:
        self.names, self._load = tuple(names), load
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the usual spec of a module of ``names``, with its execution replaced; None for other modules (see
        importlib).
        """
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


class NamedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that only re-export names: the layout of another library's package, without a file for each module.

    The package itself is a module whose ``__path__`` is empty.

    Attributes:
        contents: full name of a module -> function that is called when it is imported and returns its names and values.
    """

    def __init__(self, contents: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
        self.contents = dict(contents)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module in ``contents``; None for other modules (see importlib)."""
        if fullname not in self.contents:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in self.contents)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module with its names (see importlib)."""
        module.__dict__.update(self.contents[module.__name__]())
        module.__dict__.setdefault("__all__", [name for name in vars(module) if not name.startswith("_")])


def names_of(modules: Mapping[str, str]) -> Callable[[], dict[str, Any]]:
    """Returns a function that imports names from modules and returns name -> value; for `NamedModules`.

    Args:
        modules: module -> its names, separated by spaces: ``names_of({"os.path": "join split"})``.
    """

    def take() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, wanted in modules.items():
            module = importlib.import_module(name)
            found |= {one: getattr(module, one) for one in wanted.split()}
        return found

    return take


def change_when_imported(names: Collection[str], change: Callable[[ModuleType], None]) -> None:
    """Calls ``change`` on modules of these names: at once if they are loaded, else when they are imported. Safe to
    repeat.
    """

    def load_and_change(load: Load, module: ModuleType) -> None:
        load(module)
        change(module)

    for name in names:
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            change(module)
    if not any(isinstance(finder, Finder) and finder.names == tuple(names) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(names, load_and_change))
