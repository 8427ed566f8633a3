"""Step times of whole models under TensorFlow, Whale and what else one may take, in one interleaved run (`make bench`).

    python -m benchmarks.step_time [--models resnet50,gpt,vit,dlrm,lstm,fc] [--rounds 9] [--steps 3] [--out docs]

Every configuration is a process group that stays alive. In each round every group runs a few steps, one group after
the other, while the others are stopped: what else the machine does meets all of them. (Where memory does not hold all
groups, Horovod and Whale on two ranks are in one set, the others in further ones.) A sample is the mean step time
of one round, on the slowest rank; shown are the medians of the samples. Horovod's cycle time and fusion threshold are
chosen first, among the candidates below, for each model. PyTorch and JAX run in an environment of their own, whose
Python ``--peers`` names.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.groups import Group, thread_variables, under_mpirun
from benchmarks.machine import free_memory_gb, machine
from benchmarks.step_time import report
from benchmarks.step_time.worker import PEERS
from whale.launcher.mpirun import MEMORY_VARIABLES

TITLES = {
    "resnet50": "ResNet50, 64x64, batch 16",
    "resnet50-amp": "ResNet50, products in bfloat16",
    "gpt": "GPT-like, 4 x 256, sequence 64, batch 16",
    "vit": "ViT, 4 x 256, 64 patches, batch 16",
    "dlrm": "DLRM, 26 tables of 10,000 x 16, batch 1,024",
    "lstm": "LSTM, 2 x 256, sequence 64, batch 16",
    "lstm-layers": "LSTM layers alone, 2 x 256, sequence 64, batch 16",
    "fc": "FC 2048-2048-100000, batch 32",
}
# (cycle time in ms, fusion threshold in MiB); 5 and 128 are Horovod's own.
HOROVOD_CANDIDATES = ((5, 128), (1, 128), (1, 16))
# Memory of one process at its peak (TensorFlow keeps it), and which configurations share a set where not all fit.
MEMORY_GB = {
    "resnet50": 1.4,
    "resnet50-amp": 1.4,
    "gpt": 0.8,
    "vit": 0.8,
    "dlrm": 0.8,
    "lstm": 1.0,
    "lstm-layers": 0.8,
    "fc": 3.8,
}
PRIORITY = (
    "horovod",
    "whale",
    "whale-xla",
    "whale-split",
    "plain",
    "xla",
    "mirrored",
    "torch",
    "torch-compiled",
    "jax",
    "whale-horovod",
)
NOT_INSTALLED = "not installed"
WARM_UP = 2  # rounds that are not counted
STEP_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Configuration:
    """What one group runs.

    Attributes:
        title: for the table.
        kind: of worker.CONFIGURATIONS.
        ranks, threads: processes, and threads of each.
        environment: further variables, name and value.
        workloads: those it makes sense for; empty: all.
    """

    title: str
    kind: str
    ranks: int = 1
    threads: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    workloads: tuple[str, ...] = ()


_ALL = ("resnet50", "gpt", "vit", "dlrm", "lstm", "fc")
_XLA = ("resnet50", "gpt", "vit", "lstm")
CONFIGURATIONS = (
    Configuration("TensorFlow, 2 threads", "plain", threads=2),
    Configuration("TensorFlow, 1 thread", "plain"),
    Configuration("TensorFlow with XLA, 2 threads", "xla", threads=2, workloads=_ALL),
    Configuration("TensorFlow with XLA, 1 thread", "xla", workloads=_XLA),
    Configuration("Whale with XLA, 1 rank", "whale-xla", workloads=_XLA),
    Configuration("Whale with XLA, 2 ranks", "whale-xla", 2, workloads=_XLA),
    Configuration("Whale, 1 rank", "whale", workloads=("resnet50", "resnet50-amp", "gpt")),
    Configuration("Horovod, 2 ranks", "horovod", 2),  # tuned
    Configuration("Whale, 2 ranks", "whale", 2),
    Configuration(
        "MultiWorkerMirrored, 2 ranks", "mirrored", 2, environment=(("TF_USE_LEGACY_KERAS", "1"),), workloads=_ALL
    ),
    Configuration("PyTorch DDP, 2 ranks", "torch", 2, workloads=_ALL),
    Configuration("PyTorch, 2 threads", "torch", threads=2, workloads=_ALL),
    Configuration("PyTorch compiled, 2 threads", "torch-compiled", threads=2, workloads=_ALL),
    Configuration(
        "Keras on JAX, 2 devices",
        "jax",
        threads=2,
        environment=(("KERAS_BACKEND", "jax"), ("XLA_FLAGS", "--xla_force_host_platform_device_count=2")),
        workloads=_ALL,
    ),
    Configuration("Whale, wh.split, 2 ranks", "whale-split", 2, workloads=("fc",)),
    Configuration("Whale, state split, 2 ranks", "whale", 2, environment=(("WHALE_MEMORY_ZERO", "1"),)),
    Configuration("Whale over MPI, 2 ranks", "whale", 2, environment=(("WHALE_COMMUNICATION_SHARED_MEMORY", "none"),)),
    Configuration("Whale over Horovod, 2 ranks", "whale-horovod", 2),  # tuned alike
    Configuration("Horovod, 4 ranks", "horovod", 4, workloads=("fc",)),
    Configuration("Whale, 4 ranks", "whale", 4),
    Configuration("Whale, wh.split, 4 ranks", "whale-split", 4, workloads=("fc",)),
)


@contextlib.contextmanager
def start(configuration: Configuration, workload: str, pinned: bool, peers: str) -> Iterator[Group]:
    """The running processes of a configuration."""
    python = peers if configuration.kind in PEERS else sys.executable
    worker = [python, "-m", "benchmarks.step_time.worker", configuration.kind, workload]
    if pinned:
        worker += ["--cores", ",".join(map(str, _cores(configuration)))]
    alone = configuration.ranks == 1 and not configuration.kind.startswith("whale")
    line = worker if alone else under_mpirun(worker, configuration.ranks)
    variables = thread_variables(configuration.threads)
    if configuration.kind.startswith("whale"):
        variables |= MEMORY_VARIABLES  # as `whale run` starts ranks
    variables |= dict(configuration.environment)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        variables["BENCH_MEETING"] = str(Path(folder, "torch"))
        if configuration.kind == "mirrored":
            sockets = [held.enter_context(socket.socket()) for _ in range(configuration.ranks)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            variables["BENCH_PORTS"] = " ".join(str(one.getsockname()[1]) for one in sockets)
            held.close()
        # Its workers give each other up when they do not hear from each other; waiting, they compute nothing.
        stops = configuration.kind != "mirrored"
        with Group(configuration.title, line, configuration.ranks, variables, stops=stops) as group:
            yield group


def _cores(configuration: Configuration) -> Sequence[int]:
    """The cores of the group: as many as it has threads in all, or all there are. Rank r gets the r-th (modulo)."""
    available = sorted(os.sched_getaffinity(0))
    if configuration.ranks == 1 and configuration.threads > 1:
        return []  # one process of several threads is not pinned to one core
    return available[: configuration.ranks]


def measure(groups: Mapping[Configuration, Group], workload: str, rounds: int, steps: int) -> list[report.Result]:
    """Round after round, every group in turn. One whose processes end, as where memory ends, has a note."""
    samples: list[list[float]] = [[] for _ in groups]
    cpu: list[list[float]] = [[] for _ in groups]
    ended: dict[int, str] = {}
    for number in range(-WARM_UP, rounds):
        for i, group in enumerate(groups.values()):
            if i in ended:
                continue
            try:
                answers = group.ask(STEP_TIMEOUT_S * steps, steps=steps)
            except RuntimeError as error:
                ended[i] = "ended"
                _say(f"  {error}")
                continue
            if number >= 0:
                samples[i].append(1e3 * max(statistics.mean(a["times_s"]) for a in answers))
                cpu[i].append(1e3 * sum(a["cpu_s"] for a in answers))
    return [
        report.Result(TITLES[workload], c.title, note=ended[i])
        if i in ended
        else report.Result(TITLES[workload], c.title, tuple(samples[i]), statistics.median(cpu[i]))
        for i, c in enumerate(groups)
    ]


def measure_all(
    chosen: Sequence[Configuration], workload: str, rounds: int, steps: int, pinned: bool, peers: str = ""
) -> dict[Configuration, report.Result]:
    """Every configuration; at once if memory holds them, else in sets, each of which is interleaved and has the
    reference again.
    """
    found: dict[Configuration, report.Result] = {}
    waiting = sorted(chosen, key=lambda c: PRIORITY.index(c.kind) + 10 * (c.ranks > 2))
    while waiting:
        room_gb = 0.9 * free_memory_gb()
        again = [c for c in found if c.title == report.REFERENCE]
        part = list(again)
        for configuration in list(waiting):
            needed_gb = sum(c.ranks * _memory_gb(workload, c.kind) for c in [*part, configuration])
            if part == again or needed_gb <= room_gb:
                part.append(configuration)
                waiting.remove(configuration)
        if len(part) < len(chosen):
            _say(f"  ({room_gb:.0f} GB of memory hold: {'; '.join(c.title for c in part)})")
        with contextlib.ExitStack() as stack:
            groups = {c: stack.enter_context(start(c, workload, pinned, peers)) for c in part}
            measured = dict(zip(part, measure(groups, workload, rounds, steps)))
        beside = [r.median_ms for r in measured.values() if r.configuration == report.REFERENCE and r.samples_ms]
        for configuration, result in measured.items():
            found.setdefault(configuration, replace(result, reference_ms=beside[0] if beside else 0.0))
    return found


def _memory_gb(workload: str, kind: str) -> float:
    """Of a rank; what workers send each other by gRPC is held there several times."""
    return MEMORY_GB[workload] * (2.5 if kind == "mirrored" else 1)


def tune_horovod(workload: str, pinned: bool) -> dict[str, str]:
    """The variables of the candidate with the fastest median step."""
    candidates = [
        Configuration(
            f"Horovod, cycle {cycle_ms} ms, fusion {fusion_mib} MiB",
            "horovod",
            2,
            environment=(
                ("HOROVOD_CYCLE_TIME", str(cycle_ms)),
                ("HOROVOD_FUSION_THRESHOLD", str(fusion_mib << 20)),
            ),
        )
        for cycle_ms, fusion_mib in HOROVOD_CANDIDATES
    ]
    found = measure_all(candidates, workload, 5, 2, pinned)
    best = min(candidates, key=lambda c: found[c].median_ms)
    for candidate in candidates:
        _say(f"  {candidate.title}: {found[candidate].median_ms:.0f} ms{', taken' if candidate is best else ''}")
    return dict(best.environment)


def run(
    models: Sequence[str], wanted: Sequence[str], rounds: int, steps: int, pinned: bool, peers: str = ""
) -> list[report.Result]:
    """Measures the configurations that are wanted, those that are installed."""
    has_horovod = importlib.util.find_spec("horovod") is not None
    absent: tuple[str, ...] = () if peers else PEERS
    if not has_horovod:
        absent += ("horovod", "whale-horovod")
        _say("Horovod is not installed: its rows stay empty. python -m whale_ops.build_horovod builds it.")
    if not peers:
        _say("No --peers: rows of PyTorch and JAX stay empty.")
    results: list[report.Result] = []
    for workload in models:
        _say(TITLES[workload])
        fitting = [c for c in CONFIGURATIONS if not c.workloads or workload in c.workloads]
        chosen = [c for c in fitting if not wanted or any(w in c.title for w in wanted)]
        if has_horovod and any("horovod" in c.kind for c in chosen):
            tuned = tuple(tune_horovod(workload, pinned).items())
            chosen = [replace(c, environment=c.environment + tuned) if "horovod" in c.kind else c for c in chosen]
        present = [c for c in chosen if c.kind not in absent]
        found = measure_all(present, workload, rounds, steps, pinned, peers)
        for c in chosen:
            result = found.get(c, report.Result(TITLES[workload], c.title, note=NOT_INSTALLED))
            results.append(result)
            text = result.note
            if result.samples_ms:
                low, high = result.quartiles_ms
                text = f"{result.median_ms:7.0f} ms  ({low:.0f} to {high:.0f}), processor {result.cpu_ms:.0f} ms"
            _say(f"  {c.title:<28} {text}")
    return results


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(_ALL))
    parser.add_argument("--only", default="", help="parts of titles of configurations, separated by semicolons")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of a round")
    parser.add_argument("--no-pin", action="store_true", help="let the system place ranks on cores")
    parser.add_argument("--peers", default="", help="Python of an environment with torch, jax and keras")
    parser.add_argument("--out", help="folder that receives benchmarks.md and benchmarks.svg")
    parser.add_argument("--redraw", type=Path, metavar="FOLDER", help="only draw the figure of the page there anew")
    options = parser.parse_args()
    if options.redraw:
        page = (options.redraw / "benchmarks.md").read_text()
        report.plot(report.read_table(page), options.redraw / "benchmarks.svg")
        return
    # Ended from outside, the groups still have to be woken and ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    models = options.models.split(",")
    unknown = sorted(set(models) - set(TITLES))
    if unknown or options.rounds < 2:
        parser.error(f"unknown models: {', '.join(unknown)}" if unknown else "--rounds is at least 2")
    where = machine()
    wanted = [part for part in options.only.split(";") if part]
    results = run(models, wanted, options.rounds, options.steps, not options.no_pin, options.peers)
    table = report.markdown(results)
    sys.stdout.write("\n" + table)
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        report.write_page(folder / "benchmarks.md", table, where, options.rounds, options.steps)
        page = (folder / "benchmarks.md").read_text()
        report.plot(report.read_table(page), folder / "benchmarks.svg")
        _say(f"\nwritten: {folder / 'benchmarks.md'}, {folder / 'benchmarks.svg'}")


if __name__ == "__main__":
    main()
