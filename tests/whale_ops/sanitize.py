"""The core under the thread and the address sanitizer: ``python -m tests.whale_ops.sanitize [thread] [address]``.

Compiles the core and tests/whale_ops/core_test.cc, with its device, with the sanitizer, and runs it: ranks
as threads over the in-process transport and over shared memory. A sanitizer that finds anything ends it with an error.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from whale_ops.build import PACKAGE, find_compiler

_FLAGS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}


def run(sanitizer: str) -> None:
    """Raises subprocess.CalledProcessError when it does not compile, or something was found."""
    root = PACKAGE.parent
    sources = [path for path in sorted((PACKAGE / "core").rglob("*.cc")) if path.name != "mpi_transport.cc"]
    sources += [root / "tests" / "whale_ops" / name for name in ("core_test.cc", "host_device.cc")]
    with tempfile.TemporaryDirectory(prefix="whale-sanitize-") as folder:
        program = str(Path(folder) / "core_test")
        flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-I{root}", *_FLAGS[sanitizer]]
        subprocess.run([*find_compiler(), *flags, *map(str, sources), "-o", program, "-ldl"], check=True)
        subprocess.run([program], check=True)
    print(f"{sanitizer} sanitizer: nothing found", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or _FLAGS:
        run(name)
