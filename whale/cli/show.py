"""whale show: prints a saved plan."""

from __future__ import annotations

import argparse
from typing import Any

from whale.errors import PlanError


def add_to(verbs: Any) -> None:
    """Adds the verb to the command's parser."""
    verb = verbs.add_parser("show", help="print a saved plan", description="Prints a plan that `whale plan -o` wrote.")
    verb.add_argument("plan", help="the plan's JSON file")
    verb.set_defaults(call=call)


def call(given: argparse.Namespace) -> int:
    """Runs the verb."""
    from whale.ir.plan import load_plan
    from whale.ir.text import format_plan

    try:
        plan = load_plan(given.plan)
    except OSError as error:
        raise PlanError(
            "the plan cannot be read",
            given=given.plan,
            reason=error.strerror,
            expected="a file that `whale plan -o` wrote",
            action="correct the path",
        ) from error
    print(format_plan(plan))
    return 0
