"""Measures every way between two hosts at some rates of their link, beside the one that auto_parallel chooses.

    python -m tests.hosts.auto_parallel [--mbit 10 100 1000] [--models mlp gpt dlrm] [--ranks 1] [--seconds 2]
    python -m tests.hosts.auto_parallel --here 2 [--models mlp gpt dlrm lstm]      between so many ranks of this machine

Makes two hosts of namespaces with a link of so many 10^6 bits per second in each direction; each has half of this
machine's cores. For each model a line: the
way that is chosen, the milliseconds of its step as predicted and as measured (median), and its time over that of the
fastest way; then the other ways, with what was predicted where it was. Models are those of `benchmarks/predictions`,
ways those of `whale/planner/graph_search` that are predicted to take less than three times as long as the chosen one,
of pipelines two at most; each is built, warmed up, and takes its steps in turn with the others.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import forkserver
from tests.hosts.hosts import HostLauncher, Hosts, Machine

_TURNS, _PIPELINES = 4, 2
# Ways that are predicted to take so many times as long as the chosen one are left out; those that do are measured by
# one step.
_FAR = 3.0


def measure(seconds: float, names: list[str]) -> None:
    """Runs as a rank of `whale run`: rank 0 prints."""
    from unittest import mock

    import msgspec

    import whale as wh
    from benchmarks.predictions.models import WORKLOADS, make_step
    from whale.errors import WhaleError
    from whale.ir.strategy import ChosenStrategy, ParallelStrategy
    from whale.planner.graph_search import search
    from whale.runtime.compile import auto
    from whale.runtime.context import require_current

    def make(name: str) -> Callable[[], float]:
        step, batch = make_step(WORKLOADS[name], wh.function, contextlib.nullcontext)

        def take() -> float:
            started_s = time.perf_counter()
            float(step(*batch))
            return time.perf_counter() - started_s

        return take

    for number, name in enumerate(names):
        wh.init({"mesh.auto_parallel": True, "mesh.plan_cache": ""}, solo=True)
        run = require_current("a benchmark")
        notes: list[Any] = []  # what the search looked at, with bounds, and what it found; of rank 0
        note = functools.partial(_note, notes)
        steps: dict[str, Callable[[], float]] = {"chosen": make(name)}
        with mock.patch.object(search, "_list_looked_at", note(search._list_looked_at)):
            with mock.patch.object(auto, "best_way", note(auto.best_way)):
                steps["chosen"]()
        found = run.planning.auto
        assert found is not None
        ways = _list_near(*notes) if run.rank == 0 else []
        mine = msgspec.json.encode(ways) if run.rank == 0 else None
        said = run.comms[0].broadcast_bytes(f"ways/{number}", mine)
        for way in msgspec.json.decode(said, type=list[ParallelStrategy]):
            run.planning.auto = ChosenStrategy(way)
            try:
                steps[way.name] = make(name)
                steps[way.name]()
            except WhaleError as error:
                del steps[way.name]
                if run.rank == 0:
                    print(f"  {way.name}: cannot run: {error.message}")
        times = _take_turns(steps, seconds, run)
        if run.rank == 0:
            auto_s = times.pop("chosen")
            best_s = min([auto_s, *times.values()])
            print(
                f"{name}: {found.strategy.name}: predicted {1e3 * found.step_s:.1f} ms, measured "
                f"{1e3 * auto_s:.1f} ms ({found.step_s / auto_s:.2f}); chosen / best {auto_s / best_s:.2f}"
            )
            predicted = {
                one.strategy.name: f", predicted {1e3 * one.step_s:.1f}" for one in notes[1].others if one.step_s
            }
            for other, took_s in sorted(times.items(), key=lambda one: one[1]):
                print(f"  {other}: {1e3 * took_s:.1f} ms{predicted.get(other, '')}")
            sys.stdout.flush()
        wh.shutdown()


def _note(notes: list[Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same callable, whose results are noted."""

    def noted(*arguments: Any, **more: Any) -> Any:
        notes.append(call(*arguments, **more))
        return notes[-1]

    return noted


def _list_near(looked_at: Any, found: Any) -> list[Any]:
    """Returns the strategies that are predicted to take, or at least to take, less than `_FAR` times the chosen one."""
    bounds = {strategy.name: bound_s for strategy, bound_s in looked_at}
    near = [
        one.strategy
        for one in found.others
        if (one.step_s or bounds.get(one.strategy.name, 0.0)) < _FAR * found.chosen.step_s
        and not one.refused.startswith("cannot")
    ]
    pipelines = sorted((one for one in near if one.is_pipelined), key=lambda one: bounds.get(one.name, 0.0))
    return [*(one for one in near if not one.is_pipelined), *pipelines[:_PIPELINES]]


def _take_turns(steps: dict[str, Callable[[], float]], seconds: float, run: Any) -> dict[str, float]:
    """Returns the median seconds of a step of each way, of `seconds` each; as many steps on every rank."""
    once_s = {name: step() for name, step in steps.items()}
    near_s = _FAR * min(once_s.values())
    counts = {
        name: max(1, min(50, round(seconds / _TURNS / one_s))) if one_s < near_s or name == "chosen" else 0
        for name, one_s in once_s.items()
    }
    said = run.comms[0].broadcast_bytes("counts", json.dumps(counts).encode() if run.rank == 0 else None)
    counts = json.loads(said)
    times = {name: [] if counts[name] else [one_s] for name, one_s in once_s.items()}
    for turn in range(_TURNS):
        for name in [name for name in steps if counts[name]][:: 1 if turn % 2 else -1]:
            took = [steps[name]() for _ in range(counts[name] + 1)]  # the first one after another way's is colder
            times[name] += took[1:]
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.auto_parallel")
    parser.add_argument("--mbit", type=float, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt", "dlrm"])
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--here", type=int, metavar="RANKS", help="of this machine, without hosts of namespaces")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring each way")
    asked = parser.parse_args()
    if asked.here:
        command = [sys.executable, "-m", "whale", "run", "-np", str(asked.here), __file__, str(asked.seconds)]
        sys.exit(subprocess.run([*command, *asked.models], check=False).returncode)
    forkserver.open_folder()
    try:
        cores = sorted(os.sched_getaffinity(0))
        parts = (cores[: len(cores) // 2], cores[len(cores) // 2 :])
        machines = {f"h{number}": Machine(cores=tuple(part)) for number, part in enumerate(parts)}
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder, Hosts(Path(folder), 2, machines) as hosts:
            launcher = HostLauncher(hosts, python=forkserver.warm_python())
            where = ["-np", str(2 * asked.ranks), "--hosts", f"h0:{asked.ranks},h1:{asked.ranks}"]
            for mbit in asked.mbit:
                for name in hosts.names:
                    hosts.shape(name, mbit)
                print(f"{mbit:g} Mbit/s:", flush=True)
                for model in asked.models:
                    done = launcher.run(*where, __file__, str(asked.seconds), model, timeout_s=900.0)
                    print(done.stdout if done.returncode == 0 else done.stdout + done.stderr, flush=True)
    finally:
        forkserver.close_folder()


if __name__ == "__main__":
    main() if not sys.argv[1:] or sys.argv[1].startswith("--") else measure(float(sys.argv[1]), sys.argv[2:])
