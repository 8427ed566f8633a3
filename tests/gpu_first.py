"""The first quarter of an hour on a machine with a GPU: ``make gpu-first``, or ``python -m tests.gpu_first [WORDS]``.

Parts that stand alone: each is a process or several, with a limit of its own, and prints one line with what was seen;
one that cannot run says why. Without TensorFlow all run but the last ones. WORDS select parts whose name has one of
them. ``--host`` tries the parts themselves on a machine without a GPU, with the stand-ins of tests/host_gpu.
Ends with 1 where a part fails.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.host_gpu.build import build_host_cuda
from tests.whale_ops.gpu.test_cuda import Ranks
from whale.errors import CommError
from whale_ops import device_code, device_library, gpu_driver

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = device_library.PATH
_SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
# NCCL refuses two ranks on one GPU of one host; of two hosts, as it takes them for, they exchange through sockets.
_AS_OTHER_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_NET": "Socket"}


class CannotRun(Exception):
    """A part has nothing to run with here; the text says what is missing."""


class Failed(Exception):
    """A part does not work; the text says what was seen."""


@dataclass
class Machine:
    """The machine that parts run on.

    Attributes:
        folder: for files of this run.
        variables: under which processes have the GPU.
        image: a file with the kernels' machine code.
        host: whether the GPU is the host.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    image: Path | None = None
    host: bool = False

    def code(self) -> Path:
        if self.image is None:
            raise CannotRun("there is no machine code of the kernels")
        return self.image

    def ranks(
        self, transport: str, size: int, more: Sequence[Mapping[str, str]] = (), under: Sequence[str] = ()
    ) -> Ranks:
        variables = [{**self.variables, **(more[rank] if more else {})} for rank in range(size)]
        return Ranks(LIBRARY, self.code(), transport, size, variables=variables, under=under)


def ran(machine: Machine, command: Sequence[str], limit_s: float) -> str:
    """Returns what a process prints.

    Raises:
      Failed: it ends with an error, or not at all.
    """
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **machine.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"did not end within {limit_s:.0f} s: {_text(error.stdout)[-1500:]}") from error
    if done.returncode != 0:
        raise Failed(f"ended with {done.returncode}: {done.stdout.strip()[-1500:]}")
    return done.stdout.strip()


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def said_by(ranks: Ranks, mode: str, limit_s: float) -> list[str]:
    """Returns what ranks print.

    Raises:
      Failed: they do not end.
    """
    try:
        return [text.strip() for text in ranks.run(mode, limit_s)]
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{ranks.size} ranks did not end within {limit_s:.0f} s: {_text(error.stdout)[-1500:]}") from error


def driver(machine: Machine) -> str:
    """The GPUs and their driver; nothing else can run without."""
    if machine.host:
        return "the host as GPU"
    found = gpu_driver.look()
    if found is None or not found.gpus:
        raise CannotRun("no driver of NVIDIA, or it lists no GPU" if found is None else found.failure or "no GPU")
    smi = shutil.which("nvidia-smi")
    version = ""
    if smi is not None:
        version = ran(machine, [smi, "--query-gpu=driver_version", "--format=csv,noheader"], 30).splitlines()[0]
    names = ", ".join(f"{gpu.name}, {gpu.memory_bytes >> 20} MiB" for gpu in found.gpus)
    return f"{names}; driver {version}, CUDA up to {found.cuda[0]}.{found.cuda[1]}"


def code(machine: Machine) -> str:
    """Machine code of the kernels, for the very GPU."""
    if machine.host:
        machine.image = build_host_cuda().image
        return "kernels compiled as host code"
    found, there = [*device_code.find_nvrtcs()], gpu_driver.look()
    architecture = device_library.find_architecture(LIBRARY, 0)
    nvrtc = device_code.choose(found, architecture, there.cuda[0] if there else None)
    start_s = time.perf_counter()
    image = device_code.compile_kernels(nvrtc, architecture)
    took_s = time.perf_counter() - start_s
    machine.image = machine.folder / "kernels"
    machine.image.write_bytes(image)
    target = nvrtc.find_target(architecture)
    return f"{len(image)} bytes for {target} by NVRTC {nvrtc.version[0]}.{nvrtc.version[1]} in {took_s:.1f} s"


def other_code(machine: Machine, path: Path) -> str:
    """The kernels in machine code that was compiled elsewhere, as by an older NVRTC."""
    command = [sys.executable, "-m", "tests.whale_ops.gpu.cuda_kernels", str(LIBRARY), str(path), "short"]
    return f"{path.name}: {ran(machine, command, 120)}"


def _kernels(machine: Machine, *mode: str) -> list[str]:
    return [sys.executable, "-m", "tests.whale_ops.gpu.cuda_kernels", str(LIBRARY), str(machine.code()), *mode]


def kernels(machine: Machine) -> str:
    """Kernels against NumPy."""
    return ran(machine, _kernels(machine, *(["short"] if machine.host else [])), 180)


def exchanges(machine: Machine, transport: str, size: int, more: Sequence[Mapping[str, str]] = ()) -> str:
    """All kinds of exchanges against NumPy."""
    said = said_by(machine.ranks(transport, size, more), "", 180)
    if said != [f"rank {rank}: all right" for rank in range(size)]:
        raise Failed("; ".join(text[-1500:] for text in said))
    return "all kinds right"


def pinned(machine: Machine) -> str:
    """Copies to the GPU's memory and back, in one run and in rows that are not aligned."""
    library, seconds, rows = ctypes.CDLL(str(LIBRARY)), (ctypes.c_double * 2)(), []
    library.whale_cuda_last_error.restype = ctypes.c_char_p
    for size_bytes in (1 << 20, 1 << 22, 1 << 24, 1 << 28):
        for number in (1, 1 << 10):
            values = os.urandom(1 << 20) * (size_bytes >> 20)
            host = ctypes.create_string_buffer(values, size_bytes)
            if library.whale_cuda_pinned(0, host, ctypes.c_size_t(size_bytes), number, seconds) != 0:
                raise Failed(library.whale_cuda_last_error().decode())
            if host.raw != values:
                raise Failed(f"{size_bytes} bytes in {number} rows come back as others")
            if number == 1:
                rows.append(f"{size_bytes >> 20} MiB {' '.join(f'{size_bytes / s * 1e-9:.1f}' for s in seconds)}")
    return f"right; GB/s in and out: {', '.join(rows)}"


def sanitized(machine: Machine, tool: str, size: int = 0) -> str:
    """Kernels, or exchanges of ranks, under compute-sanitizer."""
    program = next(filter(None, map(shutil.which, _SANITIZERS)), None)
    if program is None or machine.host:
        raise CannotRun("no compute-sanitizer (CUDA's toolkit has it)" if program is None else "the GPU is the host")
    under = [program, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
    if size:
        said = said_by(machine.ranks("cuda-ipc", size, under=under), "short", 240)
        if not all(f"rank {rank}: all right" in text for rank, text in enumerate(said)):
            raise Failed("; ".join(text[-1500:] for text in said))
    else:
        said = [ran(machine, [*under, *_kernels(machine, "short")], 240)]
    summaries = [re.search(r"(ERROR|RACECHECK) SUMMARY: (.*)", text) for text in said]
    clean = all(one is not None and re.match(r"0 (errors|hazards)", one[2]) for one in summaries)
    if not clean:
        raise Failed("; ".join(text[-1500:] for text in said))
    return "; ".join(one[2] for one in summaries if one)


def _nccl(machine: Machine) -> str:
    if machine.host:
        raise CannotRun("the GPU is the host")
    path = device_library.find_nccl()
    if path is None:
        raise CannotRun("no libnccl.so.2: pip install nvidia-nccl-cu12")
    version = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version))
    return f"NCCL {version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"


def nccl(machine: Machine, size: int) -> str:
    """All kinds of exchanges by NCCL."""
    version = _nccl(machine)
    return f"{version}, {exchanges(machine, 'nccl', size, _other_hosts(size) if size > 1 else ())}"


def _other_hosts(size: int) -> list[dict[str, str]]:
    return [{**_AS_OTHER_HOST, "NCCL_HOSTID": f"host{rank}"} for rank in range(size)]


def abandoned(machine: Machine) -> str:
    """Two communicators, one with a kernel that waits for a rank that never comes: giving up ends."""
    version = _nccl(machine)
    with machine.ranks("nccl", 2, _other_hosts(2)).started("abandon") as (first, _):
        try:
            said = first.communicate(timeout=60)[0].strip()
        except subprocess.TimeoutExpired as error:
            raise Failed(f"giving up did not end within 60 s: {_text(error.stdout)[-1500:]}") from error
    if "gave up" not in said:
        raise Failed(said[-1500:])
    return f"{version}, {said.splitlines()[-1]}"


def lost(machine: Machine, transport: str, sign: signal.Signals) -> str:
    """A rank is killed or frozen between exchanges: the other one ends with an error."""
    more = _other_hosts(2) if transport == "nccl" else ()
    if transport == "nccl":
        _nccl(machine)
    with machine.ranks(transport, 2, more).started("lost", most_s=3.0) as (first, second):
        assert second.stdout is not None
        for line in second.stdout:
            if "ready" in line:
                break
        else:
            raise Failed(f"it did not come so far: {first.communicate(timeout=60)[0][-1500:]}")
        time.sleep(0.5)
        sent_s = time.time()
        second.send_signal(sign)
        try:
            said = first.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired as error:
            raise Failed(f"the other rank did not end within 60 s: {_text(error.stdout)[-1500:]}") from error
    told = re.search(r"rank 0: ([\d.]+) (.*)", said)
    if told is None:
        raise Failed(said[-1500:])
    return f"after {float(told[1]) - sent_s:.2f} s: {told[2]}"


def latencies(machine: Machine) -> str:
    """All-reduces between two ranks on the GPU, through CUDA IPC."""
    said = said_by(machine.ranks("cuda-ipc", 2), "rates", 180)
    try:
        seconds = {int(size): float(s) for size, s in json.loads(said[0]).items()}
    except ValueError as error:
        raise Failed("; ".join(said)[-1500:]) from error
    return ", ".join(f"{_size(size)}: {1e6 * s:.0f} us ({size / s * 1e-9:.1f} GB/s)" for size, s in seconds.items())


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 10} KiB" if size_bytes < 1 << 20 else f"{size_bytes >> 20} MiB"


def rates(machine: Machine) -> str:
    """GB/s that the kernels read and write."""
    if machine.host:
        raise CannotRun("the GPU is the host")
    found = json.loads(ran(machine, _kernels(machine, "rates"), 240))
    return "GB/s read and written: " + ", ".join(f"{what} {rate:.0f}" for what, rate in found.items())


def programs(machine: Machine) -> str:
    """Programs with TensorFlow against one device."""
    if importlib.util.find_spec("tensorflow") is None or machine.host:
        raise CannotRun("no TensorFlow here" if not machine.host else "the GPU is the host")
    tests = "tests/distributed/test_gpu.py::test_what_gpus_exchange_is_what_one_device_computes"
    return ran(machine, [sys.executable, "-m", "pytest", "-q", "-rs", tests], 600).splitlines()[-1]


def parts(machine: Machine, others: Sequence[Path]) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, what runs it) of all parts, in order."""
    yield "GPUs", lambda: driver(machine)
    yield "device code by NVRTC", lambda: code(machine)
    yield "kernels against NumPy", lambda: kernels(machine)
    for path in others:
        yield "kernels compiled elsewhere", lambda path=path: other_code(machine, path)  # type: ignore[misc]
    for size in (1, 2, 3):
        yield f"exchanges by CUDA IPC, ranks: {size}", lambda size=size: exchanges(machine, "cuda-ipc", size)  # type: ignore[misc]
    yield "copies to pinned memory", lambda: pinned_apart(machine)
    for tool in ("memcheck", "racecheck"):
        yield f"kernels under {tool}", lambda tool=tool: sanitized(machine, tool)  # type: ignore[misc]
    yield "exchanges of a rank under memcheck", lambda: sanitized(machine, "memcheck", 1)
    yield "NCCL, one rank", lambda: nccl(machine, 1)
    yield "NCCL, two ranks as of two hosts", lambda: nccl(machine, 2)
    yield "NCCL, two communicators given up", lambda: abandoned(machine)
    for transport in ("cuda-ipc", "nccl"):
        for sign in (signal.SIGKILL, signal.SIGSTOP):
            name = "killed" if sign == signal.SIGKILL else "frozen"
            yield f"{transport}, the peer is {name}", lambda t=transport, s=sign: lost(machine, t, s)  # type: ignore[misc]
    yield "all-reduces of two ranks on one GPU", lambda: latencies(machine)
    yield "bandwidth of kernels", lambda: rates(machine)
    yield "programs of TensorFlow", lambda: programs(machine)


def pinned_apart(machine: Machine) -> str:
    """`pinned` in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu_first", "--pinned"]
    return ran(machine, command, 120)


def main() -> int:
    """Tries all parts; 1 where one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_first", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("words", nargs="*", help="parts whose name has one of these")
    parser.add_argument("--host", action="store_true", help="the host in the place of the GPU")
    parser.add_argument("--code", nargs="*", type=Path, default=[], help="files with machine code for the first GPU")
    parser.add_argument("--pinned", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="whale-gpu-") as folder:
        machine = Machine(Path(folder), host=asked.host)
        if asked.host:
            machine.variables = build_host_cuda().variables()
        if asked.pinned:
            print(pinned(machine))
            return 0
        for name, run in parts(machine, asked.code):
            needed = name in ("GPUs", "device code by NVRTC")
            if asked.words and not needed and not any(word in name for word in asked.words):
                continue
            start_s = time.perf_counter()
            try:
                outcome = run()
            except CannotRun as missing:
                outcome = f"cannot run: {missing}"
            except (Failed, CommError) as error:
                outcome, failed = f"FAILED: {error}", 1
            print(f"{name + ':':42} {outcome} [{time.perf_counter() - start_s:.1f} s]", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
