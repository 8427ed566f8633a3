"""The core under the thread and the address sanitizer: ``python -m tests.whale_ops.sanitize [thread] [address]``.

Compiles the core and the C++ tests of tests/whale_ops with the sanitizer, and runs it: ranks
as threads over the in-process transport and over shared memory. A sanitizer that finds anything ends it with an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whale_ops.build import PACKAGE, find_compiler, list_sources

_FLAGS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
# How many orders of overlapping groups are tried on the devices.
_ORDERS = 10_000
_LIMIT_S = 1800.0  # of the tests, which take minutes on a loaded machine: a rank that waits for ever is an error, too


def run(sanitizer: str) -> None:
    """Raises subprocess.SubprocessError when it does not compile, something was found, or it does not end."""
    root, start_s = PACKAGE.parent, time.perf_counter()
    files = [*list_sources("core"), *sorted((root / "tests" / "whale_ops").rglob("*.cc"))]
    command = [*find_compiler(), "-std=c++17", "-O1", "-g", "-pthread", f"-I{root}", *_FLAGS[sanitizer]]
    with tempfile.TemporaryDirectory(prefix="whale-sanitize-") as folder:
        objects = [Path(folder) / f"{number}.o" for number in range(len(files))]

        def compiled(one: int) -> None:
            subprocess.run([*command, "-c", str(files[one]), "-o", str(objects[one])], check=True)

        largest_first = sorted(range(len(files)), key=lambda one: -files[one].stat().st_size)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compiled, largest_first))
        program = str(Path(folder) / "core_test")
        subprocess.run([*command, *map(str, objects), "-o", program, "-ldl"], check=True)
        compiled_s = time.perf_counter() - start_s
        subprocess.run([program, str(_ORDERS)], check=True, timeout=_LIMIT_S)
    tested_s = time.perf_counter() - start_s - compiled_s
    took = f"compiled in {compiled_s:.0f} s, run in {tested_s:.0f} s"
    print(f"{sanitizer} sanitizer: nothing found ({took})", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or _FLAGS:
        run(name)
