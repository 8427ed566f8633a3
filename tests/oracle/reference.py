"""Worker that runs cases on one device, in a process that never imports whale."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tests.oracle.execute import execute, save
from tests.oracle.metric import difference
from tests.oracle.serve import serve
from tests.zoo.case import Setting, build
from tests.zoo.catalogue import case_named

# One order may be lucky: how far rounding goes is the largest of several.
NOISE_ORDERS = 3


def reference(job: dict[str, Any]) -> dict[str, Any]:
    """Runs one case; in float32 again with the rows in other orders, which gives the noise.

    Returns:
        `floor` (learning rate x steps), `noise`, `moved` (the largest change of a floating-point variable).
    """
    case, setting = case_named(job["case"]), Setting(job["dtype"], job["optimizer"])
    program = build(case, setting)
    before = program.variables()
    values = execute(case, program)
    # A result of another precision would be held against the wrong limit.
    other = {n for n, v in values.items() if n[0].isdigit() and v.dtype.kind == "f" and v.dtype != job["dtype"]}
    assert not other, f"results that are not {job['dtype']}: {sorted(other)}"
    floor = program.learning_rate * case.steps
    program.close()
    save(job["path"], values)
    noise = 0.0
    if job["dtype"] == "float32" and case.rows_commute:
        for seed in range(NOISE_ORDERS):
            program = build(case, setting)
            noise = max(noise, difference(values, execute(case, program, shuffle=seed), floor).error)
            program.close()
    moved = [
        float(np.max(np.abs(values[f"variable/{name}"] - value)))
        for name, value in before.items()
        if value.dtype.kind == "f" and value.size
    ]
    assert "whale" not in sys.modules, "the reference process imported whale"
    return {"floor": floor, "noise": noise, "moved": max(moved)}


if __name__ == "__main__":
    serve(reference)
