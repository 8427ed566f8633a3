"""Seconds of an all-reduce inside a machine: Whale and others, in one interleaved run (`make bench-comm`).

    python -m benchmarks.comm [--ranks 2,4] [--sizes 1KB,64MB,100x10KB] [--rounds 9] [--mpich FOLDER] [--out docs]
    python -m benchmarks.comm --what all-to-all: the same of all-to-alls, where libraries have one

Every library is a process group that stays alive. For each size, in each round, every group runs some steps, one group
after the other, while the others are stopped: what else the machine does meets all of them. A sample is the mean of one
round on the slowest rank; shown are the medians. `--out` keeps what an earlier run measured for other sizes or ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comm import report
from benchmarks.comm.worker import ALL_REDUCE, ALL_TO_ALL
from benchmarks.groups import Group, under_mpirun
from benchmarks.machine import machine
from whale.launcher.worker import make_thread_variables
from whale_ops.build import find_compiler

WARM_UP = 2  # rounds that are not counted; the first one builds
TIMEOUT_S = 120.0
STEP_BYTES = 512 << 20  # a step has at most this many bytes in all its all-reduces (but one at least)
MOST_REDUCTIONS = 32
EXCHANGES = ("whale", "horovod", "mpi")  # what begins so has an all-to-all
ROUND_S = 0.1  # about how long a group has its turn


@dataclass(frozen=True)
class Size:
    """What is reduced: a number of tensors of some bytes each, together."""

    title: str
    tensor_bytes: int
    tensors: int = 1

    @property
    def reductions(self) -> int:
        """All-reduces of a step."""
        return max(1, min(MOST_REDUCTIONS, STEP_BYTES // (self.tensor_bytes * self.tensors)))


SIZES = (
    *(Size(f"{4**k} KB", 1024 * 4**k) for k in range(5)),
    *(Size(f"{4**k} MB", 1024**2 * 4**k) for k in range(5)),
    Size("100 x 10 KB", 10 << 10, 100),
)


@dataclass(frozen=True)
class Library:
    """One row of the table: the kind of the worker, and variables of its processes."""

    title: str
    kind: str
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def needs(self) -> str:
        """The package without which it cannot be measured."""
        return {"horovod": "horovod", "mpi": "mpi4py"}.get(self.kind, "")


def _horovod(title: str, cycle_ms: str, **environment: str) -> Library:
    return Library(f"{title}, cycle {cycle_ms} ms", "horovod", (("HOROVOD_CYCLE_TIME", cycle_ms), *environment.items()))


LIBRARIES = (
    Library("Whale", "whale"),
    Library("Whale through slots", "whale-slots"),
    Library("Whale over MPI", "whale-mpi"),
    # Its own cycle time is 1 ms; a shorter one makes small tensors faster and takes processor time all the time.
    _horovod("Horovod, MPI", "1"),
    _horovod("Horovod, MPI", "0.1"),
    _horovod("Horovod, Gloo", "1", HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo"),
    _horovod("Horovod, Gloo", "0.1", HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo"),
    Library("TensorFlow ring", "tensorflow"),
    Library("Open MPI, no TensorFlow", "mpi"),
    Library("MPICH, no TensorFlow", "mpi", (("BENCH_MPI", "mpich"),)),
    Library(report.LIMIT, "limit"),
    Library(report.EXCHANGE_LIMIT, "limit-exchange"),
)


def start(
    stack: contextlib.ExitStack, library: Library, ranks: int, mpich: Path | None, probe: Path, what: str
) -> Group:
    """The running processes of a library, until the end of `stack`."""
    worker = [sys.executable, "-m", "benchmarks.comm.worker", library.kind, "--what", what]
    variables = {name: str(value) for name, value in make_thread_variables(1).items()}
    variables |= {**dict(library.environment), "BENCH_RANKS": str(ranks)}
    if library.kind.startswith("limit"):
        return stack.enter_context(Group(library.title, worker, 1, variables | {"BENCH_PROBE": str(probe)}))
    if "BENCH_MPI" in variables:
        assert mpich is not None
        variables |= {"MPI4PY_LIBMPI": str(next((mpich / "lib").glob("libmpi.so.*")))}
        line = [str(mpich / "bin" / "mpirun"), "-np", str(ranks), *worker]
        return stack.enter_context(Group(library.title, line, ranks, variables))
    if library.kind == "tensorflow":
        variables["BENCH_WORKERS"] = ",".join(f"127.0.0.1:{port}" for port in _free_ports(ranks))
    if library.kind == "mpi":
        variables["MPI4PY_LIBMPI"] = str(next((Path(sys.prefix) / "lib").glob("libmpi.so.*")))
    if "HOROVOD_CONTROLLER" in variables:
        variables |= _horovod_meeting_point(stack, ranks)
    # TensorFlow's servers give up those that do not answer for some seconds; they are idle while nothing is asked.
    stops = library.kind != "tensorflow"
    return stack.enter_context(Group(library.title, under_mpirun(worker, ranks), ranks, variables, stops=stops))


def _horovod_meeting_point(stack: contextlib.ExitStack, ranks: int) -> dict[str, str]:
    """What `horovodrun --gloo` starts for its processes, and the variables that lead there."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    stack.callback(server.stop)
    server.init(get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks))
    address = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    # It gives up peers that do not answer for 30 s: while the group is stopped they do not.
    return {**address, "HOROVOD_GLOO_IFACE": "lo", "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def measure(groups: dict[str, Group], size: Size, rounds: int) -> dict[str, list[float]]:
    """Seconds of one all-reduce in each round, by library."""
    samples: dict[str, list[float]] = {title: [] for title in groups}
    steps = dict.fromkeys(groups, 1)
    for number in range(-WARM_UP, rounds):
        for title, group in groups.items():
            answers = group.ask(
                TIMEOUT_S,
                tensor_bytes=size.tensor_bytes,
                tensors=size.tensors,
                reductions=size.reductions,
                steps=steps[title],
            )
            seconds = max(answer["seconds"] for answer in answers)
            steps[title] = max(1, min(50, int(ROUND_S / (seconds * size.reductions))))
            if number >= 0:
                samples[title].append(seconds)
    return samples


def build_probe(folder: Path) -> Path:
    """Compiles the probe of the memory's limit for this processor."""
    library = folder / "probe.so"
    source = Path(__file__).with_name("probe.cc")
    flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*find_compiler(), *flags, str(source), "-o", str(library)], check=True)
    return library


def present(wanted: Sequence[str], mpich: Path | None, what: str) -> list[Library]:
    """The libraries that are asked for and can be measured; says which cannot."""
    found = []
    for library in LIBRARIES:
        if what == ALL_TO_ALL and not library.kind.startswith(EXCHANGES):
            continue
        if wanted and not any(part in library.title for part in wanted):
            continue
        missing = library.needs if library.needs and importlib.util.find_spec(library.needs) is None else ""
        if dict(library.environment).get("BENCH_MPI") and mpich is None:
            missing = "mpich (--mpich)"
        if missing:
            print(f"{library.title}: {missing} is not installed, the row stays empty", flush=True)
        else:
            found.append(library)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--what", choices=(ALL_REDUCE, ALL_TO_ALL), default=ALL_REDUCE)
    parser.add_argument("--ranks", default="2,4", help="numbers of processes")
    parser.add_argument("--sizes", default="", help="titles without spaces, 1KB,100x10KB; empty: all")
    parser.add_argument("--only", default="", help="parts of titles of libraries, separated by semicolons")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mpich", type=Path, help="folder with MPICH's bin/mpirun and lib/libmpi.so")
    parser.add_argument("--out", type=Path, help="folder that receives communication.md, .svg and .json")
    parser.add_argument("--redraw", type=Path, metavar="FOLDER", help="only draw the figure of the results there anew")
    options = parser.parse_args()
    order = [size.title for size in SIZES], [library.title for library in LIBRARIES]
    if options.redraw:
        kept = report.read(options.redraw / "communication.json")
        report.plot(kept, *order, options.redraw / "communication.svg")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    known = [size.title.replace(" ", "") for size in SIZES if options.what == ALL_REDUCE or size.tensors == 1]
    titles = options.sizes.split(",") if options.sizes else known
    sizes = [size for size in SIZES if size.title.replace(" ", "") in titles]
    if not set(titles) <= set(known) or options.rounds < 2:
        parser.error(f"--sizes are some of {','.join(known)}; --rounds is at least 2")
    if options.what == ALL_TO_ALL and options.out:
        parser.error("--out keeps all-reduces")
    libraries = present([part for part in options.only.split(";") if part], options.mpich, options.what)
    where, results = machine(), []
    with tempfile.TemporaryDirectory(prefix="whale-probe-") as folder:
        probe = build_probe(Path(folder))
        for ranks in map(int, options.ranks.split(",")):
            with contextlib.ExitStack() as stack:
                groups = {
                    library.title: start(stack, library, ranks, options.mpich, probe, options.what)
                    for library in libraries
                }
                for size in sizes:
                    found = measure(groups, size, options.rounds)
                    results += [report.Result(ranks, size.title, title, tuple(s)) for title, s in found.items()]
                    times = ", ".join(f"{r.library} {1e3 * r.median_s:.3f}" for r in results[-len(found) :])
                    print(f"{ranks} processes, {size.title}, ms: {times}", flush=True)
                    if options.out:  # after each size, so that a run that is ended keeps what it has
                        report.write(options.out, results, *order, where=where, rounds=options.rounds)
    print("\n" + report.markdown(results, *order))


if __name__ == "__main__":
    main()
