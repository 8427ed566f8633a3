"""Format and slips of the C++ code: ``python -m tests.whale_ops.lint [--fix]``.

clang-format holds all of it to `.clang-format`; with ``--fix`` it formats it. clang-tidy looks for what `.clang-tidy`
lists in what needs nobody else's headers: the core, the libraries for GPUs and mpirun, and the programs of the tests.
It reads units, as the compiler does (`whale_ops/build.py`). TensorFlow's headers would double its time.

Decision: 0144.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whale_ops.build import PACKAGE, list_units

ROOT = PACKAGE.parent
_SUFFIXES = {".cc", ".cpp", ".cu", ".h"}
_FOLDERS = ("whale_ops", "tests", "benchmarks")
_PARTS = ("core", "gpu", "loopback")
_FLAGS = ["-std=c++17", f"-iquote{ROOT}", "-DWHALE_CORE_DIGEST=0"]
_AT_ONCE = 2


def _tool(name: str) -> str:
    """Returns the program that pip has installed beside this Python."""
    return str(Path(sys.executable).with_name(name))


def check_format(fix: bool) -> bool:
    """Returns whether all files are formatted; makes them so if asked to."""
    files = [path for top in _FOLDERS for path in sorted((ROOT / top).rglob("*")) if path.suffix in _SUFFIXES]
    mode = ["-i"] if fix else ["--dry-run", "-Werror"]
    return subprocess.run([_tool("clang-format"), *mode, *files]).returncode == 0


def find_slips() -> bool:
    """Returns whether clang-tidy has found something, which it prints."""
    groups = [unit.sources for part in _PARTS for unit in list_units(part)]
    groups += [(path,) for path in sorted((ROOT / "tests" / "whale_ops").rglob("*.cc"))]
    with tempfile.TemporaryDirectory(prefix="whale-lint-") as folder:

        def run(number: int) -> subprocess.CompletedProcess[str]:
            source = Path(folder) / f"{number}.cc"
            source.write_text(_including(groups[number]))
            command = [_tool("clang-tidy"), "--quiet", f"--config-file={ROOT / '.clang-tidy'}", str(source), "--"]
            return subprocess.run([*command, *_FLAGS], cwd=ROOT, capture_output=True, text=True)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            done = list(pool.map(run, range(len(groups))))
    for one in done:
        if one.returncode != 0:
            print(one.stdout, one.stderr, sep="", file=sys.stderr)
    return any(one.returncode != 0 for one in done)


def _including(files: Sequence[Path]) -> str:
    return "".join(f'#include "{path.relative_to(ROOT)}"\n' for path in files)


if __name__ == "__main__":
    formatted = check_format(fix="--fix" in sys.argv[1:])
    if find_slips() or not formatted:
        sys.exit("C++: `python -m tests.whale_ops.lint --fix` formats; the rest is what clang-tidy says")
