"""Whale runs a training program that is written for one device on several devices, which may be unequal.

The public names are those of ``__init__.pyi``, which type checkers read as well. Each is loaded when it is first used,
so that ``import whale`` takes no time and needs no TensorFlow.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from typing import Any

__version__ = "0.1.0"

_LINE = re.compile(r"from (\S+) import (\w+) as \2")
_FIRST_WHALE = "whale.frontends.first_whale"


@functools.cache
def _modules() -> dict[str, str]:
    """Returns public name -> module that defines it, as the stub file ``__init__.pyi`` lists them."""
    with open(os.path.splitext(__file__)[0] + ".pyi") as stub:
        lines = stub.read().splitlines()
    return {found[2]: found[1] for found in map(_LINE.fullmatch, lines) if found is not None}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        # Scripts of the first Whale find their names; others are not offered them.
        return ["__version__", *(one for one, module in _modules().items() if module != _FIRST_WHALE)]
    if name.startswith("_") or name not in _modules():
        raise AttributeError(f"module 'whale' has no attribute {name!r}")
    from whale.ir.collector import suspend_garbage_collection

    try:
        with suspend_garbage_collection():
            module = importlib.import_module(_modules()[name])
            if not hasattr(module, name):
                importlib.import_module(f"{module.__name__}.{name}")  # a module inside of it
        value = getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        from whale.errors import no_tensorflow

        raise no_tensorflow(f"whale.{name}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__getattr__("__all__"))
