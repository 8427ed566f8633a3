"""whale run: starts a script on every rank."""

from __future__ import annotations

import argparse
import os
from typing import Any

from whale.cli.given import readable, writable


def add_to(verbs: Any) -> None:
    """Adds the verb to the command's parser."""
    verb = verbs.add_parser("run", help="start a script on every rank", description="Starts a script on every rank.")
    verb.add_argument("-np", dest="ranks", type=int, required=True, metavar="N", help="number of ranks")
    verb.add_argument("--hosts", metavar="H:N,...", help="hosts and their numbers of ranks; this host unless given")
    verb.add_argument(
        "--threads", type=int, metavar="K", help="threads per rank; unless given, the host's cores / ranks"
    )
    verb.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="start again after a fault, at most K times (default 0)",
    )
    verb.add_argument(
        "--min-ranks", type=int, default=1, metavar="M", help="start again only where M ranks are left (default 1)"
    )
    verb.add_argument(
        "--trace",
        metavar="FILE",
        help="write where the time of all ranks goes, for ui.perfetto.dev or chrome://tracing",
    )
    verb.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show every rank's errors, mpirun's messages, and at the end what was communicated",
    )
    verb.add_argument("--plan", metavar="FILE", help="run the script's step under a plan of `whale plan -o FILE`")
    verb.add_argument(
        "--annotate", metavar="FILE", help="put layers and variables into scopes by name: a JSON file, see wh.annotate"
    )
    verb.add_argument(
        "--mesh", metavar="AXES", help="named axes of the ranks, outermost first: stage=2,data=2,tensor=2"
    )
    verb.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    verb.add_argument("script", help="the script to run")
    verb.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    verb.set_defaults(call=call)


def call(given: argparse.Namespace) -> int:
    """Runs the verb."""
    from whale.launcher.mpirun import ANNOTATE_VARIABLE, MESH_VARIABLE, PLAN_VARIABLE, Options, parse_hosts
    from whale.launcher.run import run

    readable(given.plan, given.annotate)
    writable(given.trace, "--trace")
    if given.plan is not None:
        os.environ[PLAN_VARIABLE] = os.path.abspath(given.plan)
    if given.annotate is not None:
        os.environ[ANNOTATE_VARIABLE] = os.path.abspath(given.annotate)
    if given.mesh is not None:
        os.environ[MESH_VARIABLE] = given.mesh
    return run(
        Options(
            ranks=given.ranks,
            target=given.script,
            arguments=tuple(given.arguments),
            as_module=given.as_module,
            hosts=parse_hosts(given.hosts) if given.hosts is not None else (),
            threads=given.threads,
            verbose=given.verbose,
            trace=given.trace,
            max_restarts=given.max_restarts,
            min_ranks=given.min_ranks,
        )
    )
