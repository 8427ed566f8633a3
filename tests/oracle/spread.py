"""Worker that runs cases over the ranks of the in-process transport."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import whale as wh
from cost_model.graph.machine import Rates
from tests.oracle.execute import execute, save
from tests.oracle.named import ANNOTATIONS
from tests.oracle.serve import serve
from tests.oracle.stages import in_turns
from tests.zoo.case import Setting, build
from tests.zoo.catalogue import case_named
from whale.kernels import clusters
from whale.planner.graph_search import strategies
from whale.runtime.compile import auto
from whale.runtime.start import check_replicas

SCOPES = {
    "": contextlib.nullcontext,
    "replica": wh.replica,
    "split": wh.split,
    "sequence": partial(wh.split, sequence=1),
    "auto": contextlib.nullcontext,
    "named": contextlib.nullcontext,
}


def spread(job: dict[str, Any]) -> dict[str, Any]:
    """Runs one case over `ranks` ranks.

    Returns:
        Facts about the plan that ran.
    """
    case = case_named(job["case"])
    scope, *more = job["scope"].split("+")
    scope, _, count = scope.partition(":")
    zero = "".join(part.removeprefix("zero") for part in more if part.startswith("zero"))
    micro_batches = "".join(part.removeprefix("micro:") for part in more if part.startswith("micro:"))
    recompute = "auto" if "recompute" in more else ""
    config = {
        "communication.in_process_ranks": job["ranks"],
        "batch.shares": job["shares"],
        "mesh": wh.Mesh(tensor=int(count)) if count and scope in ("split", "sequence") else wh.Mesh(),
        "memory.zero": int(zero or 0),
        "pipeline.micro_batches": int(micro_batches or 1),
        "memory.zero_min_bytes": 0,
        "memory.recompute": recompute,
        "mesh.auto_parallel": scope == "auto",
        "pipeline.stages": int(count or 0) if scope == "auto" else 0,
        "batch.norm_statistics": "batch",
        "batch.random": "global",
    }
    wh.init(wh.Config(config))
    if scope == "named":
        wh.annotate(ANNOTATIONS[count])
    if scope == "auto":
        _prefer_splits()
    function: Any = wh.function
    if "xla" in more:
        clusters.LEAST_BYTES = 0
        function = partial(wh.function, jit_compile=True)
    try:
        setting = Setting(
            job["dtype"],
            job["optimizer"],
            function=function,
            session=lambda graph: wh.Session(graph=graph),
            scope=in_turns(int(count)) if scope == "stage" else SCOPES[scope],
            gradients=job["gradients"],
        )
        program = build(case, setting)
        values = execute(case, program)
        check_replicas()
        plan = program.plan(program.batches(1)[0])
        program.close()
    finally:
        wh.shutdown()
    save(job["path"], values)
    return {
        "split_flops_fraction": plan.split_flops_fraction,
        "total_flops": plan.total_flops,
        "logical_bytes": plan.logical_bytes,
        "stages": len(plan.stage_groups),
    }


def _prefer_splits() -> None:
    """Devices so slow that work is divided wherever it can be: the cases' weights are too small for it otherwise."""
    strategies.LEAST_BYTES = 0
    auto.measure_rates = lambda context, dry, program: [Rates(1e6, 1e6, 0.0, 0.0, 1e15, "for the test")] * context.size


if __name__ == "__main__":
    serve(spread)
