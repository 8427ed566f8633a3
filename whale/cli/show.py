"""Implements whale show, explain, diff, check, trace and html: prints, questions, compares or draws a saved plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale.cli.given import positive, readable, without_startup_lines, writable
from whale.cli.inconsistent import refused_if_inconsistent
from whale.errors import PlanError

if TYPE_CHECKING:
    from whale.ir.plan import Plan
    from whale.planner.report.draw_captured import Drawn
    from whale.planner.report.planfile import PlanFile


def add_to(verbs: Any) -> None:
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
        "--steps", type=positive, default=20, metavar="N", help="with --analyze: steps that are measured (20)"
    )
    verb.add_argument(
        "--measured", metavar="FILE", help="with --analyze: what `whale profile` wrote; the user's unless"
    )
    verb.set_defaults(call=call)
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
        "stage=2, device=t4, batch=512 (what if), a host's name and count, a network's and kind",
    )
    verb.add_argument(
        "--budget", type=float, default=8.0, metavar="S", help="seconds for a question's search (default 8)"
    )
    verb.set_defaults(call=_explain)
    verb = verbs.add_parser("diff", help="compare two plans", description="What differs between two saved plans.")
    verb.add_argument("plan", help="a plan's JSON file")
    verb.add_argument("other", help="another plan's")
    verb.set_defaults(call=_diff)
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
    verb = verbs.add_parser("html", help="draw a plan as a page", description="Writes one self-contained offline page.")
    verb.add_argument("plan", help="the plan's JSON file")
    verb.add_argument("-o", dest="out", required=True, type=Path, metavar="FILE", help="the page")
    verb.add_argument(
        "--trace", metavar="FILE", help="what `whale run --trace FILE` wrote: a step as it ran, below the predicted one"
    )
    _add_devices(verb)
    verb.set_defaults(call=_html)


def _add_devices(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--measured", metavar="FILE", help="of a script's plan: what `whale profile` wrote")
    verb.add_argument("--cluster", metavar="FILE", help="of a script's plan: predict on this cluster instead")


def call(given: argparse.Namespace) -> int:
    """Runs `whale show`."""
    data = _bytes(given.plan)
    if given.analyze:
        return _analyze(given, data)
    with refused_if_inconsistent(given.plan):
        return _show(given, data)


def _show(given: argparse.Namespace, data: bytes) -> int:
    from whale.planner.report import planfile

    if planfile.is_spread(data):
        from whale.planner.report.show import layer_table, show, terminal_width

        plan = planfile.loads(data, given.plan)
        print(show(plan, terminal_width()))
        if given.verbose:
            print("\n".join(["", *layer_table(plan)]))
        return 0
    from whale.ir.plan_text import format_plan

    captured = _captured(data, given.plan)
    print(format_plan(captured), end="")
    if given.verbose:
        from whale.ir.plan_explain import op_table

        print("\n".join(op_table(captured)))
    return 0


def _analyze(given: argparse.Namespace, data: bytes) -> int:
    import msgspec

    from cost_model.graph.machine_profile import default_path, read
    from whale.launcher.analyze import measure
    from whale.planner.report import analysis, planfile
    from whale.runtime.tools.as_main import located

    if planfile.is_spread(data):
        raise PlanError(
            "a described model has no program that could run",
            given=given.plan,
            expected="a plan that `whale plan -o FILE train.py` made",
            action="plan a script, or see what is predicted with `whale show`",
        )
    plan = _captured(data, given.plan)
    profile = given.measured or str(default_path())
    read(profile)
    prediction, ranks = measure(given.plan, located(plan.script, given.plan), plan.ranks, given.steps, profile)
    measured = [msgspec.json.decode(one, type=analysis.MeasuredRank) for one in ranks]
    print(analysis.report(msgspec.json.decode(prediction, type=analysis.PredictedStep), measured))
    return 0


def _captured(data: bytes, path: str) -> Plan:
    from whale.ir.plan import plan_from_json

    try:
        return plan_from_json(data)
    except ValueError as error:
        raise PlanError(
            "the plan cannot be read",
            given=path,
            reason=str(error),
            expected="a file that `whale plan -o` wrote",
            action="make the plan again",
        ) from error


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise PlanError(
            "the plan cannot be read",
            given=path,
            reason=error.strerror,
            expected="a file that `whale plan -o` wrote",
            action="correct the path",
        ) from error


def _explain(given: argparse.Namespace) -> int:
    with refused_if_inconsistent(given.plan):
        return _explained(given)


def _explained(given: argparse.Namespace) -> int:
    from whale.planner.report import planfile

    data = _bytes(given.plan)
    if not planfile.is_spread(data):
        from whale.ir.plan_explain import explained_of_plan

        print("\n".join(explained_of_plan(_captured(data, given.plan), given.what)))
        return 0
    from whale.planner.report.show import explain
    from whale.planner.why import answer

    plan = planfile.loads(data, given.plan)
    print(explain(plan, int(given.what)) if given.what.isdigit() else answer(plan, given.what, given.budget))
    return 0


def _diff(given: argparse.Namespace) -> int:
    with refused_if_inconsistent(given.plan, given.other):
        return _compared(given)


def _compared(given: argparse.Namespace) -> int:
    from whale.ir.plan_diff import diff_plans
    from whale.planner.report import planfile
    from whale.planner.report.show import diff

    one, other = _bytes(given.plan), _bytes(given.other)
    described = [planfile.is_spread(data) for data in (one, other)]
    if described[0] != described[1]:
        raise PlanError(
            "two plans of different kinds cannot be compared",
            given=f"{given.plan}, {given.other}",
            expected="two plans of scripts, or two of described models",
        )
    if described[0]:
        print(diff(planfile.loads(one, given.plan), planfile.loads(other, given.other)))
    else:
        print(diff_plans(_captured(one, given.plan), _captured(other, given.other)))
    return 0


def _check(given: argparse.Namespace) -> int:
    import msgspec

    from cost_model.cluster import cluster_file
    from whale.planner.report import planfile

    data = _bytes(given.plan)
    readable(given.cluster)
    other = cluster_file.read(given.cluster) if given.cluster else None
    if planfile.is_spread(data):
        with refused_if_inconsistent(given.plan, given.cluster):
            plan = planfile.loads(data, given.plan)
            problems = (msgspec.structs.replace(plan, cluster=other) if other else plan).problems()
            good = plan.strategy.summary()
    else:
        captured = _captured(data, given.plan)
        with without_startup_lines():
            from whale.runtime.tools import plan_check

            problems = plan_check.problems(captured, given.plan, other)
            good = plan_check.summary(captured)
    print("\n".join(problems) or f"good: {good}")
    return 1 if problems else 0


def _trace(given: argparse.Namespace) -> int:
    """Writes a plan's timeline, whether it is of a description or of a script."""
    plan = _to_be_drawn(given)
    if isinstance(plan, bytes):
        from whale.planner.report.draw_captured import trace as of_script

        text = of_script(_replayed(given, plan))
    else:
        from whale.planner.report.draw import trace as of_description

        with refused_if_inconsistent(given.plan):
            text = of_description(plan)
    given.out.write_text(text)
    return 0


def _html(given: argparse.Namespace) -> int:
    """Writes a plan's page, with a step as it ran where there is a trace of it."""
    from whale.planner.report import measured_step

    readable(given.trace)
    plan = _to_be_drawn(given)
    events = measured_step.read(Path(given.trace)) if given.trace else []

    def measured(predicted_s: float) -> dict[str, Any] | None:
        return measured_step.step_drawn(events, given.trace, predicted_s) if events else None

    if isinstance(plan, bytes):
        from whale.planner.report.draw_captured import html as of_script

        drawn = _replayed(given, plan, with_sliders=True)
        text = of_script(drawn, measured(drawn.prediction.step_s))
    else:
        from whale.planner.report.draw import html as of_description

        with refused_if_inconsistent(given.plan):
            text = of_description(plan, measured(plan.evaluate()[2].step_s))
    given.out.write_text(text)
    return 0


def _to_be_drawn(given: argparse.Namespace) -> PlanFile | bytes:
    """Returns a described model's plan, or the text of a script's; reports first what cannot be read or written."""
    from whale.planner.report import planfile

    data = _bytes(given.plan)
    readable(given.measured, given.cluster)
    writable(given.out)
    if not planfile.is_spread(data):
        return data
    with refused_if_inconsistent(given.plan):
        return planfile.loads(data, given.plan)


def _replayed(given: argparse.Namespace, data: bytes, with_sliders: bool = False) -> Drawn:
    """Captures a plan's script again and simulates its step under the plan."""
    from cost_model.graph.machine_profile import default_path, read

    _captured(data, given.plan)
    if given.cluster is None:
        read(given.measured or default_path())  # what cannot be read is told before the script runs
    with without_startup_lines():
        from whale.runtime.tools.dry_run import Prediction, replayed

        return replayed(given.plan, Prediction(given.measured, given.cluster), with_sliders)
