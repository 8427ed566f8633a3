"""Implements `whale why`: reports what a traced run spent its time on, with advice."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from whale.cli.given import refuse_inconsistent, require_readable


def add_parser(verbs: Any) -> None:
    """Adds `whale why` and its options to the subparsers ``verbs``."""
    verb = verbs.add_parser(
        "why",
        help="say why a run is slow, from its trace",
        description="Reads a trace that `whale run --trace FILE` wrote, and reports where the time of the run went: "
        "the three largest costs, and what to do about each.",
    )
    verb.add_argument("run", metavar="TRACE", help="the trace file")
    verb.set_defaults(call=run_command)


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale why`; returns the exit code."""
    from whale.planner.report.bottlenecks import format_costs
    from whale.planner.report.measured_step import read
    from whale.planner.report.show import terminal_width

    require_readable(given.run)
    events = read(Path(given.run))
    with refuse_inconsistent(given.run):
        print(format_costs(events, given.run, terminal_width()))
    return 0
