"""One run of the matrix against its reference."""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracle.execute import load
from tests.oracle.matrix import Run
from tests.oracle.metric import difference, limit
from tests.oracle.pool import Pool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        error: see `metric.difference`; `where` names the value that has it.
        limit: the largest error allowed.
        moved: the largest change of a variable in the reference.
        split_flops_fraction: share of the matrix-product and convolution FLOPs that the plan splits.
        logical_bytes: bytes that the plan moves per step.
        stages: of a pipeline, which divides the work by operations, not inside them; 0: it is none.
        seconds: of the distributed worker.
    """

    error: float
    where: str
    limit: float
    moved: float
    split_flops_fraction: float
    total_flops: int
    logical_bytes: int
    stages: int
    seconds: float

    def problems(self, run: Run) -> list[str]:
        """What is wrong; empty when the run is as it must be."""
        found = []
        if not self.error <= self.limit:
            found.append(f"error {self.error:.2e} > {self.limit:.2e} in {self.where}")
        if not self.moved > 0:
            found.append("the reference trained nothing")
        if run.case.products and not self.total_flops > 0:
            found.append("the plan knows of no products")
        if run.spread.ranks > 1:
            if not self.stages and self.split_flops_fraction < run.case.least_split_fraction:
                found.append(f"only {self.split_flops_fraction:.1%} of the FLOPs are split")
            if not self.logical_bytes > 0:
                found.append("the plan moves no bytes")
        elif self.logical_bytes:
            found.append(f"one rank moves {self.logical_bytes} bytes")
        return found


def compare(pool: Pool, run: Run) -> Outcome:
    """Runs the reference (once) and the distributed program.

    Raises:
        WorkerFailure: one of them failed.
        AssertionError: their results differ in name, shape or dtype.
    """
    wanted = pool.reference(run.flavour, run.name, run.dtype, run.optimizer)
    job = {
        "case": run.name,
        "dtype": run.dtype,
        "optimizer": run.optimizer,
        "ranks": run.spread.ranks,
        "shares": list(run.spread.shares),
        "gradients": run.gradients,
        "scope": run.scope,
    }
    found = pool.spread(run.flavour, job)
    worst = difference(load(wanted["path"]), load(found["path"]), wanted["floor"])
    return Outcome(
        error=worst.error,
        where=worst.where,
        limit=limit(run.dtype, wanted["noise"]),
        moved=wanted["moved"],
        split_flops_fraction=found["split_flops_fraction"],
        total_flops=found["total_flops"],
        logical_bytes=found["logical_bytes"],
        stages=found["stages"],
        seconds=found["seconds"],
    )
