"""What works of GPUs' exchanges on this machine, a line for each part: ``make gpu``, or ``python -m tests.gpu``.

Without a GPU the parts are tested with stand-ins for it. With one they are tested on it, and what
all-reduces and steps take is written into docs/gpu.md. Ends with 1 where a part fails. What needs no TensorFlow is
tried by gpu_first.py, in its first quarter of an hour.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_model.graph.machine_profile import Curve
from whale.errors import ClusterError, CommError
from whale_ops import build, device_code, device_library

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- measured: python -m tests.gpu -->", "<!-- end -->"
WAITING = "waiting for a GPU"
_DEVICE = "tests/whale_ops/gpu"
_HEAD = ("| through | where | what | bytes | us | GB/s |", "|---|---|---|---|---|---|")
# PERFORMANCE.md of NVIDIA/nccl-tests: what a link carries, comparable for all numbers of ranks.
_BANDWIDTH = (
    "Bus bandwidth as of nccl-tests: of all-reduces 2(n-1)/n of the bytes, of gathers, scatters and all-to-alls "
    "(n-1)/n."
)


class Failed(Exception):
    """A part does not work; the text says what was seen."""


@dataclass(frozen=True)
class Machine:
    """The library, if it is built, the GPUs that it finds, and a file with its kernels' machine code for the first."""

    library: Path | None
    compiled: str
    gpus: tuple[str, ...] = ()
    image: Path | None = None

    @property
    def backends(self) -> dict[str, int]:
        """Values of ``communication.backend`` that can run here, with a number of ranks."""
        found = {"cuda-ipc": 2, "pinned": 2}
        if len(self.gpus) > 1 and device_library.find_nccl() is not None:
            found["nccl"] = min(len(self.gpus), 8)
        return found

    def on(self, backend: str, ranks: int) -> str:
        """Where so many ranks are, in words."""
        gpus = 1 if backend == "cuda-ipc" else min(ranks, len(self.gpus))
        return f"{ranks} ranks, {gpus} GPU{'s' * (gpus > 1)}"


def look() -> Machine:
    """Asks the library for the GPUs, and compiles its kernels for the first.

    Raises:
      Failed: they do not compile.
    """
    library = device_library.PATH
    if not library.exists():
        return Machine(None, "not built: python -m whale_ops.build")
    loaded, count = ctypes.CDLL(str(library)), ctypes.c_int(0)
    if loaded.whale_cuda_devices(ctypes.byref(count)) != 0 or count.value == 0:
        return Machine(library, f"built, {_nccl()}, {_nvrtc()}")
    names = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(256)
        loaded.whale_cuda_device_name(device, name, len(name))
        names.append(name.value.decode())
    try:
        architecture = device_library.find_architecture(library, 0)
        nvrtc = device_code.choose([*device_code.find_nvrtcs()], architecture)
        code = device_code.compile_kernels(nvrtc, architecture)
    except CommError as error:
        raise Failed(str(error)) from error
    descriptor, path = tempfile.mkstemp(prefix="whale-gpu-kernels-")
    with open(descriptor, "wb") as file:
        file.write(code)
    atexit.register(os.unlink, path)
    return Machine(library, f"built, {_nccl()}, kernels by {nvrtc}", tuple(names), Path(path))


def _nccl() -> str:
    return "NCCL found" if device_library.find_nccl() else "no NCCL (pip install nvidia-nccl-cu12)"


def _nvrtc() -> str:
    return next(map(str, device_code.find_nvrtcs()), "no NVRTC (pip install 'nvidia-cuda-nvrtc-cu12==12.9.*')")


def tested(*files: str) -> None:
    """Runs tests of pytest.

    Raises:
      Failed: one fails.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(done.stdout[-2000:] + done.stderr[-500:])


def rates(machine: Machine) -> str:
    """Measures all-reduces between ranks and writes the page's table; what was measured in words.

    Raises:
      Failed: a rank says something else.
    """
    from tests.whale_ops.gpu.cuda_ranks import Ranks

    assert machine.library is not None and machine.image is not None
    gpus = len(machine.gpus)
    rows = []
    for transport, ranks in machine.backends.items():
        if transport == "pinned":  # the core's, and not the library's
            continue
        on = gpus if transport == "nccl" else 1  # GPUs of one kind: they share the machine code
        said = Ranks(machine.library, machine.image, transport, ranks, on).run("rates")
        try:
            seconds = {int(size): float(s) for size, s in json.loads(said[0]).items()}
        except ValueError as error:
            raise Failed("".join(said)[-2000:]) from error
        rows += [
            _row(transport, machine.on(transport, ranks), "all_reduce", ranks, size, s) for size, s in seconds.items()
        ]
    date = datetime.datetime.now(datetime.timezone.utc).date()
    title = f"All-reduces of float32 on {machine.gpus[0]}, {date}, by the library alone. {_BANDWIDTH}"
    PAGE.write_text(with_table(PAGE.read_text(), [title, "", *_HEAD, *rows]))
    return f"measured on {gpus} {machine.gpus[0]}: docs/gpu.md"


def exchanges(machine: Machine) -> str:
    """Measures exchanges as steps have them, between ranks of `whale run`, and adds them to the page's table.

    Raises:
      Failed: the ranks do not start.
    """
    from whale.tools.profile.profile import measure_links

    rows = []
    for backend, ranks in machine.backends.items():
        try:
            curves = measure_links(ranks, variables_of(backend)).curves
        except ClusterError as error:
            raise Failed(str(error)[-2000:]) from error
        rows += rows_of(machine.on(backend, ranks), [one for one in curves if one.through])
    add([f"Exchanges of float32 in steps of TensorFlow. {_BANDWIDTH}", "", *_HEAD, *rows])
    return f"measured on {len(machine.gpus)} {machine.gpus[0]}: docs/gpu.md"


def variables_of(backend: str) -> dict[str, str]:
    """Variables of ranks that exchange so: with CUDA IPC they share a GPU, since others may not read each other."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {
        "WHALE_COMMUNICATION_BACKEND": backend,
        **({"CUDA_VISIBLE_DEVICES": first} if backend == "cuda-ipc" else {}),
    }


def rows_of(on: str, curves: Sequence[Curve]) -> list[str]:
    """A row for the smallest and the largest tensor of each kind."""
    return [
        _row(curve.through, on, curve.kind, curve.ranks, int(size), seconds)
        for curve in curves
        for size, seconds in (curve.samples[0], curve.samples[-1])
    ]


def add(lines: Sequence[str]) -> None:
    """Adds lines to what the page has measured."""
    page = PAGE.read_text()
    before = page.split(BEGIN)[1].split(END)[0].strip().splitlines()
    PAGE.write_text(with_table(page, [*before, "", *lines]))


def steps(machine: Machine) -> str:
    """Measures steps of whole models beside plain TensorFlow and adds them to the page's table.

    Raises:
      Failed: the benchmark does.
    """
    backend = "nccl" if "nccl" in machine.backends else "cuda-ipc"
    models, only = "resnet50,resnet50-amp,gpt", "TensorFlow, 1 thread;Whale, 1 rank;Horovod, 2 ranks;Whale, 2 ranks"
    command = [sys.executable, "-m", "benchmarks.step_time", "--models", models, "--no-pin", "--only", only]
    # Groups of processes share the GPUs while they take turns.
    variables = {**variables_of(backend), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    if done.returncode != 0 or not rows:
        raise Failed(done.stdout[-2000:] + done.stderr[-2000:])
    add([f"Steps on {len(machine.gpus)} {machine.gpus[0]}, Whale's exchanges through `{backend}`.", "", *rows])
    return f"measured on {len(machine.gpus)} {machine.gpus[0]}: docs/gpu.md"


def _row(transport: str, on: str, kind: str, ranks: int, size_bytes: int, seconds: float) -> str:
    times = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "point_to_point": 1.0}
    rate = times.get(kind.partition(" ")[0], (ranks - 1) / ranks) * size_bytes / seconds * 1e-9
    return f"| {transport} | {on} | {kind} | {size_bytes} | {1e6 * seconds:.1f} | {rate:.2f} |"


def with_table(page: str, lines: list[str]) -> str:
    """The page with other lines between its marks."""
    before, rest = page.split(BEGIN)
    return "\n".join([before + BEGIN, *lines, END]) + rest.split(END)[1]


def parts(machine: Machine) -> Iterator[tuple[str, Callable[[], str]]]:
    """(what it is, what tries it and says how)."""
    where = f"tested on {len(machine.gpus)} {machine.gpus[0]}" if machine.gpus else ""
    compiles = shutil.which(build.find_compiler_command()[0]) is not None

    def by_tests(outcome: str, *files: str) -> Callable[[], str]:
        def run() -> str:
            if outcome != where and not compiles:  # their devices are compiled first
                return "not tested: no C++ compiler"
            tested(*files)
            return outcome

        return run

    def on_gpus(run: Callable[[], str]) -> Callable[[], str]:
        return run if machine.gpus else lambda: WAITING

    fake, programs = "tested with the fake device", "tests/distributed/test_gpu.py"
    on_host = "tested on GPUs that are the host's"
    yield "the library for GPUs", lambda: machine.compiled
    yield "kernels", by_tests("tested as host code, element by element", f"{_DEVICE}/test_kernels.py")
    yield "exchanges of ops in groups, order of starts", by_tests(fake, f"{_DEVICE}/test_device.py")
    yield "pieces through pinned memory, ranks without", by_tests(fake, f"{_DEVICE}/test_staged.py")
    yield "programs: groups, stages, micro-batches, ZeRO", by_tests(fake, "tests/runtime/test_device_exchange.py")
    yield (
        "the same through `whale run`, profiles",
        by_tests(
            on_host,
            "tests/host_gpu/test_host_gpus.py",
            "tests/tools/profile/test_links.py",
            f"{programs}::test_what_gpus_of_the_host_compute_is_what_one_device_computes",
        ),
    )
    yield "CUDA IPC and NCCL between ranks", on_gpus(by_tests(where, f"{_DEVICE}/test_cuda.py"))
    yield (
        "programs on GPUs against one device",
        on_gpus(by_tests(where, f"{programs}::test_what_gpus_exchange_is_what_one_device_computes")),
    )
    yield "rates of all-reduces", on_gpus(lambda: rates(machine))
    yield "rates of exchanges in steps", on_gpus(lambda: exchanges(machine))
    yield "steps of models beside TensorFlow", on_gpus(lambda: steps(machine))


def main() -> int:
    """Tries all parts; 1 where one fails."""
    failed, lines = 0, []
    try:
        machine = look()
    except Failed as error:
        machine, failed = Machine(None, f"FAILED\n{error}"), 1
    for what, run in parts(machine):
        try:
            outcome = run()
        except Failed as error:
            outcome, failed = f"FAILED\n{error}", 1
        lines.append(f"{what + ':':50} {outcome}")
        print(lines[-1], flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
