"""Script for `whale run`: one case of the zoo over MPI; every rank writes what it computed.

case_on_ranks.py CASE DTYPE OPTIMIZER SHARES FOLDER SCOPE

SHARES: 5,3 or even. SCOPE: replica, split, split:2 (groups of two ranks), zero, zero:3 (its level; 1 unless given), or
stage:2 (a pipeline of two stages).
"""

from __future__ import annotations

import sys
from pathlib import Path

import whale as wh
from tests.oracle.execute import execute, save
from tests.oracle.stages import in_turns
from tests.zoo.case import Setting, build
from tests.zoo.catalogue import case_named
from whale.ir.mesh import find_tiles
from whale.runtime.start import check_replicas

name, dtype, optimizer, shares, folder, scope = sys.argv[1:]
scope, _, count = scope.partition(":")
rows = [] if shares == "even" else [int(part) for part in shares.split(",")]
zero = {"memory.zero": int(count or 1), "memory.zero_min_bytes": 0} if scope == "zero" else {}
settings = {
    "batch.shares": rows,
    "batch.norm_statistics": "batch",
    "batch.random": "global",
    "mesh": wh.Mesh(tensor=int(count)) if count and scope == "split" else wh.Mesh(),
}
wh.init(wh.Config(settings | zero))
case = case_named(name)
inside = in_turns(int(count)) if scope == "stage" else wh.split if scope == "split" else wh.replica
setting = Setting(dtype, optimizer, wh.function, lambda graph: wh.Session(graph=graph), inside)
program = build(case, setting)
save(Path(folder, f"{wh.rank()}.npz"), execute(case, program))
check_replicas()
plan = program.plan(program.batches(1)[0])
share = plan.split_flops_fraction
assert share >= 0.9 or plan.stage_groups, f"only {share:.1%} of the FLOPs are split"
assert plan.logical_bytes > 0, "the plan moves no bytes"
assert bool(find_tiles(plan)) == (scope in ("split", "zero")), find_tiles(plan)
assert bool(plan.stage_groups) == (scope == "stage"), plan.stage_groups
print(f"rank {wh.rank()} of {wh.size()} is done")
wh.shutdown()
