"""Implements `whale run`: starts the ranks, and starts them again after a failure as often as was asked.

Decisions: 0008, 0163.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from whale.config import Config
from whale.errors import ClusterError
from whale.launcher import mpirun
from whale.launcher.job.job import Job
from whale.launcher.job.metrics import serve_metrics
from whale.launcher.job.progress import RunProgress
from whale.launcher.job.status import StatusSocket
from whale.launcher.job.tensorboard import EventFiles, write_profile
from whale.launcher.job.trace import TraceFile
from whale.launcher.mpirun import PLAN_VARIABLE, Options
from whale.launcher.scale_up import JoiningRanks

# Connections that the system holds until they are accepted: a worker that finds no place among others' tries again only
# after a second.
_BACKLOG = 1024


def run(options: mpirun.Options) -> int:
    """Runs a script on every rank and waits for the end.

    Returns:
        The exit code: 0, that of the rank that failed (128 + signal if it was killed), 128 + signal if this process
        was told to stop, 141 if nobody reads its output any more.

    Raises:
        ClusterError: the run cannot be started.
        CommError: a library that it needs is not built.
    """
    mpirun.check_options(options)
    cores = len(os.sched_getaffinity(0))
    if options.is_local and options.ranks > 2 * cores:
        sys.stderr.write(f"whale run: {options.ranks} ranks share {cores} core{'s' * (cores != 1)}\n")
    program, config = mpirun.find_mpirun(), Config()
    with contextlib.ExitStack() as stack:
        trace = files = None
        if options.trace is not None and options.logdir is not None:
            stack.callback(_write_profile, options.trace, options.logdir)  # once the trace is closed
        if options.trace is not None:
            trace = stack.enter_context(contextlib.closing(TraceFile(options.trace)))
        if options.logdir is not None:
            files = stack.enter_context(contextlib.closing(EventFiles(options.logdir)))
        progress = RunProgress(files)
        status = stack.enter_context(contextlib.closing(StatusSocket()))
        if options.metrics is not None:
            address = stack.enter_context(serve_metrics(options.metrics, progress))
            sys.stderr.write(f"whale run: metrics for Prometheus are at {address}\n")
            sys.stderr.flush()
        return _run_attempts(options, program, config, trace, progress, status)


def _write_profile(trace: str, folder: str) -> None:
    if wrong := write_profile(trace, folder):
        sys.stderr.write(f"whale run: {wrong}\n")


def _run_attempts(
    options: mpirun.Options,
    program: str,
    config: Config,
    trace: TraceFile | None,
    progress: RunProgress,
    status: StatusSocket,
) -> int:
    restarts, hash_seed = 0, mpirun.draw_hash_seed()
    while True:
        address = mpirun.find_listen_address(options)
        with (
            socket.create_server((address, 0), backlog=max(_BACKLOG, options.ranks)) as listener,
            mpirun.use_loopback(options) as library,
        ):
            token, port = secrets.token_hex(16), listener.getsockname()[1]
            environment = mpirun.make_environment(options, f"{address}:{port}", token, restarts, library, hash_seed)
            starts = mpirun.list_starts(options, program, environment)
            grows = (
                functools.partial(JoiningRanks, options, program, environment)
                if options.hosts_from is not None
                else None
            )
            job = Job(options, listener, token, config["fault.freeze_s"], trace, progress, status, grows)
            progress.begin(options.ranks, restarts)
            code = job.run(starts)
        if not job.has_failed or restarts == options.max_restarts:
            return code
        restarts += 1
        planned_for = options.ranks
        options, lost_hosts = mpirun.drop_lost_hosts(options, program)
        number = f"{options.ranks} rank{'s' * (options.ranks > 1)}"
        where = f" on {number} without {', '.join(lost_hosts)}" if lost_hosts else ""
        job.say(f"starting again{where} (restart {restarts} of {options.max_restarts})")
        if options.ranks != planned_for and os.environ.pop(PLAN_VARIABLE, ""):
            job.say(f"the saved plan is for {planned_for} ranks: the script is planned again for {number}")


def measure_script(plan: str, script: Sequence[str], ranks: int, steps: int, profile: str) -> tuple[bytes, list[bytes]]:
    """Runs some steps of a script on that many ranks of this host and returns the prediction and the measurements.

    Args:
        plan: the plan's file.
        script: path and arguments.
        profile: file of measurements, by which is predicted.

    Returns:
        The prediction of the program that ran and each rank's measurements, as JSON (see
        whale.planner.report.analysis).

    Raises:
        ClusterError: the script is gone, or the run failed.
    """
    if not script or not Path(script[0]).is_file():
        raise ClusterError(
            "the script of the plan does not exist here",
            given=script[0] if script else "a plan without a script",
            expected="the script where it was when `whale plan -o FILE script` was called",
            action="put it back, or make the plan again",
        )
    os.environ[PLAN_VARIABLE] = os.path.abspath(plan)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, str(steps), os.path.abspath(profile), *script)
        code = run(Options(ranks, "whale.tools.analyze", arguments, as_module=True))
        found = [Path(folder) / f"rank{rank}.json" for rank in range(ranks)]
        prediction = Path(folder) / "prediction.json"
        if code or not all(path.exists() for path in (*found, prediction)):
            raise ClusterError(
                "the run under the plan failed",
                given=f"exit code {code}",
                action="correct what the ranks say above",
            )
        return prediction.read_bytes(), [path.read_bytes() for path in found]
