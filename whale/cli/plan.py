"""whale plan: shows how a script would be spread, without starting ranks."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(verbs: Any) -> None:
    """Adds the verb to the command's parser."""
    verb = verbs.add_parser(
        "plan",
        help="show how a script would be spread over ranks",
        description="Captures a script's program and shows the plan for N ranks, without starting them.",
    )
    verb.add_argument("-np", dest="ranks", type=int, default=2, metavar="N", help="number of ranks (default 2)")
    verb.add_argument("-o", dest="out", metavar="FILE", help="also write the plan as JSON")
    verb.add_argument("script", help="the script to plan")
    verb.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    verb.set_defaults(call=call)


def call(given: argparse.Namespace) -> int:
    """Runs the verb."""
    from whale.runtime.dry_run import main

    return main(given.script, tuple(given.arguments), given.ranks, given.out) or 0
