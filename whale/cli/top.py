"""Implements `whale top`: shows a running job in the terminal, as top does for processes."""

from __future__ import annotations

import argparse
from typing import Any

from whale.cli.given import parse_positive, parse_seconds


def add_parser(verbs: Any) -> None:
    """Adds `whale top` and its options to the subparsers ``verbs``."""
    verb = verbs.add_parser(
        "top",
        help="show a running job: steps, waits, memory of its ranks",
        description="Shows repeatedly what the ranks of a run on this host do: their steps, how long these take and "
        "wait for other ranks, memory, and what a rank is waiting for. Ends with the run, or by Ctrl-C.",
    )
    verb.add_argument(
        "run",
        nargs="?",
        type=parse_positive,
        metavar="RUN",
        help="process id of `whale run` (default: the only run on this host)",
    )
    verb.add_argument("--once", action="store_true", help="print once and end")
    verb.add_argument(
        "--every", type=parse_seconds, default=1.0, metavar="S", help="seconds between updates (default 1)"
    )
    verb.set_defaults(call=run_command)


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale top`; returns the exit code."""
    from whale.launcher.top import choose_run, show_run

    return show_run(choose_run(given.run), given.every, given.once)
