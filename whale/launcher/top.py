"""Implements `whale top`: prints the ranks of a running job with their steps, waits and memory, and what they wait for.

The launcher of each run answers on a Unix socket of its host (job/status.py). Rates, such as the time of a step, are
computed from the two latest messages of each rank.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from whale.errors import ClusterError
from whale.ir.plan_text import fit, format_bytes
from whale.launcher.job.status import NAME, RankStatus, RunStatus, find_peer
from whale.launcher.protocol import Progress

_NAME = re.compile(re.escape("@" + NAME).replace(r"\{user\}", r"(\d+)").replace(r"\{process\}", r"(\d+)") + r"\w+")
_ANSWER_S = 10.0  # a launcher that starts its ranks again answers when they are up
_LONG_S = 2.0  # a step, or a time between steps, that lasts longer is shown with its seconds
_STRAGGLER = 0.5  # a rank that waits less than this part of the others' mean wait is the one that they wait for


@dataclass(frozen=True, slots=True)
class Run:
    """Identifies a run on this host: the launcher's process number, its user's number, and its socket's name."""

    process: int
    user: int
    name: str


@dataclass(frozen=True, slots=True)
class Rates:
    """Holds a rank's averages per step, between two of its messages.

    Attributes:
        program: name of the program in which the rank spent most time.
        steps: number of steps of all programs since the rank's start.
        step_s: seconds per step of that program.
        waits_s: seconds that exchanges waited, per step; exchanges may overlap, so that this can exceed `step_s`.
        sent_bytes: bytes sent per step.
    """

    program: str
    steps: int
    step_s: float
    waits_s: float
    sent_bytes: float


def list_runs() -> list[Run]:
    """Returns the runs on this host whose launchers answer this user (its own; for root all), by process number."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines():
        match = _NAME.fullmatch(line.rpartition(" ")[2])
        if match is not None and os.getuid() in (0, int(match[1])):
            found[match[0]] = Run(int(match[2]), int(match[1]), match[0])
    return sorted(found.values(), key=lambda run: run.process)


def choose_run(process: int | None) -> Run:
    """Returns the run with the given launcher, or the only run on this host if `process` is None.

    Raises:
        ClusterError: there is no such run, or `process` is None and there are several.
    """
    runs = list_runs()
    chosen = [run for run in runs if process in (None, run.process)]
    if len(chosen) == 1:
        return chosen[0]
    lines = "".join(f"\n    {run.process}  {_describe(run)}" for run in runs)
    if not chosen:
        raise ClusterError(
            "no run that `whale run` has started is running on this host"
            if process is None
            else "no run of this process number is running on this host",
            given=f"whale top{f' {process}' if process is not None else ''} on {socket.gethostname()}",
            running=lines or "none",
            expected="a run that this user has started on this host by `whale run` (not by mpirun or srun)",
            action="call `whale top` on the host on which `whale run` was started",
        )
    raise ClusterError(
        "several runs are running on this host, and `whale top` shows one",
        running=lines,
        expected="the process number of one of them",
        action=f"whale top {chosen[0].process}",
    )


def _describe(run: Run) -> str:
    status = ask_status(run)
    return "" if status is None else f"{len(status.ranks)} ranks  {status.command}"


def ask_status(run: Run) -> RunStatus | None:
    """Asks a run's launcher for its status; None if the run has ended or the launcher does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect("\0" + run.name[1:])
            if find_peer(connection)[1] != run.user:  # any user may bind a socket of this name
                return None
            data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except OSError:
            return None
    return msgspec.json.decode(data, type=RunStatus) if data else None


def show_run(run: Run, every_s: float, once: bool) -> int:
    """Prints the status of a run again and again until the run ends, overwriting the screen on a terminal.

    Args:
        every_s: seconds between two updates.
        once: whether to print it only once.

    Returns:
        The exit code of `whale top`, always 0.
    """
    in_place = sys.stdout.isatty() and not once
    status = ask_status(run)
    while status is not None:
        width, height = shutil.get_terminal_size((100, 40))
        lines = format_status(status, width, height if in_place else None)
        text = "\n".join(lines) + "\n"
        sys.stdout.write("\x1b[H\x1b[2J" + text if in_place else text)
        sys.stdout.flush()
        if once:
            return 0
        time.sleep(every_s)
        status = ask_status(run)
    print(f"whale top: the run of process {run.process} has ended")
    return 0


def format_status(status: RunStatus, width: int, height: int | None = None) -> list[str]:
    """Formats a run's status as lines: the command, the step time, which rank is waited for, and a row for each rank.

    Args:
        status: what the launcher has answered.
        width: columns of the terminal.
        height: lines of the terminal; what does not fit is left out and counted. None: no limit.
    """
    rates = [compute_rates(rank.latest, rank.before) for rank in status.ranks]
    head = [
        f"whale run {status.process}: {status.command}",
        f"{len(status.ranks)} rank{'s' * (len(status.ranks) != 1)}, up {_format_time(status.up_s)}"
        + (f", started again {'once' if status.restarts == 1 else f'{status.restarts} times'}" * bool(status.restarts)),
        *_summarise(status.ranks, rates),
        "",
        f"{'rank':>4}  {'host':<12} {'steps':>9} {'ms/step':>9} {'waits ms':>9} {'MiB':>7}  now",
    ]
    lines = [one for line in head for one in fit([line], width)]
    for rank, rate in zip(status.ranks, rates):
        lines += _format_rank(rank, rate, width)
    if height is not None and len(lines) > height - 1:
        shown = lines[: height - 2]
        hidden = sum(not line.startswith(" " * 6) for line in lines[height - 2 :])  # indented lines continue a row
        lines = [*shown, f"and {hidden} more ranks: make the window higher"]
    return lines


def compute_rates(latest: Progress | None, before: Progress | None) -> Rates | None:
    """Computes a rank's averages per step from its two latest messages; None if it has taken no step.

    If no step ended between the two messages, or there is only one, the averages are over all steps since the rank's
    start.
    """
    if latest is None or not latest["programs"]:
        return None
    steps = sum(calls for calls, _ in latest["programs"].values())
    same = before is not None and before["begun_ns"] == latest["begun_ns"]
    earlier = before if before is not None and same and before["programs"] != latest["programs"] else None
    programs = {
        name: (calls - past[0], seconds - past[1])
        for name, (calls, seconds) in latest["programs"].items()
        if calls > (past := earlier["programs"].get(name, (0, 0.0)) if earlier is not None else (0, 0.0))[0]
    }
    name = max(programs, key=lambda name: programs[name][1])
    calls = sum(count for count, _ in programs.values())
    waits_s = latest["waiting_s"] - (earlier["waiting_s"] if earlier is not None else 0.0)
    sent_bytes = latest["sent_bytes"] - (earlier["sent_bytes"] if earlier is not None else 0)
    return Rates(name, steps, programs[name][1] / programs[name][0], waits_s / calls, sent_bytes / calls)


def _summarise(ranks: Sequence[RankStatus], rates: Sequence[Rates | None]) -> list[str]:
    """Returns lines about the run as a whole: the step time, and the rank that the others wait for, if there is one."""
    known = {rank.rank: rate for rank, rate in zip(ranks, rates) if rate is not None}
    if not known:
        told = [rank.latest for rank in ranks if rank.latest is not None]
        if not any(one["sent_bytes"] for one in told):
            return ["no step has ended yet"]
        sent_bytes, waits_s = max(one["sent_bytes"] for one in told), max(one["waiting_s"] for one in told)
        return [
            "no step of a wh.function has ended: the script may have steps of its own; "
            f"up to now a rank has sent up to {format_bytes(sent_bytes)}, and waited up to {waits_s:,.1f} s"
        ]
    step_s = max(rate.step_s for rate in known.values())
    first = next(iter(known.values()))
    lines = [
        f"{first.program}: {1e3 * step_s:,.1f} ms a step, {first.steps:,} steps, "
        f"{format_bytes(max(rate.sent_bytes for rate in known.values()))} sent in each"
    ]
    if len(known) > 1:
        least = min(known, key=lambda rank: known[rank].waits_s)
        others_s = statistics.fmean(rate.waits_s for rank, rate in known.items() if rank != least)
        if others_s > 0.05 * step_s and known[least].waits_s < _STRAGGLER * others_s:
            lines.append(f"the others wait {1e3 * others_s:,.1f} ms a step, most of it for rank {least}")
    return lines


def _format_rank(rank: RankStatus, rate: Rates | None, width: int) -> list[str]:
    """Formats a rank's row; the last column (what the rank does now) is wrapped over further lines on a narrow
    terminal.
    """
    figures = f"{'':>9} {'':>9} {'':>9}"
    if rate is not None:
        figures = f"{rate.steps:>9,} {1e3 * rate.step_s:>9,.1f} {1e3 * rate.waits_s:>9,.1f}"
    memory = f"{rank.latest['memory_bytes'] / 2**20:,.0f}" if rank.latest is not None else ""
    row = f"{rank.rank:>4}  {rank.host[:12]:<12} {figures} {memory:>7}  "
    text = textwrap.wrap(describe_now(rank), max(20, width - len(row)), break_on_hyphens=False) or [""]
    return [row + text[0], *(" " * len(row) + part for part in text[1:])]


def describe_now(rank: RankStatus) -> str:
    """Describes what a rank is doing now: for example "waits 3 s for rank 1 in ...", "in train_step" or "between
    steps".
    """
    if rank.state != "running" or rank.latest is None or rank.told_s is None:
        return rank.state
    wait, doing = rank.latest["wait"], rank.latest["doing"]
    if wait is not None:
        whom = f" for rank {', '.join(map(str, wait['missing']))}" if wait["missing"] else ""
        return f"waits {wait['seconds']:.0f} s{whom} in {wait['what']}"
    if doing is not None:
        name, seconds = doing
        return f"in {name}" + (f" for {seconds + rank.told_s:.0f} s" if seconds + rank.told_s > _LONG_S else "")
    return f"between steps for {rank.told_s:.0f} s" if rank.told_s > _LONG_S else "between steps"


def _format_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
