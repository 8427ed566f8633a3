"""Computes an interval around a predicted step time that is as wide as predictions and measurements differ.

Factors are order statistics of measured / predicted, so that 90 % of measurements are between them and as many below as
above; `tests/cost_model/test_interval.py` computes them again from the tables. They do not cover cases outside the
tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PART = 0.9  # of measurements that lie in the interval
# For a stack, or devices under it, with which no prediction was compared. From the 76 published steps of 2022 to 2025
# (`cost_model/validation`), each predicted under the most similar stack that existed before the step was looked at
# (conformal: no row was fitted on). Stacks that were compared have an interval of their own in their file.
UNKNOWN = (0.675, 1.464)
# This project's own runs of captured programs, on a machine that others used as well (36 rows, docs/predictions.md).
OWN_RUNS = (0.58, 1.337)


def compute_interval_s(step_s: float, factors: tuple[float, float]) -> tuple[float, float]:
    """Returns (shortest, longest) likely seconds of a step that is predicted to take `step_s`.

    Args:
        factors: (low, high) of measured / predicted, e.g. `UNKNOWN`.
    """
    return step_s * factors[0], step_s * factors[1]


def calibrate(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns factors (low, high) between which the next measured / predicted lies with a probability of `PART`.

    Args:
        ratios: measured / predicted of the steps so far.
    """
    ordered, count = sorted(ratios), len(ratios)
    below = (1 - PART) / 2 * (count + 1)
    low = max(0, math.floor(below) - 1)
    return ordered[low], ordered[count - 1 - low]
