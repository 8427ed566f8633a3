"""Implements `whale why`: says what a traced run spent its time on, and what to do about it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from whale.cli.given import refuse_inconsistent, require_readable


def add_parser(verbs: Any) -> None:
    """Adds the verb to the command's parser."""
    verb = verbs.add_parser(
        "why",
        help="say why a run is slow, from its trace",
        description="Says where the time of a run went, by what `whale run --trace FILE` wrote: the three things that "
        "cost most, and what to do about each.",
    )
    verb.add_argument("run", metavar="RUN", help="the trace")
    verb.set_defaults(call=run_command)


def run_command(given: argparse.Namespace) -> int:
    """Runs the verb."""
    from whale.planner.report.bottlenecks import format_costs
    from whale.planner.report.measured_step import read
    from whale.planner.report.show import terminal_width

    require_readable(given.run)
    events = read(Path(given.run))
    with refuse_inconsistent(given.run):
        print(format_costs(events, given.run, terminal_width()))
    return 0
