"""Implements `whale plan`: plans a script, or a model given by a description or by measured layers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from whale.cli.given import (
    Parser,
    add_config,
    hide_startup_lines,
    parse_amount,
    parse_positive,
    parse_seconds,
    refuse_inconsistent,
    require_readable,
    require_writable,
    show_progress,
    take_settings,
)
from whale.errors import PlanError

if TYPE_CHECKING:
    from cost_model.analytic.transformer import Transformer
    from whale.planner.analytic_search.layer_profiles import LayerProfile


def add_parser(verbs: Any) -> None:
    """Adds `whale plan` and its options to the subparsers ``verbs``."""
    verb = verbs.add_parser(
        "plan",
        help="find the fastest way to distribute a script or a described model",
        description="Captures a script's program and shows the plan for N ranks, without starting them; or plans a "
        "model by its description, or by measured tables, for a cluster.",
    )
    _add_script_options(verb)
    add_config(verb)
    verb.add_argument(
        "--describe",
        metavar="MODEL",
        help="gpt:layers=96,hidden=12288,heads=96,batch=1536, moe:...,experts=64, llama:, mixtral:, or a Hugging Face "
        "configuration (config.json,sequence=8192,batch=512); "
        "dlrm:tables=26,rows=1000000,batch=4096, classifier:classes=1000000,features=512,batch=64, or "
        "bert:, t5:, vit: and resnet: with the fields of their model files, divided as auto_parallel would",
    )
    verb.add_argument("--profile", metavar="FILE", help="measured times of a model's layers (JSON or YAML)")
    verb.add_argument("--offers", metavar="FILE", help="several clusters with prices (YAML), ranked by time and cost")
    verb.add_argument("--rows", type=parse_amount, metavar="N", help="with --offers: rows that the whole job trains on")
    verb.add_argument(
        "--deadline", type=parse_amount, metavar="HOURS", help="with --offers: take the cheapest that ends by then"
    )
    verb.add_argument(
        "--spend", type=parse_amount, metavar="MONEY", help="with --offers: take the fastest that costs no more"
    )
    verb.add_argument("--jobs", metavar="FILE", help="several described models (YAML) to place on one cluster")
    verb.add_argument("--batch", type=parse_positive, metavar="ROWS", help="rows of the global batch")
    verb.add_argument(
        "--budget",
        type=parse_seconds,
        metavar="S",
        help="seconds of one core for the search (default 2.5, 8 for more than 64 devices, 30 for bert:, t5:, ...)",
    )
    verb.add_argument(
        "--stack", default="megatron-2022", help="software stack of the cost model's catalogue, or a YAML file of yours"
    )
    verb.add_argument(
        "--planner", default="whale", choices=("whale", "whale22"), help="whale22: formulas of the paper (ATC 2022)"
    )
    verb.add_argument("--advise", action="store_true", help="also say which similar models train faster")
    verb.add_argument(
        "--model", action="store_true", help="SCRIPT is a model file: a family and its sizes, captured like a script"
    )
    verb.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print how long each pass over a script's step took and what it changed, and TensorFlow's start-up lines",
    )
    verb.add_argument("script", nargs="?", help="the script to plan")
    verb.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="arguments of the script; -np, -o, --cluster, --network, --set, --measured and --explain may also stand "
        "directly after the script (`--` ends them)",
    )
    verb.set_defaults(call=run_command, wrong=verb.error)


def _add_script_options(verb: argparse.ArgumentParser) -> None:
    """Adds the options that may stand before the script or directly after it."""
    verb.add_argument(
        "-np",
        dest="ranks",
        type=parse_positive,
        metavar="N",
        help="number of ranks (default: the devices of a cluster file, or 2)",
    )
    verb.add_argument("-o", dest="out", metavar="FILE", help="also write the plan as JSON")
    verb.add_argument("--cluster", metavar="FILE", help="cluster file (YAML), or local for this machine")
    verb.add_argument("--network", help="with --cluster local in a job of several hosts: type of their network")
    verb.add_argument(
        "--set",
        dest="fixed",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for a script: a key of the configuration (memory.zero=2 or zero=2), which overrides the script; for a "
        "described model: fix stages, tensor, data, micro_batch, micro_batches, recompute, zero, offload, chunks, "
        "context or experts, and compare with the plan without that; for both: 'attention/*.split=2', the number of "
        "ranks over which operations are sharded",
    )
    verb.add_argument("--measured", metavar="FILE", help="predict a script's step with this file of `whale profile`")
    verb.add_argument(
        "--explain",
        metavar="OP",
        help="explain the layout of an operation of the script (name or pattern), and what other layouts would cost",
    )


def _take_own_options(given: argparse.Namespace) -> argparse.Namespace:
    """Parses options of `whale plan` that stand directly after the script; the rest are the script's arguments.

    Options end at the first word that is no such option, or at `--`.
    """
    own = Parser(prog="whale plan", add_help=False, allow_abbrev=False)
    _add_script_options(own)
    named = {name for action in own._actions for name in action.option_strings}
    count, arguments = 0, given.arguments
    while count < len(arguments) and arguments[count].partition("=")[0] in named:
        count += 1 if "=" in arguments[count] else 2
    found = own.parse_args(arguments[:count], argparse.Namespace(**{**vars(given), "fixed": list(given.fixed)}))
    rest = arguments[count:]
    found.arguments = rest[1:] if rest[:1] == ["--"] else rest
    return found


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale plan`; returns the exit code."""
    if given.jobs or given.describe or given.profile:
        if given.config:
            given.wrong("--config is for scripts: a described model has no configuration keys, only --set")
        require_readable(given.jobs, given.offers, given.profile, given.cluster)
        require_writable(given.out)
        with refuse_inconsistent(given.jobs, given.offers, given.profile, given.cluster):
            return _place_jobs(given) if given.jobs else _plan_described(given)
    if given.offers:
        given.wrong("offers are for a described or measured model: add --describe or --profile")
    if given.script is None:
        given.wrong("there is nothing to plan: a script, --describe or --profile is needed")
    given = _take_own_options(given)
    if given.model and given.arguments:
        given.wrong(f"a model file takes no arguments; put options before the file: {' '.join(given.arguments)}")
    require_readable(given.script, given.measured, given.cluster)
    require_writable(given.out)
    choices = [one for one in given.fixed if ".split=" in one]
    settings = [one for one in given.fixed if one not in choices]
    if given.model and (settings or given.config):
        given.wrong("--set KEY=VALUE and --config are for scripts: a model file has fields for how it is divided")
    _refuse_degrees(given, settings)
    take_settings(given.config, settings)
    with show_progress(f"planning a step of {given.script}") as end, hide_startup_lines(given.verbose):
        from whale.tools.dry_run import PredictionTarget, main

        where = PredictionTarget(given.measured, given.cluster, given.network)
        arguments = tuple(given.arguments)
        return main(
            given.script,
            arguments,
            given.ranks,
            given.out,
            where,
            given.model,
            given.explain,
            choices,
            end,
            verbose=given.verbose,
        )


def _refuse_degrees(given: argparse.Namespace, settings: Sequence[str]) -> None:
    """Refuses choices of --set that exist for described models only, and names what a script has instead."""
    for one in settings:
        name, _, value = one.partition("=")
        if name in ("tensor", "data"):
            given.wrong(f"--set {one} is for --describe; a script has --set mesh={name}={value or 'N'}")
        if name in ("micro_batch", "chunks"):
            given.wrong(f"--set {one} is for --describe; a script has --set micro_batches=N")


def _plan_described(given: argparse.Namespace) -> int:
    from cost_model.cluster.allocation import read_named_cluster
    from whale.cgroup import cpu_quota
    from whale.planner import ask
    from whale.planner.report import planfile, show

    if given.describe and given.profile:
        raise PlanError(
            "--describe and --profile cannot be given together: a model is either described or measured",
            given=f"--describe {given.describe} and --profile {given.profile}",
            action="leave one of the two options out",
        )
    if (given.describe or "").partition(":")[0] in ask.CAPTURED:
        return _plan_captured(given)
    if given.offers:
        return _compare_offers(given)
    for option in ("rows", "deadline", "spend"):
        if getattr(given, option) is not None:
            raise PlanError(
                f"--{option} chooses between the offers of a file, and no file of offers is given",
                given=f"--{option} without --offers",
                action=f"add --offers FILE, or leave --{option} out",
            )
    if given.fixed and given.planner != "whale":
        raise PlanError(
            f"the planner {given.planner} cannot keep choices fixed, as --set asks",
            given=f"--set {given.fixed[0]} with --planner {given.planner}",
            action="leave out --set, or --planner",
        )
    if given.cluster is None:
        raise PlanError(
            "a described model can be planned only for a cluster, and none is given",
            action="add --cluster FILE, or --cluster local",
        )
    machines = read_named_cluster(given.cluster, given.network, cpu_quota())
    transformer, table, batch = _read_model(given)
    budget_s = given.budget or ask.find_budget_s(machines)
    limits = ask.limits(given.fixed, budget_s)
    with show_progress(f"searching, for {budget_s:g} s of a core at most"):
        plan = ask.plan(machines, batch, transformer, table, given.stack, limits, given.planner)
    if given.out:
        planfile.save(plan, given.out)
    print(show.show(plan, show.terminal_width()))
    if given.fixed:
        free = ask.plan(machines, batch, transformer, table, given.stack, ask.limits([], budget_s))
        line = f"{', '.join(given.fixed)}: {show.against(plan, free)}"
        if show.is_faster(plan, free):
            line += "; faster than what was found without it: keep it, or search longer with --budget"
        print("\n" + "\n".join(wrap(line, show.terminal_width())))
    if given.advise and transformer is not None:
        rows = ask.advise(machines, batch, transformer, given.stack, given.budget or ask.ADVICE_BUDGET_S)
        print("\n".join(["", "nearby models", *(f"  {row}" for row in rows)]))
    return 0


def _plan_captured(given: argparse.Namespace) -> int:
    """Plans a described model whose step is captured and planned like a script's (bert, resnet, ...); returns the exit
    code.
    """
    for option, value in (("--offers", given.offers), ("--set", given.fixed), ("--advise", given.advise)):
        if value:
            family = given.describe.partition(":")[0]
            raise PlanError(
                f"{option} is not available for {family} models",
                given=f"{option} with --describe {given.describe}",
                expected=f"{option} with gpt:, moe:, llama:, mixtral: or a config.json",
                action=f"leave {option} out",
            )
    if given.cluster is None:
        raise PlanError(
            "a described model can be planned only for a cluster, and none is given",
            action="add --cluster FILE, or --cluster local",
        )
    with show_progress("planning each strategy") as end, hide_startup_lines(given.verbose):
        from whale.tools.plan_model import main

        return main(given.describe, given.batch, given.cluster, given.network, given.out, given.budget, end)


def _read_model(given: argparse.Namespace) -> tuple[Transformer | None, LayerProfile | None, int]:
    """Returns (model of --describe, profile of --profile, global batch in rows); None for what is not given."""
    from whale.planner import ask
    from whale.planner.analytic_search import layer_profiles as tables

    transformer, batch = ask.describe(given.describe) if given.describe else (None, None)
    table = tables.read(given.profile) if given.profile else None
    known = [rows for rows in (given.batch, batch, table.batch if table else None) if rows is not None]
    batch = known[0] if known else None
    if batch is None:
        raise PlanError(
            "the size of the global batch is not known",
            given="neither --batch nor batch= in the model's description",
            expected="the number of rows of one step, over all ranks",
            action="add --batch ROWS, or batch=ROWS to the description",
        )
    return transformer, table, batch


def _compare_offers(given: argparse.Namespace) -> int:
    from whale.planner import ask, offers
    from whale.planner.report import planfile

    if given.cluster or given.advise or given.planner != "whale":
        raise PlanError(
            "--offers cannot be combined with --cluster, --advise or --planner",
            given=f"--offers {given.offers} with one of these options",
            expected="the clusters in the offers file",
            action="leave --cluster, --advise and --planner out",
        )
    transformer, table, batch = _read_model(given)
    wanted = offers.Wanted(given.rows, given.deadline, given.spend)
    limits = ask.limits(given.fixed, given.budget or ask.BUDGET_S)
    with show_progress("searching"):
        answers = offers.rank(offers.read_offers(given.offers), batch, transformer, table, given.stack, limits)
    chosen = offers.choose(answers, wanted)
    if chosen is not None and chosen.plan is not None and given.out:
        planfile.save(chosen.plan, given.out)
    print("\n".join(offers.format_ranking(answers, wanted)))
    return 0 if chosen is not None else 1


def _place_jobs(given: argparse.Namespace) -> int:
    from cost_model.cluster.allocation import read_named_cluster
    from whale.cgroup import cpu_quota
    from whale.planner import jobs

    others = ("describe", "profile", "offers", "out", "fixed", "advise", "batch")
    known = {"fixed": "--set", "out": "-o"}
    named = [known.get(name, f"--{name}") for name in others if getattr(given, name)]
    if given.cluster is None or named:
        raise PlanError(
            "--jobs needs one cluster, and takes its models from the jobs file",
            given=f"--jobs {given.jobs} {'with ' + ', '.join(named) if named else 'without --cluster'}",
            action="give only --jobs FILE --cluster FILE, and --network, --stack or --budget",
        )
    machines = read_named_cluster(given.cluster, given.network, cpu_quota())
    with show_progress("placing jobs"):
        placed = jobs.place(jobs.read_jobs(given.jobs), machines, given.stack, given.budget or jobs.BUDGET_S)
    print("\n".join(jobs.placement(placed, machines)))
    return 0
