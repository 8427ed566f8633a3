"""Calibrates constants on measured rows: python -m cost_model.calibrate [--rows file.csv] [--curve].

The host's time per launch is the unknown constant of the software of vTrain's single-node rows. --curve also fits the
share of the memory bandwidth that eager kernels reach on A100, which other tables use as well: it was fitted once,
before any of them was evaluated, and is kept. No other constants are fitted, and no other rows are used. Five-fold
cross-validation measures the fit on rows that it has not seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from unittest import mock

import msgspec

from cost_model.analytic.stacks import stacks
from cost_model.hardware import catalogue
from cost_model.kernels import compute
from cost_model.validation import cases
from cost_model.validation.cases import DATA, Case

CURVE, STACK = "ampere-sxm", "megatron-vtrain"
CURVE_CONSTANTS = ("memory_fraction",)
STACK_CONSTANTS = ("host_us", "backward_host_us", "collective_host_us", "pass_host_us")
ROWS = DATA / "vtrain_a100_single_node_visible.csv"
FOLDS = 5
FIRST_FACTOR, LAST_FACTOR = 1.3, 1.01  # by which a constant is changed at once
Constants = Mapping[str, float]
T = TypeVar("T", bound=catalogue.Entry)


def current(curve: bool = False) -> dict[str, float]:
    """Returns the constants in the data files, including those of the device's curve if asked."""
    found = {name: getattr(stacks()[STACK], name) for name in STACK_CONSTANTS}
    if curve:
        found |= {name: getattr(catalogue.load_efficiencies()[CURVE], name) for name in CURVE_CONSTANTS}
    return found


def errors(rows: Sequence[Case], constants: Constants) -> list[float]:
    """Returns the relative errors of predictions with these constants instead of the data files'."""

    def changed(entry: T, names: Sequence[str]) -> T:
        return msgspec.structs.replace(entry, **{name: constants[name] for name in names if name in constants})

    curve, stack = (
        changed(catalogue.load_efficiencies()[CURVE], CURVE_CONSTANTS),
        changed(stacks()[STACK], STACK_CONSTANTS),
    )
    curves = {**catalogue.load_efficiencies(), CURVE: curve}
    with (
        mock.patch.object(compute, "load_efficiencies", lambda: curves),
        mock.patch.object(cases, "stack", lambda name: stack if name == STACK else stacks()[name]),
    ):
        return [case.predict().step_s / case.measured_s - 1 for case in rows]


def fit(rows: Sequence[Case], start: Constants, loss: Callable[[list[float]], float]) -> dict[str, float]:
    """Fits constants by coordinate search: each is scaled up and down, by ever smaller factors, while that lowers the
    loss.
    """
    found = dict(start)
    best = loss(errors(rows, found))
    factor = FIRST_FACTOR
    while factor > LAST_FACTOR:
        improved = False
        for name in found:
            for by in (factor, 1 / factor):
                tried = {**found, name: found[name] * by}
                if tried.get("memory_fraction", 0) > 1:
                    continue
                value = loss(errors(rows, tried))
                if value < best:
                    best, found, improved = value, tried, True
                    break
        if not improved:
            factor **= 0.5  # the next one, twice, is this one
    return found


def mean_absolute(found: Sequence[float]) -> float:
    """Returns the mean of the absolute values."""
    return sum(map(abs, found)) / len(found)


def mean_square(found: Sequence[float]) -> float:
    """Returns the mean of the values' squares."""
    return sum(error * error for error in found) / len(found)


def cross_validate(rows: Sequence[Case], start: Constants) -> list[float]:
    """Returns the errors of every row with constants fitted on the other folds; row i is in fold i mod 5."""
    found = [0.0] * len(rows)
    for fold in range(FOLDS):
        seen = [case for i, case in enumerate(rows) if i % FOLDS != fold]
        constants = fit(seen, start, mean_square)
        for i in range(fold, len(rows), FOLDS):
            (found[i],) = errors([rows[i]], constants)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs the command (see the module's docstring): prints the constants and their errors."""
    parser = argparse.ArgumentParser(prog="python -m cost_model.calibrate", description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--curve", action="store_true", help="also the A100's memory bandwidth")
    options = parser.parse_args(arguments)
    _, rows = cases.read(options.rows)
    start = current(options.curve)
    found = fit(rows, start, mean_square)
    for name, value in found.items():
        print(f"{name}: {value:.4g} (data file: {start[name]:.4g})")
    seen = errors(rows, found)
    unseen = cross_validate(rows, start)
    print(f"fitted on all {len(rows)} rows: MAPE {100 * mean_absolute(seen):.2f} %")
    worst = max(map(abs, unseen))
    print(f"{FOLDS}-fold cross-validation: MAPE {100 * mean_absolute(unseen):.2f} %, maximum {100 * worst:.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
