"""The first quarter of an hour on a machine with a GPU: ``make gpu-first``, or ``python -m tests.gpu_first [WORDS]``.

Parts that stand alone: each is a process or several, with a limit of its own, and prints one line with what was seen;
one that cannot run says why, and one for which there is no time left (``--minutes``) is left out. Without TensorFlow
all run but the last ones; what is needed without a network comes in a folder of some MB (``make gpu-first-pack``).
WORDS select parts whose name has one of them. ``--host`` tries the parts themselves on a machine without a GPU, with
the stand-ins of tests/host_gpu. Ends with 1 where a part fails, and with 2 where nothing can run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.host_gpu.build import build_host_cuda
from tests.whale_ops.gpu.cuda_ranks import Ranks
from whale.errors import CommError
from whale_ops import build, device_code, device_library, gpu_driver

ROOT = Path(__file__).resolve().parents[1]
PACK = ROOT / "build/gpu-first"
# Compute capabilities, without the dot, from the P100 on.
ARCHITECTURES = (60, 70, 75, 80, 86, 89, 90, 100, 120)
LIBRARY = device_library.PATH
_PACKAGES = ("numpy", "ml_dtypes")
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
        end_s: when the time is over, by the monotonic clock.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    image: Path | None = None
    host: bool = False
    end_s: float = math.inf

    def limit_s(self, most_s: float) -> float:
        """Returns so many seconds, or fewer where the time is over before."""
        return max(1.0, min(most_s, self.end_s - time.monotonic()))

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
    limit_s = machine.limit_s(limit_s)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **machine.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"did not end within {limit_s:.0f} s: {_text(error.stdout)[-1500:]}") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started: it would keep the GPU's memory
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    if process.returncode != 0:
        raise Failed(f"ended with {process.returncode}: {said.strip()[-1500:]}")
    return said.strip()


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def said_by(machine: Machine, ranks: Ranks, mode: str, limit_s: float) -> list[str]:
    """Returns what ranks print.

    Raises:
      Failed: they do not end.
    """
    limit_s = machine.limit_s(limit_s)
    try:
        return [text.strip() for text in ranks.run(mode, limit_s)]
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{ranks.size} ranks did not end within {limit_s:.0f} s: {_text(error.stdout)[-1500:]}") from error


def _inside(machine: Machine, name: str, limit_s: float, *arguments: str) -> str:
    """Runs one of `INSIDE` in a process of its own: what asks the driver may hang."""
    return ran(machine, [sys.executable, "-m", "tests.gpu_first", "--inside", name, *arguments], limit_s)


def packages(machine: Machine) -> str:
    """The Python packages that parts without TensorFlow need, and the libraries; nothing else can run without."""
    lacking = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    version = ".".join(map(str, sys.version_info[:2]))
    if lacking:
        raise CannotRun(
            f"Python {version} has no {' and '.join(lacking)}: pip install, or make gpu-first-pack elsewhere"
        )
    if not LIBRARY.exists():
        raise CannotRun(f"{LIBRARY.name} is not built: python -m whale_ops.build, or copy whale_ops/lib")
    if build.compute_core_digest().encode() not in LIBRARY.read_bytes():
        raise CannotRun(f"{LIBRARY.name} is of other sources: python -m whale_ops.build, or copy whale_ops/lib")
    return f"Python {version}, {', '.join(_PACKAGES)}"


def driver(machine: Machine) -> str:
    """The GPUs and their driver; nothing else can run without."""
    if machine.host:
        return "the host as GPU"
    try:
        said = _inside(machine, "driver", 60)
    except Failed as error:
        raise CannotRun(f"the driver does not answer: {error}") from error
    if not said.startswith("GPUs: "):
        raise CannotRun(said)
    return said.removeprefix("GPUs: ")


def _look() -> str:
    found = gpu_driver.look()
    if found is None or not found.gpus:
        return "no driver of NVIDIA, or it lists no GPU" if found is None else found.failure or "no GPU"
    smi, version = shutil.which("nvidia-smi"), "unknown"
    if smi is not None:
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        version = asked.stdout.strip().partition("\n")[0] or version
    names = ", ".join(f"{gpu.name}, {gpu.memory_bytes >> 20} MiB" for gpu in found.gpus)
    return f"GPUs: {names}; driver {version}, CUDA up to {found.cuda[0]}.{found.cuda[1]}"


def code(machine: Machine) -> str:
    """Machine code of the kernels, for the very GPU."""
    if machine.host:
        machine.image = build_host_cuda().image
        return "kernels compiled as host code"
    path = machine.folder / "kernels"
    said = _inside(machine, "code", 120, str(path))
    machine.image = path
    return said


def _compile(path: str) -> str:
    found, there = [*device_code.find_nvrtcs()], gpu_driver.look()
    architecture = device_library.find_architecture(LIBRARY, 0)
    try:
        nvrtc = device_code.choose(found, architecture, there.cuda[0] if there else None)
    except CommError:
        packed = PACK / f"kernels-{architecture}-{device_code.compute_source_digest()}"
        if not packed.exists():
            raise
        shutil.copy(packed, path)
        return f"{packed.stat().st_size} bytes for {architecture}, compiled by make gpu-first-pack: no NVRTC here"
    start_s = time.perf_counter()
    image = device_code.compile_kernels(nvrtc, architecture)
    took_s = time.perf_counter() - start_s
    Path(path).write_bytes(image)
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
    said = said_by(machine, machine.ranks(transport, size, more), "", 180)
    if said != [f"rank {rank}: all right" for rank in range(size)]:
        raise Failed("; ".join(text[-1500:] for text in said))
    return "all kinds right"


def pinned(machine: Machine) -> str:
    """Copies to the GPU's memory and back, in one run and in rows that are not aligned."""
    return _inside(machine, "pinned", 120)


def _copy() -> str:
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
        said = said_by(machine, machine.ranks("cuda-ipc", size, under=under), "short", 240)
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
    said = _inside(machine, "nccl", 60)
    if not said.startswith("NCCL "):
        raise CannotRun(said)
    return f"the host's {said}" if machine.host else said


def _look_for_nccl() -> str:
    path = device_library.find_nccl()
    if path is None:
        return "no libnccl.so.2: pip install nvidia-nccl-cu12"
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
            said = first.communicate(timeout=machine.limit_s(60))[0].strip()
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
        limit = threading.Timer(machine.limit_s(60), second.kill)
        limit.start()
        for line in second.stdout:
            if "ready" in line:
                limit.cancel()
                break
        else:
            limit.cancel()
            raise Failed(f"it did not come so far: {first.communicate(timeout=machine.limit_s(60))[0][-1500:]}")
        time.sleep(0.5)
        sent_s = time.time()
        second.send_signal(sign)
        try:
            said = first.communicate(timeout=machine.limit_s(60))[0]
        except subprocess.TimeoutExpired as error:
            raise Failed(f"the other rank did not end within 60 s: {_text(error.stdout)[-1500:]}") from error
    told = re.search(r"rank 0: ([\d.]+) (.*)", said)
    if told is None:
        raise Failed(said[-1500:])
    return f"after {float(told[1]) - sent_s:.2f} s: {told[2]}"


def latencies(machine: Machine) -> str:
    """All-reduces between two ranks on the GPU, through CUDA IPC."""
    seconds = _seconds_by_bytes(machine, "rates")
    return ", ".join(f"{_size(size)}: {1e6 * s:.0f} us ({size / s * 1e-9:.1f} GB/s)" for size, s in seconds.items())


def buckets(machine: Machine) -> str:
    """160 tensors of 100 MB between two ranks on the GPU, through CUDA IPC, in buckets of several sizes."""
    seconds = _seconds_by_bytes(machine, "buckets")
    return ", ".join(f"in {_size(size)}: {1e3 * s:.1f} ms" for size, s in seconds.items())


def _seconds_by_bytes(machine: Machine, mode: str) -> dict[int, float]:
    said = said_by(machine, machine.ranks("cuda-ipc", 2), mode, 180)
    try:
        return {int(size): float(s) for size, s in json.loads(said[0]).items()}
    except ValueError as error:
        raise Failed("; ".join(said)[-1500:]) from error


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 10} KiB" if size_bytes < 1 << 20 else f"{size_bytes >> 20} MiB"


def rates(machine: Machine) -> str:
    """GB/s that the kernels read and write."""
    if machine.host:
        raise CannotRun("the GPU is the host")
    found = json.loads(ran(machine, _kernels(machine, "rates"), 240))
    return "GB/s read and written: " + ", ".join(f"{what} {rate:.0f}" for what, rate in found.items())


def _with_tensorflow(machine: Machine) -> None:
    if importlib.util.find_spec("tensorflow") is None or machine.host:
        raise CannotRun("no TensorFlow here" if not machine.host else "the GPU is the host")


def speeds(machine: Machine) -> str:
    """What `auto_parallel` measures of the GPU, by the types of products."""
    _with_tensorflow(machine)
    return _inside(machine, "speeds", 120)


def _measure_speeds() -> str:
    from whale.runtime.compile.microbenchmark import _measured_chains

    rows = []
    for dtype in ("float32", "bfloat16", "float16"):
        flops_per_s, bytes_per_s = _measured_chains(dtype)(0.3)
        rows.append(f"{dtype} {flops_per_s * 1e-12:.1f} TFLOP/s")
    return f"{', '.join(rows)}; {bytes_per_s * 1e-9:.0f} GB/s"


def steps(machine: Machine, model: str) -> str:
    """Steps of a model of Keras beside plain TensorFlow, with and without XLA."""
    _with_tensorflow(machine)
    titles = "TensorFlow, 1 thread;TensorFlow with XLA, 1 thread;Whale, 1 rank;Whale with XLA, 1 rank"
    command = [sys.executable, "-m", "benchmarks.step_time", "--models", model, "--no-pin", "--rounds", "3"]
    said = ran(machine, [*command, "--only", titles], 300)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line.startswith("|")]
    return "; ".join(" ".join(row) for row in rows[2:]) or said[-500:]


def programs(machine: Machine) -> str:
    """Programs with TensorFlow against one device."""
    _with_tensorflow(machine)
    tests = "tests/distributed/test_gpu.py::test_what_gpus_exchange_is_what_one_device_computes"
    return ran(machine, [sys.executable, "-m", "pytest", "-q", "-rs", tests], 600).splitlines()[-1]


def parts(machine: Machine, others: Sequence[Path]) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, what runs it) of all parts, in order."""
    yield "Python", lambda: packages(machine)
    yield "GPUs", lambda: driver(machine)
    yield "device code by NVRTC", lambda: code(machine)
    yield "kernels against NumPy", lambda: kernels(machine)
    for path in others:
        yield "kernels compiled elsewhere", lambda path=path: other_code(machine, path)  # type: ignore[misc]
    for size in (1, 2, 3):
        yield f"exchanges by CUDA IPC, ranks: {size}", lambda size=size: exchanges(machine, "cuda-ipc", size)  # type: ignore[misc]
    yield "copies to pinned memory", lambda: pinned(machine)
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
    yield "100 MB in buckets, two ranks on one GPU", lambda: buckets(machine)
    yield "bandwidth of kernels", lambda: rates(machine)
    yield "speeds that auto_parallel measures", lambda: speeds(machine)
    for model in ("resnet50", "gpt"):
        yield f"steps of {model}", lambda model=model: steps(machine, model)  # type: ignore[misc]
    yield "programs of TensorFlow", lambda: programs(machine)


def pack(python: str) -> None:
    """Fills `PACK` with what parts without TensorFlow need beside the checkout, where nothing can be installed.

    Args:
        python: the version of that machine's Python, 3.12; "" is this one's.
    """
    shutil.rmtree(PACK, ignore_errors=True)
    (PACK / "wheels").mkdir(parents=True)
    fitting = ["--only-binary", ":all:", *(["--python-version", python] if python else [])]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", *fitting]
    subprocess.run([*command, "-d", str(PACK / "wheels"), *_PACKAGES], check=True)
    nvrtcs = [*device_code.find_nvrtcs()]
    for architecture in ARCHITECTURES:
        with contextlib.suppress(CommError):  # that machine's NVRTC compiles them
            code = device_code.compile_kernels(device_code.choose(nvrtcs, architecture), architecture)
            (PACK / f"kernels-{architecture}-{device_code.compute_source_digest()}").write_bytes(code)
    libraries = [LIBRARY, *(LIBRARY.with_name(name) for name in (build.CORE_NAME, "build_info.json"))]
    paths = [PACK, *libraries]
    size_bytes = sum(file.stat().st_size for path in paths for file in ([path] if path.is_file() else path.rglob("*")))
    print(f"carry, beside the files of git, {size_bytes / 1e6:.1f} MB:")
    for path in paths:
        print(f"  {path.relative_to(ROOT)}")


def unpack() -> None:
    """Makes packages of `PACK` importable, here and in processes, where they are missing."""
    if all(importlib.util.find_spec(name) is not None for name in _PACKAGES):
        return
    folder = PACK / "python"
    for wheel in (PACK / "wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    importlib.invalidate_caches()


# What parts let a process of their own do; the rest of its command line are the arguments.
INSIDE: dict[str, Callable[..., str]] = {
    "driver": _look,
    "code": _compile,
    "pinned": _copy,
    "nccl": _look_for_nccl,
    "speeds": _measure_speeds,
}
FIRST = ("Python", "GPUs", "device code by NVRTC")  # without these nothing can run


def main() -> int:
    """Tries all parts; 1 where one fails, 2 where there is nothing to try."""
    if sys.argv[1:2] == ["--inside"]:
        print(INSIDE[sys.argv[2]](*sys.argv[3:]))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_first", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("words", nargs="*", help="parts whose name has one of these")
    parser.add_argument("--host", action="store_true", help="the host in the place of the GPU")
    parser.add_argument("--code", nargs="*", type=Path, default=[], help="files with machine code for the first GPU")
    parser.add_argument("--minutes", type=float, default=13.0, help="after which no part begins, and all end; 13")
    parser.add_argument("--pack", metavar="PYTHON", nargs="?", const="", help="only pack what that Python needs there")
    asked = parser.parse_args()
    if asked.pack is not None:
        pack(asked.pack)
        return 0
    unpack()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="whale-gpu-") as folder:
        machine = Machine(Path(folder), host=asked.host, end_s=time.monotonic() + 60 * asked.minutes)
        if asked.host:
            machine.variables = build_host_cuda().variables()
        for name, run in parts(machine, asked.code):
            if asked.words and name not in FIRST and not any(word in name for word in asked.words):
                continue
            if time.monotonic() > machine.end_s:
                print(f"{name + ':':42} left out: {asked.minutes:g} minutes are over (--minutes)", flush=True)
                continue
            start_s = time.perf_counter()
            try:
                outcome = run()
            except CannotRun as missing:
                outcome = f"cannot run: {missing}"
            except (Failed, CommError) as error:
                outcome, failed = f"FAILED: {error}", 1
            print(f"{name + ':':42} {' '.join(outcome.split())} [{time.perf_counter() - start_s:.1f} s]", flush=True)
            if name in FIRST[:2] and outcome.startswith("cannot run"):
                return 2
    return failed


if __name__ == "__main__":
    sys.exit(main())
