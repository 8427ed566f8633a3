"""Runs the tests of what was changed: ``python -m tests.affected [arguments of pytest]``.

Changed is what differs from the commit at which this branch left its upstream (`main` where there is none), committed
or not. A test file is affected by a change of itself, of a module that it imports, and of one whose folder it mirrors.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("whale", "whale_ops", "cost_model")
_JOBS = "2"


def changed_files() -> list[str]:
    """Returns the paths of what was changed, from the project's root."""
    base = _git("merge-base", "HEAD", "@{upstream}") or _git("merge-base", "HEAD", "main")
    tracked = _git("diff", "--name-only", base[0] if base else "HEAD")
    return [*tracked, *_git("ls-files", "--others", "--exclude-standard")]


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def affected_tests(changed: list[str]) -> list[str]:
    """Returns the test files that a change of these files affects."""
    modules = {_module(path) for path in changed if path.endswith(".py")}
    folders = {str(Path(path).parent) for path in changed if path.partition("/")[0] in PACKAGES}
    mirrored = {f"tests/{folder.removeprefix('whale/')}" for folder in folders if folder != "whale"}
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        if name in changed or str(Path(name).parent) in mirrored or modules & _imports(path):
            found.append(name)
    return found


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(path: Path) -> set[str]:
    """Returns the modules that a file imports, and what it takes from them, which may be modules as well."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def main() -> int:
    """Runs them; exit code 0 too if there is none."""
    found = affected_tests(changed_files())
    print(f"{len(found)} test files are affected by what was changed")
    if not found:
        return 0
    line = [sys.executable, "-m", "pytest", "-q", "-n", _JOBS, "--dist", "loadfile", "-m", "not long"]
    return subprocess.run([*line, *sys.argv[1:], *found], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
