"""How far a distributed run is from the reference, and how far it may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FLOAT64_LIMIT = 1e-10
FLOAT32_LIMIT = 1e-5
NOISE_FACTOR = 3.0

Values = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative difference, and the value that has it."""

    error: float
    where: str


def difference(reference: Values, found: Values, floor: float) -> Difference:
    """max|difference| / max(max|w|, floor), the largest over all values.

    Args:
        reference: `<step>/<result>` for what a step returned, `variable/<name>` for what was left behind. `w` is the
            value itself; for a gradient it is all gradients of its step, because a gradient may be zero in exact
            arithmetic and rounding noise in floating point.
        found: the same names, except for gradients that were not fetched.
        floor: learning rate x steps.

    Raises:
        AssertionError: a name, shape or dtype differs.
    """
    missing = {name for name in reference if name not in found and "/gradient/" not in name}
    assert not missing, f"not computed by the distributed run: {sorted(missing)}"
    extra = found.keys() - reference.keys()
    assert not extra, f"not computed by the reference: {sorted(extra)}"
    largest_gradient: dict[str, float] = {}
    for name, value in reference.items():
        if step := _gradient_step(name):
            largest_gradient[step] = max(largest_gradient.get(step, 0.0), _largest(value))
    worst = Difference(0.0, "nothing differs")
    for name, value in found.items():
        wanted = reference[name]
        assert value.shape == wanted.shape, f"{name}: shape {value.shape}, the reference has {wanted.shape}"
        assert value.dtype == wanted.dtype, f"{name}: dtype {value.dtype}, the reference has {wanted.dtype}"
        step = _gradient_step(name)
        scale = largest_gradient[step] or floor if step else max(_largest(wanted), floor)
        error = _largest(value.astype(np.float64) - wanted.astype(np.float64)) / scale
        # Written so that NaN is an error: it compares as false.
        if not error <= worst.error:
            worst = Difference(error if np.isfinite(error) else float("inf"), name)
    return worst


def limit(dtype: str, noise: float) -> float:
    """The largest error allowed, given the reference's own noise (its rows in another order)."""
    return FLOAT64_LIMIT if dtype == "float64" else max(FLOAT32_LIMIT, NOISE_FACTOR * noise)


def _largest(value: np.ndarray) -> float:
    return float(np.max(np.abs(value.astype(np.float64)))) if value.size else 0.0


def _gradient_step(name: str) -> str | None:
    match = re.match(r"(\d+)/gradient/", name)
    return match[1] if match else None
