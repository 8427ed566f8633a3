"""Parts of parametrized tests that run with every change; the others are marked `long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_of(count: int, values: Iterable[Any], *, several: bool = False) -> list[Any]:
    """Returns the values as parameters, of which one of ``count`` runs with every change, the first among them.

    Args:
        count: 3 leaves every third one.
        values: what `pytest.mark.parametrize` takes.
        several: each value is a tuple of values, one for each of several names.
    """
    return [value if index % count == 0 else _as_long(value, several) for index, value in enumerate(values)]


def _as_long(value: Any, several: bool) -> Any:
    if hasattr(value, "marks"):
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.long])
    return pytest.param(*(value if several else (value,)), marks=pytest.mark.long)
