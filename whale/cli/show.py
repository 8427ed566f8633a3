"""Implements whale show, explain, diff, check, trace and html: prints, questions, compares or draws a saved plan."""

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
    """Adds the verbs to the command's parser."""
    verb = verbs.add_parser("show", help="print a saved plan", description="Prints a plan that `whale plan -o` wrote.")
    verb.add_argument("plan", help="the plan's JSON file")
    verb.add_argument("-v", dest="verbose", action="store_true", help="a row for each operation, or layer, as well")
    verb.add_argument(
        "--analyze",
        action="store_true",
        help="run the plan's script under it on this host, and put what is measured beside what is predicted",
    )
    verb.add_argument(
        "--steps", type=parse_positive, default=20, metavar="N", help="with --analyze: steps that are measured (20)"
    )
    verb.add_argument(
        "--measured", metavar="FILE", help="with --analyze: what `whale profile` wrote; the user's unless"
    )
    verb.set_defaults(call=run_command)
    verb = verbs.add_parser(
        "explain",
        help="say where an operation or a layer lies and why",
        description="One operation of a script's plan (a name, a part of it, or a pattern), or one layer of a "
        "described model's, and what else would cost.",
    )
    verb.add_argument("plan", help="the plan's JSON file")
    verb.add_argument(
        "what",
        metavar="OP",
        help="an operation's name; for a described model a layer's number, from 0, or a question: tensor=4 (why not), "
        "stage=2, device=t4, batch=512 (what if), a host's name and count, a network's and kind, cluster=FILE (what to "
        "move when the cluster has changed, and when that pays)",
    )
    verb.add_argument(
        "--budget", type=float, default=8.0, metavar="S", help="seconds for a question's search (default 8)"
    )
    verb.set_defaults(call=_explain)
    verb = verbs.add_parser(
        "diff",
        help="compare two plans",
        description="What differs between two saved plans, of scripts or of described models.",
    )
    verb.add_argument("plan", help="a plan's JSON file")
    verb.add_argument("other", help="another plan's")
    verb.set_defaults(call=_run_diff)
    verb = verbs.add_parser(
        "check",
        help="check a plan against a cluster",
        description="Checks layers, rows, devices and memory of a plan, independently of the planner; of a script's "
        "plan, whose program is captured again, every operation's layout, what ranks send each other, and memory. The "
        "exit code is 1 if something is wrong.",
    )
    verb.add_argument("plan", help="the plan's JSON file")
    verb.add_argument("--cluster", metavar="FILE", help="another cluster file than the plan's own")
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
        description="Writes one self-contained offline page of a plan, or of several, whose steps stand side by side.",
    )
    verb.add_argument("plan", nargs="+", help="the plan's JSON file; several are compared")
    verb.add_argument("-o", dest="out", required=True, type=Path, metavar="FILE", help="the page")
    verb.add_argument(
        "--trace", metavar="FILE", help="what `whale run --trace FILE` wrote: a step as it ran, below the predicted one"
    )
    _add_devices(verb)
    verb.set_defaults(call=_run_html)


def _add_devices(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--measured", metavar="FILE", help="of a program's plan: what `whale profile` wrote")
    verb.add_argument("--cluster", metavar="FILE", help="of a program's plan: predict on this cluster instead")


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale show`."""
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
            "the plan has no script that could run",
            given=given.plan,
            expected="a plan that `whale plan -o FILE train.py` made",
            action="plan a script, or see what is predicted with `whale show`",
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
    """Writes a plan's timeline."""
    plan = _read_drawable(given.plan, given)
    with _import_plan_tools(plan, given.plan) as tools:
        text = tools.trace(plan, given.plan, given.measured, given.cluster)
    given.out.write_text(text)
    return 0


def _run_html(given: argparse.Namespace) -> int:
    """Writes the page of plans, with a step as it ran where there is a trace of it."""
    from whale.planner.report import measured_step
    from whale.planner.report.draw import page

    require_readable(given.trace)
    plans = [_read_drawable(path, given) for path in given.plan]
    if given.trace and len(plans) > 1:
        raise PlanError(
            "a trace is of one run, and the page of several plans",
            given=f"--trace {given.trace} and {len(plans)} plans",
            expected="the plan that the run had",
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
    """Reads a plan, and reports first what cannot be read or written."""
    from cost_model.graph.machine_profile import default_path, read
    from whale.planner.report import planfile

    plan = planfile.load(path)
    require_readable(given.measured, given.cluster)
    require_writable(given.out)
    measured = given.measured or (None if plan.cluster else default_path())
    if plan.program is not None and given.cluster is None and measured and (given.measured or Path(measured).exists()):
        read(measured)  # what cannot be read is told before the script runs
    return plan


@contextmanager
def _import_plan_tools(plan: PlanFile, *paths: object) -> Iterator[Any]:
    """Yields what checks and draws a plan: of a program it captures a step again, which needs TensorFlow."""
    if plan.program is None:
        with refuse_inconsistent(*paths):
            yield import_module("whale.planner.report.of_model")
        return
    with hide_startup_lines():
        yield import_module("whale.tools.program_report")
