"""Implements `whale run`: starts the ranks, and restarts them after a failure up to --max-restarts times.

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

# Connections that the kernel queues until they are accepted. If the queue is full, a worker's connection attempt is
# repeated only after a second.
_BACKLOG = 1024


def run(options: mpirun.Options) -> int:
    """Runs a script on every rank, waits until all of them have ended, and returns the exit code of `whale run`.

    Returns:
        0 on success; the failed rank's code (128 + signal if it was killed); 128 + signal if `whale run` itself was
        told to stop by a signal; 141 if its output pipe was closed (SIGPIPE); 1 if trainable variables differ between
        ranks at the end; 2 if settings had no effect because the ranks trained independently.

    Raises:
        ClusterError: the run cannot be started.
        CommError: a native library that the launcher needs is not built.
    """
    mpirun.check_options(options)
    cores = len(os.sched_getaffinity(0))
    if options.is_local and options.ranks > 2 * cores:
        sys.stderr.write(
            f"whale run: {options.ranks} ranks share {cores} core{'s' * (cores != 1)}, so each runs slowly\n"
        )
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
    """Runs some steps of a script under a saved plan, on ranks of this host, and returns predicted and measured times.

    `whale show --analyze` compares the two.

    Args:
        plan: path of the plan's file.
        script: path of the script, followed by its arguments.
        ranks: number of ranks.
        steps: number of steps to measure.
        profile: path of the measured profile of the hardware, from which the prediction is computed.

    Returns:
        The prediction for the program that ran, and each rank's measurements by rank, as JSON (see
        whale.planner.report.analysis).

    Raises:
        ClusterError: the script does not exist any more, or the run failed.
    """
    if not script or not Path(script[0]).is_file():
        raise ClusterError(
            "the script for which the plan was made does not exist here",
            given=script[0] if script else "a plan without a script",
            expected="the script at the path that it had when `whale plan -o FILE script` was called",
            action="put the script back, or make the plan again",
        )
    os.environ[PLAN_VARIABLE] = os.path.abspath(plan)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, str(steps), os.path.abspath(profile), *script)
        code = run(Options(ranks, "whale.tools.analyze", arguments, as_module=True))
        found = [Path(folder) / f"rank{rank}.json" for rank in range(ranks)]
        prediction = Path(folder) / "prediction.json"
        if code or not all(path.exists() for path in (*found, prediction)):
            raise ClusterError(
                "the script failed while it ran under the plan",
                given=f"exit code {code} with {plan}",
                expected="a script that takes its steps under this plan",
                action="correct the error that the ranks have printed above",
            )
        return prediction.read_bytes(), [path.read_bytes() for path in found]
