"""Implements `whale show`, explain, diff, check, trace and html: prints, explains, compares, checks or draws a saved
plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale.cli.given import hide_startup_lines, parse_positive, refuse_inconsistent, require_readable, require_writable
from whale.errors import PlanError

if TYPE_CHECKING:
    from whale.planner.report.planfile import PlanFile


def add_parser(verbs: Any) -> None:
    """Adds `whale show`, explain, diff, check, trace and html to the subparsers ``verbs``."""
    verb = verbs.add_parser("show", help="print a saved plan", description="Prints a plan that `whale plan -o` wrote.")
    verb.add_argument("plan", help="the plan's JSON file")
    verb.add_argument("-v", dest="verbose", action="store_true", help="also print a row for each operation or layer")
    verb.add_argument(
        "--analyze",
        action="store_true",
        help="run the plan's script under the plan on this host, and compare measured with predicted figures",
    )
    verb.add_argument(
        "--steps", type=parse_positive, default=20, metavar="N", help="with --analyze: steps to measure (default 20)"
    )
    verb.add_argument(
        "--measured", metavar="FILE", help="with --analyze: a file that `whale profile` wrote (default: the user's)"
    )
    verb.set_defaults(call=run_command)
    verb = verbs.add_parser(
        "explain",
        help="explain the layout of an operation, or the place of a layer",
        description="Explains one operation of a script's plan (a name, a part of it, or a pattern), or one layer of a "
        "described model's plan, and what the alternatives would cost.",
    )
    verb.add_argument("plan", help="the plan's JSON file")
    verb.add_argument(
        "what",
        metavar="OP",
        help="an operation's name; for a described model a layer's number, from 0, or a question: tensor=4 (why not), "
        "stage=2, device=t4, batch=512 (what if), HOST=COUNT, NETWORK=KIND, cluster=FILE (what to move when the "
        "cluster has changed, and when that pays off)",
    )
    verb.add_argument(
        "--budget", type=float, default=8.0, metavar="S", help="seconds for a question's search (default 8)"
    )
    verb.set_defaults(call=_explain)
    verb = verbs.add_parser(
        "diff",
        help="compare two plans",
        description="Prints the differences between two saved plans, of scripts or of described models.",
    )
    verb.add_argument("plan", help="a plan's JSON file")
    verb.add_argument("other", help="the JSON file of another plan")
    verb.set_defaults(call=_run_diff)
    verb = verbs.add_parser(
        "check",
        help="check a plan against a cluster",
        description="Checks layers, rows, devices and memory of a plan, independently of the planner. For a script's "
        "plan, the program is captured again, and every operation's layout, what ranks send each other, and memory are "
        "checked. The exit code is 1 if something is wrong.",
    )
    verb.add_argument("plan", help="the plan's JSON file")
    verb.add_argument("--cluster", metavar="FILE", help="cluster file to check against, instead of the plan's own")
    verb.set_defaults(call=_check)
    verb = verbs.add_parser(
        "trace", help="write a plan's timeline", description="Writes the simulated timeline for ui.perfetto.dev."
    )
    verb.add_argument("plan", help="the plan's JSON file")
    verb.add_argument("-o", dest="out", required=True, type=Path, metavar="FILE", help="the trace, JSON")
    _add_devices(verb)
    verb.set_defaults(call=_trace)
    verb = verbs.add_parser(
        "html",
        help="draw plans as a page",
        description="Writes one self-contained HTML page of a plan, or of several plans side by side.",
    )
    verb.add_argument("plan", nargs="+", help="the plan's JSON file; several are compared")
    verb.add_argument("-o", dest="out", required=True, type=Path, metavar="FILE", help="the page")
    verb.add_argument(
        "--trace",
        metavar="FILE",
        help="a trace that `whale run --trace` wrote: draw a measured step below the predicted",
    )
    _add_devices(verb)
    verb.set_defaults(call=_run_html)


def _add_devices(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--measured", metavar="FILE", help="for a script's plan: predict with a file of `whale profile`")
    verb.add_argument("--cluster", metavar="FILE", help="for a script's plan: predict for this cluster instead")


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale show`; returns the exit code."""
    from whale.planner.report import planfile
    from whale.planner.report.show import details, show, terminal_width

    plan = planfile.load(given.plan)
    if given.analyze:
        return _analyze(given, plan)
    with refuse_inconsistent(given.plan):
        print(show(plan, terminal_width()))
        if given.verbose:
            print("\n".join(["", *details(plan, terminal_width())]))
    return 0


def _analyze(given: argparse.Namespace, plan: PlanFile) -> int:
    import msgspec

    from cost_model.graph.machine_profile import default_path, read
    from whale.launcher.run import measure_script
    from whale.planner.report import analysis
    from whale.tools.run_as_main import locate

    if not plan.script:
        raise PlanError(
            "the plan was not made from a script, so that no script can be run and measured",
            given=given.plan,
            expected="a plan that `whale plan -o FILE train.py` made",
            action="plan a script, or leave --analyze out: `whale show` prints the prediction",
        )
    profile = given.measured or str(default_path())
    read(profile)
    script = locate(plan.script, given.plan)
    prediction, ranks = measure_script(given.plan, script, plan.strategy.ranks, given.steps, profile)
    measured = [msgspec.json.decode(one, type=analysis.MeasuredRank) for one in ranks]
    print(analysis.report(msgspec.json.decode(prediction, type=analysis.PredictedStep), measured))
    return 0


def _explain(given: argparse.Namespace) -> int:
    from whale.ir.plan_text import fit
    from whale.planner.report import planfile
    from whale.planner.report.show import terminal_width
    from whale.planner.why import explain

    plan = planfile.load(given.plan)
    with refuse_inconsistent(given.plan):
        print("\n".join(fit(explain(plan, given.what, given.budget).splitlines(), terminal_width())))
    return 0


def _run_diff(given: argparse.Namespace) -> int:
    from whale.ir.plan_text import fit
    from whale.planner.report import planfile
    from whale.planner.report.show import diff, terminal_width

    one, other = planfile.load(given.plan), planfile.load(given.other)
    with refuse_inconsistent(given.plan, given.other):
        print("\n".join(fit(diff(one, other).splitlines(), terminal_width())))
    return 0


def _check(given: argparse.Namespace) -> int:
    from cost_model.cluster import cluster_file
    from whale.ir.plan_text import fit
    from whale.planner.report import planfile
    from whale.planner.report.show import terminal_width

    plan = planfile.load(given.plan)
    require_readable(given.cluster)
    other = cluster_file.read(given.cluster) if given.cluster else None
    with _import_plan_tools(plan, given.plan, given.cluster) as tools:
        problems = tools.problems(plan, given.plan, other)
        good = plan.strategy.format_summary()
    print("\n".join(fit(problems or [f"good: {good}"], terminal_width())))
    return 1 if problems else 0


def _trace(given: argparse.Namespace) -> int:
    """Runs `whale trace`: writes a plan's simulated timeline."""
    plan = _read_drawable(given.plan, given)
    with _import_plan_tools(plan, given.plan) as tools:
        text = tools.trace(plan, given.plan, given.measured, given.cluster)
    given.out.write_text(text)
    return 0


def _run_html(given: argparse.Namespace) -> int:
    """Runs `whale html`: writes a page of plans, with a measured step below the predicted one if --trace is given."""
    from whale.planner.report import measured_step
    from whale.planner.report.draw import page

    require_readable(given.trace)
    plans = [_read_drawable(path, given) for path in given.plan]
    if given.trace and len(plans) > 1:
        raise PlanError(
            "a trace is of one run, but several plans were given",
            given=f"--trace {given.trace} and {len(plans)} plans",
            expected="one plan: the one that the run used",
            action=f"whale html {given.plan[0]} --trace {given.trace} -o {given.out}",
        )
    events = measured_step.read(Path(given.trace)) if given.trace else []

    def find_measured(predicted_s: float) -> dict[str, Any] | None:
        return measured_step.step_drawn(events, given.trace, predicted_s) if events else None

    described = []
    for path, plan in zip(given.plan, plans):
        with _import_plan_tools(plan, path) as tools:
            data = tools.describe_page(plan, path, given.measured, given.cluster, find_measured)
        described.append({**data, "name": path})
    given.out.write_text(page(described))
    return 0


def _read_drawable(path: str, given: argparse.Namespace) -> PlanFile:
    """Reads a plan, and checks that all files to read or write are usable before the slow work begins."""
    from cost_model.graph.machine_profile import default_path, read
    from whale.planner.report import planfile

    plan = planfile.load(path)
    require_readable(given.measured, given.cluster)
    require_writable(given.out)
    measured = given.measured or (None if plan.cluster else default_path())
    if plan.program is not None and given.cluster is None and measured and (given.measured or Path(measured).exists()):
        read(measured)  # raises an error before the slow capture begins
    return plan


@contextmanager
def _import_plan_tools(plan: PlanFile, *paths: object) -> Iterator[Any]:
    """Yields the module that checks and draws a plan: `of_model`, or for a script's plan `program_report`.

    The latter captures the step again, which needs TensorFlow.
    """
    if plan.program is None:
        with refuse_inconsistent(*paths):
            yield import_module("whale.planner.report.of_model")
        return
    with hide_startup_lines():
        yield import_module("whale.tools.program_report")
