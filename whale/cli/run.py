"""Implements `whale run`: starts a script on every rank."""

from __future__ import annotations

import argparse
import filecmp
import os
import re
from typing import Any

from whale.cli.given import add_settings, require_readable, require_writable, take_settings
from whale.errors import PlanError

# Options that may stand between `python` and a script, and are passed to the ranks; letters may be joined, as in -Bum.
_PYTHON_OPTION = re.compile(
    r"-(?P<plain>[bBdOquv]*)((?P<valued>[WX])(?P<value>.*)|(?P<module>m)(?P<name>.*))?", re.DOTALL
)
# What to write instead of options of horovodrun, deepspeed, torchrun, accelerate and mpirun.
_OTHERS = {
    "write -np N, the number of all ranks; with --hosts or --hostfile it may be left out":
    "--num-proc --num_proc --num_gpus --num-gpus --nproc_per_node --nproc-per-node --num_processes --num-processes "
    "--num_workers --ntasks",
    "write --hosts node1:2,node2:2, or --hostfile FILE":
    "--nnodes --num_nodes --num-nodes --num_machines --include --exclude -i -e --machinefile",
    "leave it out: ranks find each other without it":
    "--master_addr --master-addr --master_port --master-port --node_rank --node-rank --machine_rank --standalone "
    "--main_process_port --rdzv_backend --rdzv-backend --rdzv_endpoint --rdzv-endpoint --rdzv_id --rdzv-id --gloo "
    "--use-gloo --mpi --use-mpi --launcher --tcp --network-interface --network-interfaces --start-timeout "
    "--no_ssh_check",
    "leave it out: `whale run` sets it; the environment goes along to all ranks":
    "--allow-run-as-root --oversubscribe --bind-to --map-by -x",
    "leave it out: exchanges are ordered by the plan":
    "--cycle-time-ms --cache-capacity --disable-cache --autotune --hierarchical-allreduce",
    "write --hosts-from FILE: a file or a program that lists hosts": "--host-discovery-script --max-np --max-num-proc",
    "write --min-ranks M": "--min-np --min-num-proc",
    "write --max-restarts K": "--reset-limit --elastic-timeout",
    "write --set elastic=memory": "--elastic_training",
    "write --config whale.yaml, which `whale config --from ds_config.json` makes of a file of DeepSpeed's":
    "--deepspeed --deepspeed_config --config_file --config-file",
    "write --set auto_parallel=true": "--autotuning",
    "write --set compute_dtype=bfloat16": "--mixed_precision --mixed-precision",
    "write --set bucket_bytes=BYTES, if at all": "--fusion-threshold-mb",
    "write --set log=debug": "--log-level",
    "`whale doctor` says what works here": "--check-build -cb",
    "write `> FILE`: each line has its rank": "--output-filename",
    "name the port in ~/.ssh/config, which ssh reads": "--ssh-port",
    "write -m": "--module",
}  # fmt: skip


def add_parser(verbs: Any) -> None:
    """Adds `whale run` and its options to the subparsers ``verbs``."""
    verb = verbs.add_parser("run", help="start a script on every rank", description="Starts a script on every rank.")
    verb.add_argument(
        "-np", dest="ranks", type=int, metavar="N", help="number of ranks (default: all slots of the listed hosts)"
    )
    verb.add_argument("-H", "--hosts", metavar="H:N,...", help="hosts with their numbers of ranks (default: this host)")
    verb.add_argument("--hostfile", metavar="FILE", help="the hosts as a file: a name and slots=N on each line")
    verb.add_argument(
        "--hosts-from",
        metavar="FILE",
        help="like --hostfile, but read repeatedly, so that ranks join and leave an elastic run; if FILE is a program, "
        "its output is read",
    )
    verb.add_argument("--threads", type=int, metavar="K", help="threads per rank (default: the host's cores / ranks)")
    verb.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="start again after a fault, at most K times (default 0)",
    )
    verb.add_argument(
        "--min-ranks", type=int, default=1, metavar="M", help="start again only if M ranks are left (default 1)"
    )
    verb.add_argument(
        "--trace",
        "--timeline-filename",
        metavar="FILE",
        help="write a trace of all ranks, for ui.perfetto.dev, chrome://tracing or `whale why`",
    )
    verb.add_argument(
        "--logdir", metavar="DIR", help="write step times, bytes, waits, memory and plans for TensorBoard"
    )
    verb.add_argument(
        "--metrics-port",
        metavar="[ADDRESS:]PORT",
        help="serve metrics for Prometheus during the run; on localhost unless an address is given",
    )
    verb.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show every rank's errors, mpirun's messages, and at the end a summary of communication",
    )
    verb.add_argument("--plan", metavar="FILE", help="run the script's step under a plan that `whale plan -o` wrote")
    verb.add_argument(
        "--annotate", metavar="FILE", help="a JSON file that puts layers and variables into scopes, see wh.annotate"
    )
    verb.add_argument(
        "--mesh", metavar="AXES", help="named axes of the ranks, outermost first: stage=2,data=2,tensor=2"
    )
    add_settings(verb)
    verb.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    verb.add_argument("script", help="the script to run")
    verb.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    verb.others_options = {name: what for what, names in _OTHERS.items() for name in names.split()}
    verb.set_defaults(call=run_command, wrong=verb.error)


def run_command(given: argparse.Namespace) -> int:
    """Runs `whale run`; returns the exit code of the job."""
    from whale.launcher.job.metrics import parse_address
    from whale.launcher.mpirun import (
        ANNOTATE_VARIABLE,
        MESH_VARIABLE,
        PLAN_VARIABLE,
        Options,
        check_mesh,
        parse_hosts,
    )
    from whale.launcher.run import run
    from whale.launcher.scale_up import read_hosts

    require_readable(given.plan, given.annotate, given.hostfile)
    take_settings(given.config, given.settings)
    require_readable(given.hosts_from)
    listed = [name for name in ("--hosts", "--hostfile", "--hosts-from") if getattr(given, name[2:].replace("-", "_"))]
    if len(listed) > 1:
        given.wrong(f"the hosts are given twice: by {' and by '.join(listed)}")
    path = given.hosts_from or given.hostfile
    hosts = read_hosts(path) if path is not None else parse_hosts(given.hosts) if given.hosts is not None else ()
    if given.ranks is None:
        if not hosts:
            behind = "; behind the script it is the script's own" if "-np" in given.arguments else ""
            given.wrong(f"the following arguments are required: -np{behind}")
        given.ranks = sum(host.slots for host in hosts)
    python_options = _drop_python(given)
    require_writable(given.trace, "--trace")
    if given.plan is not None:
        _check_plan(given)
        os.environ[PLAN_VARIABLE] = os.path.abspath(given.plan)
    if given.annotate is not None:
        os.environ[ANNOTATE_VARIABLE] = os.path.abspath(given.annotate)
    if given.mesh is not None:
        check_mesh(given.mesh, given.ranks)
        os.environ[MESH_VARIABLE] = given.mesh
    return run(
        Options(
            ranks=given.ranks,
            target=given.script,
            arguments=tuple(given.arguments),
            as_module=given.as_module,
            hosts=hosts,
            hosts_from=given.hosts_from,
            threads=given.threads,
            verbose=given.verbose,
            trace=given.trace,
            logdir=given.logdir,
            metrics=parse_address(given.metrics_port) if given.metrics_port is not None else None,
            max_restarts=given.max_restarts,
            min_ranks=given.min_ranks,
            python_options=python_options,
        )
    )


def _drop_python(given: argparse.Namespace) -> tuple[str, ...]:
    """Removes the interpreter from `whale run -np 2 python -u train.py`, a form that mpirun and horovodrun require.

    Returns:
        the options for Python (here -u), which the ranks' interpreters get.
    """
    name = os.path.basename(given.script)
    if given.as_module or not re.fullmatch(r"python(3(\.\d+)?)?", name) or not given.arguments:
        return ()
    rest, options = list(given.arguments), []
    while rest and rest[0].startswith("-") and not given.as_module:
        option = rest.pop(0)
        found = _PYTHON_OPTION.fullmatch(option) if option != "-" else None
        if found is None:
            given.wrong(
                f"`{given.script} {option}` cannot start ranks: give a script or `-m MODULE`, before it only "
                "Python's options -b -B -d -O -q -u -v -W -X"
            )
            return ()  # argparse has ended the process
        if found["plain"]:
            options.append(f"-{found['plain']}")
        if found["valued"]:
            if not found["value"] and not rest:
                given.wrong(f"Python's option -{found['valued']} needs a value")
            options += [f"-{found['valued']}", found["value"] or rest.pop(0)]
        given.as_module = bool(found["module"])
        if found["name"]:
            rest.insert(0, found["name"])
    if not rest:
        given.wrong(f"there is no script after `{given.script}`")
    given.script, *given.arguments = rest
    return tuple(options)


def _check_plan(given: argparse.Namespace) -> None:
    """Checks, before a rank is started, that --plan is for this script and this number of ranks.

    Scripts are compared by file name or content, wherever they lie. Whether the script's step is still the one that was
    planned is checked when it runs.

    Raises:
        PlanError: the plan is for another script or another number of ranks.
    """
    from whale.planner.report import planfile
    from whale.tools.run_as_main import locate

    plan = planfile.load(given.plan)
    plan.check_ranks(given.plan, given.ranks)
    if not plan.script or given.as_module or not os.path.isfile(given.script):
        return
    planned = locate(plan.script, given.plan)[0]
    if os.path.basename(planned) == os.path.basename(given.script):
        return
    if os.path.isfile(planned) and filecmp.cmp(planned, given.script, shallow=False):
        return
    raise PlanError(
        "the plan was made for another script",
        given=f"{given.plan}, of {os.path.relpath(planned)}",
        expected=given.script,
        action=f"plan this script: `whale plan -np {given.ranks} -o FILE {given.script}`; if both scripts have the "
        f"same step, run with `--set mesh.plan={given.plan}`",
    )
