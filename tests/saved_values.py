"""Compares what runs have saved, as NumPy's files of named values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SMALLEST = 1e-3  # values below it are compared as if they were that large


@dataclass(frozen=True)
class Difference:
    """What runs differ by.

    Attributes:
      largest: over all values and runs, relative to the largest element of each; where: of which value and run.
      problem: what kept them from being compared; "" if nothing.
    """

    largest: float = float("nan")
    where: str = ""
    problem: str = ""


def difference(reference: Path, found: Sequence[Path]) -> Difference:
    """Between one run's values and those of others."""
    first = np.load(reference)
    worst, where = 0.0, ""
    for path in found:
        other = np.load(path)
        if sorted(first.files) != sorted(other.files):
            return Difference(problem=f"other values: {sorted(set(first.files) ^ set(other.files))}")
        for key in first.files:
            if first[key].shape != other[key].shape:
                return Difference(problem=f"{key} has shape {other[key].shape}, not {first[key].shape}")
            largest = max(float(np.max(np.abs(first[key]), initial=0.0)), _SMALLEST)
            gap = float(np.max(np.abs(first[key] - other[key]), initial=0.0)) / largest
            if not gap <= worst:
                worst, where = gap, f"{key}, {path.stem}"
    return Difference(worst, where)
