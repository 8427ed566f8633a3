"""Fits constants of software stacks to measured rows: python -m cost_model.calibrate [--rows file.csv ...].

`--stacks` names the stacks to fit; `--constants` names the fields that are fitted, with one value for all the stacks
that have them (a stack without float8 has no `quantise_bytes`). The defaults are the host's times per launch, which
vTrain's single-node rows determine. `--curve` also fits the fraction of the memory bandwidth that eager kernels reach
on A100; other tables share that constant, which was fitted once, before any of them was evaluated. Five-fold
cross-validation shows the error on rows that a fit has not seen.

Decision: 0034.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

import msgspec

from cost_model.analytic.stacks import Stack, stack
from cost_model.hardware import catalogue
from cost_model.kernels import compute
from cost_model.validation import cases
from cost_model.validation.cases import DATA, Case

CURVE, STACK = "ampere-sxm", "megatron-vtrain"
PARTS = ("hides_sequence_parallel", "selective_part", "memory_fraction")  # constants that are at most 1
CURVE_CONSTANTS = ("memory_fraction",)
STACK_CONSTANTS = ("host_us", "backward_host_us", "collective_host_us", "pass_host_us")
ROWS = DATA / "vtrain_a100_single_node_visible.csv"
FOLDS = 5
FIRST_FACTOR, LAST_FACTOR = 1.3, 1.01  # by which a constant is changed at once
Constants = Mapping[str, float]


def current(
    curve: bool = False, names: Sequence[str] = (STACK,), constants: Sequence[str] = STACK_CONSTANTS
) -> dict[str, float]:
    """Returns the values that the data files have for the constants to fit, by name: the start of a fit.

    Args:
        curve: whether to include constants of the device's efficiency curve.
        names: software stacks; if several have a constant, the last one's value is returned.
        constants: names of the stacks' fields.
    """
    found = {name: getattr(one, name) for one in map(stack, names) for name in constants if _has(one, name)}
    if curve:
        found |= {name: getattr(catalogue.load_efficiencies()[CURVE], name) for name in CURVE_CONSTANTS}
    return found


def _has(one: Stack, constant: str) -> bool:
    return constant != "quantise_bytes" or one.weights_dtype is not None


def errors(rows: Sequence[Case], constants: Constants, names: Sequence[str] = (STACK,)) -> list[float]:
    """Returns the relative error of each row's predicted step time with `constants` in place of the data files' values.

    Args:
        names: the stacks whose constants are replaced.
    """
    known = catalogue.load_efficiencies()
    of_curve = {name: value for name, value in constants.items() if name in CURVE_CONSTANTS}
    curves = {**known, CURVE: msgspec.structs.replace(known[CURVE], **of_curve)}
    changed = {}
    for name in names:
        one = stack(name)
        own = {key: value for key, value in constants.items() if key not in CURVE_CONSTANTS and _has(one, key)}
        changed[name] = msgspec.structs.replace(one, **own)
    with (
        mock.patch.object(compute, "load_efficiencies", lambda: curves),
        mock.patch.object(cases, "stack", lambda name: changed.get(name) or stack(name)),
    ):
        return [case.predict().step_s / case.measured_s - 1 for case in rows]


def fit(
    rows: Sequence[Case],
    start: Constants,
    loss: Callable[[list[float]], float],
    names: Sequence[str] = (STACK,),
) -> dict[str, float]:
    """Fits constants by coordinate search: scales each up and down by ever smaller factors for as long as `loss` falls.

    Args:
        start: first value of each constant, by name.
        loss: maps the rows' relative errors to the number to minimise.
        names: the stacks whose constants are replaced.
    """
    found = dict(start)
    best = loss(errors(rows, found, names))
    factor = FIRST_FACTOR
    while factor > LAST_FACTOR:
        improved = False
        for name in found:
            for by in (factor, 1 / factor):
                tried = {**found, name: found[name] * by}
                if name in PARTS and tried[name] > 1:
                    continue
                value = loss(errors(rows, tried, names))
                if value < best:
                    best, found, improved = value, tried, True
                    break
        if not improved:
            factor **= 0.5  # two steps of the next factor make one of this
    return found


def mean_absolute(found: Sequence[float]) -> float:
    """Returns the mean of the absolute values."""
    return sum(map(abs, found)) / len(found)


def mean_square(found: Sequence[float]) -> float:
    """Returns the mean of the values' squares."""
    return sum(error * error for error in found) / len(found)


def cross_validate(rows: Sequence[Case], start: Constants, names: Sequence[str] = (STACK,)) -> list[float]:
    """Returns the error of each row under constants fitted without its fold; row i is in fold i mod 5."""
    found = [0.0] * len(rows)
    for fold in range(FOLDS):
        seen = [case for i, case in enumerate(rows) if i % FOLDS != fold]
        constants = fit(seen, start, mean_square, names)
        for i in range(fold, len(rows), FOLDS):
            (found[i],) = errors([rows[i]], constants, names)
    return found


def _numbers() -> list[str]:
    """Returns the names of `Stack`'s fields that hold floats, which `--constants` may name."""
    return [name for name in Stack.__struct_fields__ if isinstance(getattr(stack(STACK), name), float)]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command (see the module's docstring): prints the fitted constants and their errors."""
    parser = argparse.ArgumentParser(prog="python -m cost_model.calibrate", description=__doc__)
    parser.add_argument("--rows", nargs="+", type=Path, default=[ROWS])
    parser.add_argument(
        "--stacks", nargs="+", default=[STACK], help="names or files; rows of other stacks are left out"
    )
    parser.add_argument("--constants", nargs="+", default=list(STACK_CONSTANTS), choices=_numbers(), metavar="FIELD")
    parser.add_argument("--curve", action="store_true", help="also fit the fraction of A100's memory bandwidth")
    options = parser.parse_args(arguments)
    names = options.stacks
    rows = [case for path in options.rows for case in cases.read(path)[1] if case.stack in names]
    if len(rows) < FOLDS:
        parser.error(f"a fit needs at least {FOLDS} rows of {', '.join(names)}, and the files have {len(rows)}")
    start = current(options.curve, names, options.constants)
    found = fit(rows, start, mean_square, names)
    for name, value in found.items():
        print(f"{name}: {value:.4g} (data file: {start[name]:.4g})")
    seen = errors(rows, found, names)
    unseen = cross_validate(rows, start, names)
    print(f"fitted on all {len(rows)} rows: MAPE {100 * mean_absolute(seen):.2f} %")
    worst = max(map(abs, unseen))
    print(f"{FOLDS}-fold cross-validation: MAPE {100 * mean_absolute(unseen):.2f} %, maximum {100 * worst:.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
