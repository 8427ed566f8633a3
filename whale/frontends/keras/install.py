"""Puts Whale's methods in the place of Keras' own, now or when Keras is imported.

They do what Keras' own do while no run goes on, so they stay: after ``wh.shutdown`` a model trains as it did before.
"""

from __future__ import annotations

from types import ModuleType

from whale.frontends.when_imported import change_when_imported

PACKAGES = ("keras", "tf_keras")


def install() -> None:
    """Changes the Keras that is imported, and any that will be."""
    change_when_imported(PACKAGES, _patch)


def _patch(package: ModuleType) -> None:
    if getattr(package, "_whale_changed", False) or not hasattr(package, "__version__"):
        return
    package._whale_changed = True  # type: ignore[attr-defined]
    if package.__version__.startswith("2."):
        from whale.frontends.keras import keras2

        keras2.patch_keras2(package.__name__)
    elif package.backend.backend() == "tensorflow":
        from whale.frontends.keras import keras3

        keras3.patch_keras3()
