"""Faults befall hosts that train: what passes costs time only; what lasts ends the run, or elastic runs go on without.

``python -m tests.hosts --count 20 --seed 1``: so many runs.
``python -m tests.hosts --cases 3x2+zero3+elastic/5:h1:unplug``: these (hosts x ranks, plan, step:host:fault).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests import forkserver
from tests.hosts.hosts import HERE, HostLauncher, Hosts, find_obstacle
from tests.hosts.results import read_result, train_alone
from tests.launcher.helpers import wait_for_line

PASSING = ("cut", "flap", "loss", "slow")  # the link is as it was again after some time
LASTING = ("unplug", "host", "rank", "freeze", "prted", "mpirun", "launcher")
GROWING = ("join", "rejoin")  # a host more, and one that was unplugged and comes back
PLANS = ("whole", "replicas", "zero3", "stages", "split")  # of train.py
STEPS, PAUSE_S = 40, 0.05
GROWING_STEPS, GROWING_PAUSE_S = 150, 0.1
PASSES_S = 2.0  # less than `fault.freeze_s` by a second and a half, since TCP sends again a second later at most
# Between a fault that lasts and its error, and the end, of a run that is not elastic; until nothing is left anywhere.
MOST_OF_ERROR_S, MOST_OF_END_S, MOST_OF_REST_S = 5.0, 20.0, 12.0
_LIMIT_S = 180.0
_CLOSE = 1e-10
_JOINED = re.compile(r" ranks? joins? after ")


@dataclass(frozen=True, slots=True)
class Case:
    """A run on some hosts, with as many ranks on each, and what befalls one of them.

    Attributes:
        plan: of PLANS, or "rows" where ranks are to join.
        elastic: whether the others go on without what is gone.
        step: when; at: which host; fault: of PASSING, LASTING or GROWING.
    """

    hosts: int
    each: int
    plan: str
    elastic: bool
    step: int
    at: str
    fault: str

    def __str__(self) -> str:
        return f"{self.hosts}x{self.each}+{self.plan}{'+elastic' * self.elastic}/{self.step}:{self.at}:{self.fault}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Reads what `str` gives; the plan may be missing."""
        what, _, befalls = text.partition("/")
        size, *kinds = what.split("+")
        hosts, _, each = size.partition("x")
        step, at, fault = befalls.split(":")
        plan = next((kind for kind in kinds if kind != "elastic"), "rows" if fault in GROWING else "whole")
        return cls(int(hosts), int(each), plan, "elastic" in kinds, int(step), at, fault)


def draw(seed: int, count: int) -> list[Case]:
    """Returns so many cases. `whale run` is on h0, which is neither unplugged nor ended."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        fault = rng.choice(PASSING + LASTING + GROWING)
        hosts = rng.choice((3, 3, 4)) if fault in GROWING else rng.choice((2, 2, 3, 4))
        elastic = fault in GROWING or (fault in LASTING and rng.random() < 0.6)
        # Of a run with one mpirun, all hosts' is on h0; else each host's is, and that of h1 is as good as any.
        at = "h0" if fault == "launcher" or (fault == "mpirun" and not elastic) else f"h{rng.randrange(1, hosts)}"
        if fault == "join":
            at = f"h{hosts - 1}"
        plan = "rows" if fault in GROWING else rng.choice(PLANS)
        each = rng.choice((1, 1, 2)) if hosts < 4 else 1
        found.append(Case(hosts, each, plan, elastic, rng.randrange(2, STEPS - 10), at, fault))
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """Says what is wrong with a run, or "", and the seconds from the fault to its error; None: it was to have none."""

    problem: str
    named_s: float | None = None


def run(case: Case, folder: Path) -> Outcome:
    """Runs a case."""
    with Hosts(folder, case.hosts) as hosts:
        # What kills `whale run` finds it by its command line, and a rank that is cut off ends its parent, Open MPI's
        # daemon: a fork server's children have neither.
        real = case.fault in ("launcher", "unplug")
        launcher = HostLauncher(hosts, python=sys.executable if real else forkserver.warm_python())
        names = [f"{name}:{case.each}" for name in hosts.names]
        where = ["-np", str(case.hosts * case.each), "--hosts", ",".join(names)]
        if case.elastic:
            _list_hosts(case, folder, [name for name in hosts.names if case.fault != "join" or name != case.at])
            where = ["--hosts-from", str(folder / "hosts.txt")]
            launcher.environment["WHALE_FAULT_ELASTIC"] = "memory"
        steps, pause_s = (GROWING_STEPS, GROWING_PAUSE_S) if case.fault in GROWING else (STEPS, PAUSE_S)
        script = [str(HERE / "train.py"), str(folder), str(steps), str(pause_s), "8", "16", case.plan]
        with launcher.start(*where, *script) as process:
            try:
                wait_for_line(process, f"step {case.step}")
                begun_s = time.monotonic()
                lines = _Lines(process)
                _befall(case, hosts, launcher, lines)
                output, errors = lines.read_to_end(_LIMIT_S)
            except AssertionError as error:
                return Outcome(f"{error}{process.communicate()[1]}")
            except subprocess.TimeoutExpired:
                return Outcome(f"the run has not ended after {_LIMIT_S:g} s: {hosts.processes('h0')}")
        took_s, said = time.monotonic() - begun_s, "".join([*(line for _, line in errors), *output])
        named_s = next((at_s - begun_s for at_s, line in errors if line.startswith("whale run: ")), float("inf"))
        wrong = _judge(case, process.returncode, took_s, named_s, said, folder)
        there = [name for name in hosts.names if case.fault != "host" or name != case.at]
        left = {name: found for name in there if (found := hosts.await_none(name, MOST_OF_REST_S))}
        problem = f"{wrong or f'left: {left}'}\n{said}" if wrong or left else ""
        return Outcome(problem, None if case.elastic or case.fault in (*PASSING, "launcher") else named_s)


def _list_hosts(case: Case, folder: Path, names: Sequence[str]) -> None:
    """Writes the file that `whale run --hosts-from` reads, at once."""
    (folder / "hosts.new").write_text("\n".join(f"{name} slots={case.each}" for name in names) + "\n")
    (folder / "hosts.new").replace(folder / "hosts.txt")


class _Lines:
    """Reads what a run says from now on, with the time of each line of its standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._output, self._errors = process, list[str](), list[tuple[float, str]]()
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read_output, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read_output(self) -> None:
        self._output.extend(self._process.stdout or ())

    def _read_errors(self) -> None:
        for line in self._process.stderr or ():
            self._errors.append((time.monotonic(), line))

    def await_text(self, text: str, within_s: float) -> None:
        """Returns when a line with a text has come; an AssertionError if none does."""
        until_s = time.monotonic() + within_s
        while not any(text in line for line in [*self._output, *(line for _, line in list(self._errors))]):
            assert time.monotonic() < until_s and self._process.poll() is None, f"no line says {text!r}"
            time.sleep(0.05)

    def read_to_end(self, within_s: float) -> tuple[list[str], list[tuple[float, str]]]:
        """Returns (lines of standard output, those of standard error) once the run has ended."""
        self._process.wait(within_s)
        for thread in self._threads:
            thread.join(within_s)
        return self._output, self._errors


def _befall(case: Case, hosts: Hosts, launcher: HostLauncher, lines: _Lines) -> None:
    if case.fault in ("cut", "loss", "slow"):
        if case.fault == "cut":
            hosts.cut(case.at)
        elif case.fault == "loss":
            hosts.lose(case.at, 0.3)
        else:
            hosts.shape(case.at, 1)
        time.sleep(PASSES_S)
        hosts.shape(case.at, None)
        hosts.mend(case.at)
    elif case.fault == "flap":
        for _ in range(4):
            hosts.cut(case.at)
            time.sleep(0.4)
            hosts.mend(case.at)
            time.sleep(0.3)
    elif case.fault == "unplug":
        hosts.cut(case.at)
    elif case.fault == "host":
        hosts.kill(case.at)
    elif case.fault in ("rank", "freeze"):
        signal_name = "KILL" if case.fault == "rank" else "STOP"
        hosts.run(case.at, "sh", "-c", f"kill -{signal_name} $(cat {launcher.folder}/pids_{case.at} | head -n 1)")
    elif case.fault == "prted":
        _end(hosts, case.at, signal.SIGKILL, lambda line: line.split()[0].endswith("prted"))
    elif case.fault == "launcher":
        _end(hosts, "h0", signal.SIGKILL, lambda line: " -m whale run " in f" {line} ")
    elif case.fault == "join":
        _list_hosts(case, launcher.folder, hosts.names)
    elif case.fault == "rejoin":
        hosts.cut(case.at)
        lines.await_text("go on without", _LIMIT_S)
        _list_hosts(case, launcher.folder, [name for name in hosts.names if name != case.at])
        hosts.mend(case.at)
        time.sleep(3.0)  # the list is read every two seconds
        _list_hosts(case, launcher.folder, hosts.names)
    else:
        among = (f"--host {case.at}:",) if case.elastic else ("",)
        _end(
            hosts, "h0", signal.SIGTERM,
            lambda line: line.split()[0].endswith(("mpirun", "prterun")) and any(text in line for text in among),
        )  # fmt: skip


def _end(hosts: Hosts, name: str, number: signal.Signals, is_meant: Callable[[str], bool]) -> None:
    """Sends a signal to processes of a host, of which there is one at least."""
    found = [pid for pid, line in hosts.processes(name).items() if is_meant(line)]
    assert found, f"nothing to end on {name}: {hosts.processes(name)}"
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it ended with another one of them
            os.kill(pid, number)


def _judge(case: Case, code: int, took_s: float, named_s: float, said: str, folder: Path) -> str:
    """Returns what is wrong with how a run ended, ``named_s`` after the fault its first error."""
    if case.fault == "launcher":
        return "" if code in (-signal.SIGKILL, 128 + signal.SIGKILL) else f"the run ended with code {code}"
    if case.fault in PASSING or case.elastic:
        if code:
            return f"the run ended with code {code}"
        steps = GROWING_STEPS if case.fault in GROWING else STEPS
        found, wanted = read_result(folder), train_alone(folder, steps)
        if found["losses"].shape != wanted["losses"].shape:
            return f"{len(found['losses'])} steps were taken, {len(wanted['losses'])} asked for"
        worst = max(float(np.max(np.abs(found[name] - wanted[name]))) for name in wanted)
        if worst > _CLOSE:
            return f"{worst:.2g} from one process"
        return "nobody joined" if case.fault in GROWING and not _JOINED.search(said) else ""
    if code == 0:
        return "the run ended with code 0"
    if named_s > MOST_OF_ERROR_S:
        return f"the fault is named after {named_s:.1f} s"
    return f"the run ended {took_s:.1f} s after the fault" if took_s > MOST_OF_END_S else ""


def main() -> int:
    """Returns exit code 1 if a case went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts")
    parser.add_argument("--count", type=int, default=20, help="runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", nargs="*", metavar="HOSTSxRANKS[+PLAN][+elastic]/STEP:HOST:FAULT", help="not drawn")
    asked = parser.parse_args()
    if obstacle := find_obstacle():
        print(f"no hosts can be made here: {obstacle}")
        return 0
    cases = [Case.parse(text) for text in asked.cases or ()] or draw(asked.seed, asked.count)
    forkserver.open_folder()
    outcomes: list[Outcome] = []
    try:
        for case in cases:
            with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
                started_s = time.monotonic()
                outcomes.append(run(case, Path(folder)))
                one, took_s = outcomes[-1], time.monotonic() - started_s
                named = "" if one.named_s is None else f", its error after {one.named_s:.1f} s"
                print(f"{case}: {one.problem or 'as wanted'}{named} ({took_s:.0f} s)", flush=True)
    finally:
        forkserver.close_folder()
    problems = sum(bool(one.problem) for one in outcomes)
    named_s = [one.named_s for one in outcomes if one.named_s is not None]
    errors = f"; {len(named_s)} errors, the latest after {max(named_s):.1f} s" if named_s else ""
    print(f"{len(cases)} runs, seed {asked.seed}: {problems} problems{errors}")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
