"""The core and exchanges of GPUs under sanitizers: ``python -m tests.whale_ops.sanitize [thread] [address]``.

Compiles the core and the C++ tests of tests/whale_ops with the sanitizer, and runs it: ranks as threads over the
in-process transport and over shared memory. Then the core, whale_ops/gpu and the stand-ins of tests/host_gpu: exchanges
between GPUs, in stream (stream_orders.cc), through NCCL and CUDA IPC, and with each fault of a driver planted that lets
somebody not wait, which has to be found. A sanitizer that finds anything ends it with an error.

``--orders N``: how many orders of overlapping groups are tried, others with each ``--seed``; ``--parts core streams``:
only these; ``--transports``: through these alone, and no planted faults.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.host_gpu.build import FOLDER as HOST_GPU
from tests.host_gpu.build import HostGpu
from whale_ops.build import PACKAGE, find_compiler, list_sources

ROOT = PACKAGE.parent
SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
PARTS = ("core", "streams")
_LIMIT_S = 1800.0  # of the tests, which take minutes on a loaded machine: a rank that waits for ever is an error, too
# Of tests/host_gpu/streams.h, by number: those without which streams of one process do not wait for each other.
_FAULTS = {"no wait for marks": 1, "early marks": 4, "early records": 6, "early answers": 7, "no wait in stream": 8}
_FAULTY_ORDERS = 40
# How long kernels take with a fault planted. Who does not wait for them has to come before they end, and ranks meet
# before that, which takes longer on a loaded machine: what short kernels do not show is tried with long ones.
_FAULTY_KERNELS_MS = (4, 60)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler of programs with a sanitizer.

    Attributes:
        folder: of what it makes.
        flags: of all that it compiles.
    """

    folder: Path
    flags: Sequence[str]

    def compile(self, files: Sequence[Path]) -> list[str]:
        """Compiles files, the largest first; returns the paths of the objects."""
        objects = [self.folder / f"{file.relative_to(ROOT)}.o".replace("/", "-") for file in files]
        new = [(file, made) for file, made in zip(files, objects) if not made.exists()]

        def compiled(one: tuple[Path, Path]) -> None:
            self._run("-c", str(one[0]), "-o", str(one[1]))

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compiled, sorted(new, key=lambda one: -one[0].stat().st_size)))
        return [*map(str, objects)]

    def link(self, name: str, files: Sequence[Path], *more: str) -> Path:
        """Compiles and links a program or a library."""
        self._run(*self.compile(files), "-o", str(self.folder / name), *more)
        return self.folder / name

    def _run(self, *arguments: str) -> None:
        subprocess.run([*find_compiler(), *self.flags, *arguments], check=True)


def check_core(compiler: Compiler, orders: int, seed: int) -> None:
    """Runs the core's test."""
    files = [*list_sources("core"), *sorted((ROOT / "tests" / "whale_ops").rglob("*.cc"))]
    program = compiler.link("core_test", files, "-ldl")
    subprocess.run([str(program), str(orders), str(seed)], check=True, timeout=_LIMIT_S)


def check_streams(compiler: Compiler, orders: int, seed: int, transports: Sequence[str] = ()) -> None:
    """Runs exchanges between the host's GPUs, in stream: ``orders`` through NCCL, a tenth of them through CUDA IPC.

    Args:
        transports: all orders through these, and no faults; (): as above.

    Raises:
        AssertionError: a planted fault was not found.
    """
    folder = f"-Wl,-rpath,{compiler.folder}"
    driver, nccl = "libcuda.so.1", "libnccl.so.2"
    files = [HOST_GPU / "streams.cc", HOST_GPU / "driver.cc"]
    cuda = str(compiler.link(driver, files, "-shared", f"-Wl,-soname,{driver}", "-ldl"))
    # What they take of the core they find in the program.
    libraries = [cuda, str(compiler.link(nccl, [HOST_GPU / "nccl.cc"], "-shared", f"-Wl,-soname,{nccl}", cuda, folder))]
    kernels = compiler.link("libhost_kernels.so", [HOST_GPU / "kernels.cc"], "-shared")
    files = [*list_sources("core"), *list_sources("gpu"), HOST_GPU / "stream_orders.cc"]
    program = compiler.link("stream_orders", files, "-rdynamic", "-Wl,--no-as-needed", *libraries, folder, "-ldl")
    gpus = ",".join(str(HostGpu(1 << 28, late_us=60, name=f"GPU {rank}")) for rank in range(4))
    known = {name: text for name, text in os.environ.items() if not name.startswith("CUDA_")} | {"HOST_GPUS": gpus}

    def run(count: int, transport: str, *more: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        line = [str(program), str(kernels), str(count), transport, str(seed), *more]
        return subprocess.run(line, check=check, timeout=_LIMIT_S, env=known, capture_output=not check, text=True)

    for transport in transports:
        run(orders, transport)
    if transports:
        return
    run(orders, "nccl")
    run(max(1, orders // 10), "cuda-ipc")
    missed = []
    for name, fault in _FAULTS.items():
        tried = (
            run(_FAULTY_ORDERS, "nccl", str(fault), str(kernels_ms), check=False) for kernels_ms in _FAULTY_KERNELS_MS
        )
        missed += [name] if all(done.returncode == 0 for done in tried) else []
    assert not missed, f"faults that were planted and not found: {missed}"
    print(f"{len(_FAULTS)} planted faults found", flush=True)


def main() -> None:
    """Raises subprocess.SubprocessError when it does not compile, something was found, or it does not end."""
    parser = argparse.ArgumentParser(prog="python -m tests.whale_ops.sanitize")
    parser.add_argument("sanitizers", nargs="*", default=[*SANITIZERS], metavar="SANITIZER")
    parser.add_argument("--orders", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transports", nargs="+", default=[], choices=["nccl", "cuda-ipc"])
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS)
    parser.add_argument("--folder", type=Path, help="keeps objects there, which are not compiled again")
    asked = parser.parse_args()
    for name in asked.sanitizers:
        with tempfile.TemporaryDirectory(prefix="whale-sanitize-") as made:
            folder = Path(made if asked.folder is None else asked.folder / name)
            folder.mkdir(parents=True, exist_ok=True)
            flags = ["-std=c++17", "-O1", "-g", "-pthread", "-fPIC", f"-I{ROOT}", *SANITIZERS[name]]
            compiler, start_s = Compiler(folder, flags), time.perf_counter()
            if "core" in asked.parts:
                check_core(compiler, asked.orders, asked.seed)
            if "streams" in asked.parts:
                check_streams(compiler, asked.orders, asked.seed, asked.transports)
        print(f"{name} sanitizer: nothing found ({time.perf_counter() - start_s:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
