"""whale plan: shows how a script would be spread, or plans a model by its description or by measured tables."""

from __future__ import annotations

import argparse
from typing import Any

from whale.errors import PlanError


def add_to(verbs: Any) -> None:
    """Adds the verb to the command's parser."""
    verb = verbs.add_parser(
        "plan",
        help="find how a script or a described model is best spread",
        description="Captures a script's program and shows the plan for N ranks, without starting them; or plans a "
        "model by its description, or by measured tables, for a cluster.",
    )
    verb.add_argument("-np", dest="ranks", type=int, default=2, metavar="N", help="number of ranks (default 2)")
    verb.add_argument("-o", dest="out", metavar="FILE", help="also write the plan as JSON")
    verb.add_argument(
        "--describe", metavar="MODEL", help="gpt:layers=96,hidden=12288,heads=96,sequence=2048,batch=1536"
    )
    verb.add_argument("--profile", metavar="FILE", help="measured tables of a model's layers (JSON or YAML)")
    verb.add_argument("--cluster", metavar="FILE", help="cluster file (YAML), or local for this machine")
    verb.add_argument("--batch", type=int, metavar="ROWS", help="rows of the global batch")
    verb.add_argument("--budget", type=float, default=10.0, metavar="S", help="seconds for the search (default 10)")
    verb.add_argument("--software", default="megatron-2022", help="software stack of the cost model's catalogue")
    verb.add_argument("--planner", default="whale", choices=("whale", "whale22"), help="whale22: as the paper's")
    verb.add_argument("--advise", action="store_true", help="also say which nearby models are trained faster")
    verb.add_argument(
        "--set",
        dest="fixed",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="fix stages, tensor, data, micro_batch, micro_batches, recompute, zero or chunks",
    )
    verb.add_argument("--measured", metavar="FILE", help="what `whale profile` wrote, to predict a script's step on it")
    verb.add_argument(
        "--model", action="store_true", help="SCRIPT is a model file: a family and its sizes, captured like a script"
    )
    verb.add_argument("script", nargs="?", help="the script to plan")
    verb.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    verb.set_defaults(call=call, wrong=verb.error)


def call(given: argparse.Namespace) -> int:
    """Runs the verb."""
    if given.describe or given.profile:
        return _described(given)
    if given.script is None:
        given.wrong("there is nothing to plan: a script, --describe or --profile is needed")
    from whale.runtime.dry_run import Prediction, main

    where = Prediction(given.measured, given.cluster)
    return main(given.script, tuple(given.arguments), given.ranks, given.out, where, given.model) or 0


def _described(given: argparse.Namespace) -> int:
    from cost_model import cluster, discover
    from whale.doctor.cgroup import cpu_quota
    from whale.planner import ask, planfile, show, tables

    if given.describe and given.profile:
        raise PlanError("a model is either described or measured", given="--describe and --profile")
    if given.cluster is None:
        raise PlanError("a described model needs a cluster", action="add --cluster FILE, or --cluster local")
    machines = discover.local(cpu_quota()) if given.cluster == "local" else cluster.read(given.cluster)
    transformer, batch = ask.describe(given.describe) if given.describe else (None, None)
    table = tables.read(given.profile) if given.profile else None
    batch = given.batch or batch or (table.batch if table else None)
    if batch is None:
        raise PlanError("the global batch is not known", action="add --batch ROWS")
    limits = ask.limits(given.fixed, given.budget)
    plan = ask.plan(machines, batch, transformer, table, given.software, limits, given.planner)
    print(show.show(plan))
    if given.advise and transformer is not None:
        print("\n".join(["", "nearby models", *(f"  {row}" for row in ask.advise(machines, batch, transformer))]))
    if given.out:
        planfile.save(plan, given.out)
    return 0
