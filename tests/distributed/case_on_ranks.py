"""Script for `whale run`: one case of the zoo over MPI; every rank writes what it computed.

case_on_ranks.py CASE DTYPE OPTIMIZER SHARES FOLDER SCOPE

SHARES: 5,3 or even. SCOPE: replica, split, split:2 (groups of two ranks) or zero.
"""

from __future__ import annotations

import sys
from pathlib import Path

import whale as wh
from tests.oracle.execute import execute, save
from tests.zoo.case import Setting, build
from tests.zoo.catalogue import case_named
from whale.runtime.context import check_replicas

name, dtype, optimizer, shares, folder, scope = sys.argv[1:]
scope, _, group = scope.partition(":")
rows = [] if shares == "even" else [int(part) for part in shares.split(",")]
zero = {"zero.level": 1, "zero.min_bytes": 0} if scope == "zero" else {}
settings = {"replica.shares": rows, "sync_batch_norm": True, "random": "global", "split.ranks": int(group or 0)}
wh.init(wh.Config(settings | zero))
case = case_named(name)
inside = wh.split if scope == "split" else wh.replica
setting = Setting(dtype, optimizer, wh.function, lambda graph: wh.Session(graph=graph), inside)
program = build(case, setting)
save(Path(folder, f"{wh.rank()}.npz"), execute(case, program))
check_replicas()
plan = program.plan(program.batches(1)[0])
assert plan.split_flops_fraction >= 0.9, f"only {plan.split_flops_fraction:.1%} of the FLOPs are split"
assert plan.logical_bytes > 0, "the plan moves no bytes"
assert bool(plan.variables) == (scope != "replica" and not name.startswith("tf1")), plan.variables
print(f"rank {wh.rank()} of {wh.size()} is done")
wh.shutdown()
