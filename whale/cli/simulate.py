"""Implements `whale simulate`: predicts step time and memory of a job on a cluster, or of a model on a measured
machine.

The prediction for a cluster needs no TensorFlow and no devices. `--fit` fits a software stack to measured steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from whale.cli.given import hide_startup_lines, parse_positive, refuse_inconsistent, require_readable, require_writable


def add_parser(verbs: Any) -> None:
    """Adds `whale simulate` and its options to the subparsers ``verbs``."""
    verb = verbs.add_parser(
        "simulate",
        help="predict a job's step time and memory",
        description="Predicts step time and memory of a transformer, given by its hyper-parameters, on a cluster; or "
        "of a model of any family, divided over ranks on the machine that `whale profile` measured.",
    )
    verb.add_argument("job", nargs="?", help="YAML file with model, plan and software; with --measured a model file")
    verb.add_argument("--cluster", help="cluster file (YAML), or local for this machine")
    verb.add_argument("--measured", metavar="FILE", help="a file that `whale profile` wrote, instead of a cluster")
    verb.add_argument(
        "-np", dest="ranks", type=parse_positive, default=2, metavar="N", help="with --measured: ranks (default 2)"
    )
    verb.add_argument("--network", help="with --cluster local in a job of several hosts: type of their network")
    verb.add_argument("--profile", help="measured times of the model's layers (YAML), instead of formulas")
    verb.add_argument("--stack", help="software stack (a name, or a YAML file of yours), instead of the job's")
    verb.add_argument(
        "--fit",
        type=Path,
        metavar="ROWS.csv",
        help="fit a software stack to measured steps, and write its file (--out)",
    )
    verb.add_argument("--out", type=Path, metavar="STACK.yaml", help="with --fit: where the stack is written")
    verb.add_argument("--trace", type=Path, help="write the predicted timeline as a Chrome trace")
    verb.set_defaults(call=run_command, wrong=verb.error)


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale simulate`; returns 1 if the job does not fit into the devices' memory, else 0."""
    if given.fit:
        return _fit(given)
    if given.out:
        given.wrong("--out is for --fit: it names the stack file that --fit writes")
    if given.job is None:
        given.wrong("a job file is needed, or --fit with measured rows")
    if (given.cluster is None) == (given.measured is None):
        given.wrong("give either --cluster or --measured: the machine that the job runs on")
    if given.measured:
        if given.profile or given.trace or given.network or given.stack:
            given.wrong("--profile, --trace, --network and --stack are for jobs on a cluster")
        require_readable(given.job, given.measured)
        with hide_startup_lines():
            from whale.tools.dry_run import simulate_file

            text, fits = simulate_file(given.job, given.ranks, given.measured)
        print(text, end="")
        return int(not fits)
    require_readable(given.job, given.cluster, given.profile)
    require_writable(given.trace, "--trace")
    from cost_model.analytic import job
    from cost_model.analytic import layer_profile as profile
    from cost_model.cluster import allocation
    from whale.cgroup import cpu_quota

    with refuse_inconsistent(given.job, given.cluster, given.profile):
        cluster = allocation.read_named_cluster(given.cluster, given.network, cpu_quota())
        task = job.read(given.job, given.stack)
        found = task.predict(cluster, profile.read(given.profile) if given.profile else None)
        print(job.report(task, cluster, found))
        if given.trace:
            given.trace.write_text(job.trace(found))
        return 1 if job.too_large(cluster, found) else 0


def _fit(given: argparse.Namespace) -> int:
    """Fits a software stack to a file of measured steps, writes it, and prints how well it fits."""
    if given.job or given.measured or given.profile or given.trace or given.network:
        given.wrong("--fit is for measured rows, without a job file, --measured, --profile, --trace or --network")
    if given.out is None:
        given.wrong("--fit needs --out STACK.yaml, the file for the fitted stack")
    require_readable(given.fit, given.cluster)
    require_writable(given.out, "--out")
    from cost_model.fit_stack import fit_file

    with refuse_inconsistent(given.fit, given.cluster):
        print(fit_file(given.fit, given.stack or "megatron-core-bf16", given.cluster, given.out))
        print(f"written to {given.out}: whale simulate JOB --cluster FILE --stack {given.out}")
    return 0
