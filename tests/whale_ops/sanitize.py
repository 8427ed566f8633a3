"""The core under the thread and the address sanitizer: ``python -m tests.whale_ops.sanitize [thread] [address]``.

Compiles the core and the C++ tests of tests/whale_ops with the sanitizer, and runs it: ranks
as threads over the in-process transport and over shared memory. A sanitizer that finds anything ends it with an error.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from whale_ops.build import PACKAGE, find_compiler, sources

_FLAGS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
# How many orders of overlapping groups are tried on the devices.
_ORDERS = {"thread": "10000", "address": "1000"}


def run(sanitizer: str) -> None:
    """Raises subprocess.CalledProcessError when it does not compile, or something was found."""
    root = PACKAGE.parent
    tests = sorted((root / "tests" / "whale_ops").rglob("*.cc"))
    with tempfile.TemporaryDirectory(prefix="whale-sanitize-") as folder:
        program = str(Path(folder) / "core_test")
        flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-I{root}", *_FLAGS[sanitizer]]
        subprocess.run(
            [*find_compiler(), *flags, *map(str, [*sources("core"), *tests]), "-o", program, "-ldl"], check=True
        )
        subprocess.run([program, _ORDERS[sanitizer]], check=True)
    print(f"{sanitizer} sanitizer: nothing found", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or _FLAGS:
        run(name)
