"""Runs a program of the zoo for its steps and keeps what the oracle compares. Never imports whale."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.zoo.case import BATCH, Case, Program, permuted


def execute(case: Case, program: Program, shuffle: int | None = None) -> dict[str, np.ndarray]:
    """Results of every step and the variables afterwards.

    Args:
        shuffle: give each batch in another order of rows, drawn from this seed; results per row come back in the
            original order. The mathematical result is the same, so what differs is rounding noise.
    """
    generator = np.random.default_rng(shuffle)
    values: dict[str, np.ndarray] = {}
    for index, batch in enumerate(program.batches(case.steps)):
        order = np.arange(BATCH) if shuffle is None else generator.permutation(BATCH)
        for name, value in program.run_step(permuted(case, batch, order)).items():
            values[f"{index}/{name}"] = value[np.argsort(order)] if name.startswith("rows/") else value
    return values | {f"variable/{name}": value for name, value in program.variables().items()}


def save(path: str | Path, values: dict[str, np.ndarray]) -> None:
    """Writes the values as one npz file."""
    np.savez(path, **values)


def load(path: str | Path) -> dict[str, np.ndarray]:
    """Reads what `save` wrote."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
