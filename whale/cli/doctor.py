"""Implements `whale doctor`: looks for problems of this machine that stop or slow a run."""

from __future__ import annotations

import argparse
from typing import Any

from whale.cli.given import parse_seconds


def add_parser(verbs: Any) -> None:
    """Adds `whale doctor` and its options to the subparsers ``verbs``."""
    verb = verbs.add_parser(
        "doctor",
        help="look for what stops or slows a run here",
        description="Checks the software and the machine, starts a trial run of two processes, and says what to do "
        "about each problem.",
        epilog="The exit code is 1 if there is a problem, 0 otherwise.",
    )
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.add_argument("--quick", action="store_true", help="skip the trial run of two processes")
    verb.add_argument(
        "--timeout", type=parse_seconds, default=120.0, metavar="S", help="seconds for the trial run (default 120)"
    )
    verb.set_defaults(call=run_command)


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale doctor`; returns 1 if there is a problem, else 0."""
    from whale.doctor.report import main

    return main(as_json=given.json, with_trial=not given.quick, timeout_s=given.timeout)
