"""Returns an interval around a predicted step, as wide as the differences between measured and predicted steps.

Factors are order statistics of measured / predicted, so that 90 % of measurements are between them and as many below as
above; `tests/cost_model/test_interval.py` computes them again from the tables. They do not cover cases outside the
tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PART = 0.9  # of measurements that lie in the interval
# Published steps of described models (`cost_model/validation`), on one host (71 rows) and on several (83 rows).
ONE_HOST = (0.904, 1.138)
SEVERAL_HOSTS = (0.963, 1.583)
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
