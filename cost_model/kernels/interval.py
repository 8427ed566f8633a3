"""Returns an interval around a predicted step, as wide as the differences between measured and predicted steps.

Factors are order statistics of measured / predicted, so that 90 % of measurements are between them and as many below as
above; `tests/cost_model/test_interval.py` computes them again from the tables. They do not cover cases outside the
tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PART = 0.9  # of measurements that lie in the interval
# The 76 published steps of 2022 to 2025 (`cost_model/validation`), predicted under the nearest of the stacks that there
# were before them: so far apart are steps of software, or of a device under it, of which no row was looked at
# (conformal: no row was fitted on). Where rows were, the stack's file has the interval.
UNKNOWN = (0.675, 1.464)
# This project's own runs of captured programs, on a machine that others used as well (36 rows, docs/predictions.md).
OWN_RUNS = (0.58, 1.337)


def compute_interval_s(step_s: float, factors: tuple[float, float]) -> tuple[float, float]:
    """Returns the shortest and the longest likely step."""
    return step_s * factors[0], step_s * factors[1]


def calibrate(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the factors of measured / predicted that contain the next measurement with a probability of `PART`."""
    ordered, count = sorted(ratios), len(ratios)
    below = (1 - PART) / 2 * (count + 1)
    low = max(0, math.floor(below) - 1)
    return ordered[low], ordered[count - 1 - low]
