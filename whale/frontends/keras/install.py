"""Puts Whale's methods in the place of Keras' own, now or when Keras is imported.

They do what Keras' own do while no run goes on, so they stay: after ``wh.shutdown`` a model trains as it did before.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

PACKAGES = ("keras", "tf_keras")


def install() -> None:
    """Changes the Keras that is imported, and any that will be."""
    for name in PACKAGES:
        if hasattr(sys.modules.get(name), "__version__"):
            _change(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _change(package: ModuleType) -> None:
    if getattr(package, "_whale_changed", False):
        return
    package._whale_changed = True  # type: ignore[attr-defined]
    if package.__version__.startswith("2."):
        from whale.frontends.keras import keras2

        keras2.change(package.__name__)
    elif package.backend.backend() == "tensorflow":
        from whale.frontends.keras import keras3

        keras3.change()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: has what other finders find changed once it is loaded."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See importlib: the specification of Keras' package, whose loading ends with the change; else None."""
        if fullname not in PACKAGES or fullname in self._looking:
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
            _change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
