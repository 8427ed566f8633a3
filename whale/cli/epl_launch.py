"""Implements `epl-launch` of the Easy Parallel Library: starts a script on every rank, as ``whale run`` does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from whale.errors import ClusterError, WhaleError
from whale.launcher.mpirun import Options, parse_hosts
from whale.launcher.run import run

# Read by `whale.cli.epl_rank`, which the ranks run in place of the script, as the script may be a shell script.
_LOGS_VARIABLE, _SCRIPT_VARIABLE = "EPL_LAUNCH_LOGS", "EPL_LAUNCH_SCRIPT"


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `epl-launch`, with the options of the original command."""
    found = argparse.ArgumentParser(
        prog="epl-launch", description="Starts a script of the Easy Parallel Library on every rank."
    )
    found.add_argument("--num_workers", type=int, required=True, help="number of workers")
    found.add_argument("--gpu_per_worker", type=int, required=True, help="devices of each; a rank for each of them")
    found.add_argument("--machine_list", help="machines as ip:port,...; the ports are not used")
    found.add_argument("--machine_rank", type=int, help="the machine on which this is called; only the first calls it")
    found.add_argument("--log_dir", help="folder for what the ranks say; on the terminal unless given")
    found.add_argument("--task_label", help="taken, without effect")
    found.add_argument("--debug", default=False, help="show every rank's errors")
    found.add_argument("training_script", help="a shell script, or one of Python's")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `epl-launch`; returns the exit code: that of the script, or 2 for a mistake that is explained."""
    given = make_parser().parse_args(arguments)
    try:
        return run(_make_options(given))
    except WhaleError as error:
        print(f"epl-launch: {error}", file=sys.stderr)
        return 2


def _make_options(given: argparse.Namespace) -> Options:
    """Translates the arguments to options of ``whale run``, and sets environment variables that the ranks read."""
    if given.num_workers < 1 or given.gpu_per_worker < 1:
        raise ClusterError(
            "there is nothing to start",
            given=f"--num_workers {given.num_workers} --gpu_per_worker {given.gpu_per_worker}",
            expected="at least one worker with at least one device",
            action="give positive numbers for both options",
        )
    if given.machine_rank:
        raise ClusterError(
            "epl-launch starts the ranks of all machines from the first machine",
            given=f"--machine_rank {given.machine_rank}",
            expected="one call, on the first machine of --machine_list",
            action="call epl-launch on the first machine only, without --machine_rank",
        )
    os.environ["EPL_DEVICES_PER_WORKER"] = str(given.gpu_per_worker)
    os.environ[_SCRIPT_VARIABLE] = os.path.abspath(given.training_script)
    if given.log_dir is not None:
        os.makedirs(given.log_dir, exist_ok=True)
        os.environ[_LOGS_VARIABLE] = os.path.abspath(given.log_dir)
    ranks, hosts = given.num_workers * given.gpu_per_worker, ""
    if given.machine_list:
        machines = dict.fromkeys(machine.strip(' "').partition(":")[0] for machine in given.machine_list.split(","))
        hosts = ",".join(f"{machine}:{ranks // len(machines)}" for machine in machines)
    return Options(
        ranks=ranks,
        target="whale.cli.epl_rank",
        as_module=True,
        hosts=parse_hosts(hosts) if hosts else (),
        verbose=bool(given.debug),
        starts_another=not given.training_script.endswith(".py"),
    )
